"""Small models of vLLM's architectures: their configurations, and random weights that are nowhere but in
memory."""

import zlib
from pathlib import Path

import torch
import transformers
import yaml
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from vllm.transformers_utils.config import _CONFIG_REGISTRY

_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
VOCABULARY = _FILE["every"]["vocab_size"]
_KINDS = {name: kind for kind, name in reversed(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())}
_PARTIAL = {"sliding_attention", "linear_attention", "mamba", "conv"}
"""Kinds of layers beside which vLLM needs one with full attention."""


def has_configuration(architecture):
    return architecture in _FILE["own"] or architecture in _KINDS


def configuration(architecture):
    """Returns the config.json of a small model. KeyError if no type of configuration is known for the
    architecture."""
    own = dict(_FILE["own"].get(architecture, {}))
    kind = own.pop("model_type", None) or _KINDS[architecture]
    made = _CONFIG_REGISTRY[kind] if kind in _CONFIG_REGISTRY else transformers.CONFIG_MAPPING[kind]
    known = made().to_dict().keys() | made.attribute_map.keys()
    # a configuration of another architecture does not know the keys of this one
    known |= _FILE["every"].keys() - {"sliding_window"} if architecture not in _KINDS else set()
    settings = {key: value for key, value in _FILE["every"].items() if key in known}
    config = made(**{**settings, **own}).to_dict()
    types = config.get("layer_types")
    if types and set(types) <= _PARTIAL:
        types[-1] = "full_attention"
    return {**config, "architectures": [architecture], "model_type": kind}


def fill(module):
    """Gives each parameter random values, of which its name is the seed: all engines of a model have the same
    weights.

    They are large enough for each token to change what follows, which vLLM's own dummy weights are not.
    """
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            continue
        values = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
        last = name.rpartition(".")[2]
        if last in ("A", "A_log"):  # states that keep a token for about a hundred others
            values = torch.full_like(values, -0.01 if last == "A" else -5)
        elif last == "dt_bias":
            values = torch.ones_like(values)
        elif tensor.dim() < 2:
            values = values * 0.1 + ("norm" in name and last == "weight")
        else:
            values *= 1.5 / tensor.shape[-1] ** 0.5
        tensor.copy_(values)
