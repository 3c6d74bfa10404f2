"""A causal LM from a Hugging Face folder, built by transformers, with attention over pages.

Nothing is downloaded, and no code of the folder is run. What pages cannot serve is refused in three places: by the model's configuration,
before its weights are read; by the arguments of its attention; and by `PagedModel.probe`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from launch.engines.reference.attention import PagedStep, current_step, paged_attention
from launch.engines.reference.causal import ModelShape
from pd_cache.errors import UnsupportedModelError

_ATTENTION_NAME = "pd_cache_paged"
"""The name under which transformers knows `_attention`."""


class FolderModel:
    """A `CausalLM`, see there. Raises UnsupportedModelError, with the reason, if it cannot be served."""

    def __init__(self, folder: Path, dtype: torch.dtype, max_model_len: int) -> None:
        _register()
        self._model = _load(folder, dtype)
        self._model.eval()
        text = self._model.config.get_text_config()
        _check_config(text, max_model_len)
        heads = int(text.num_attention_heads)
        self.shape = ModelShape(
            vocab_size=int(text.vocab_size),
            layers=int(text.num_hidden_layers),
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            eos_token_ids=_eos_token_ids(self._model),
        )

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        output = self._model(input_ids=tokens[None], position_ids=positions[None], use_cache=False, logits_to_keep=rows)
        logits: torch.Tensor = output.logits
        if logits.shape[:2] != (1, len(rows)):
            raise UnsupportedModelError(f"it gives logits {list(logits.shape)} where {len(rows)} rows were asked for")
        return logits[0]

    def own_logits(self, tokens: torch.Tensor) -> torch.Tensor:
        with _own_attention(self._model):
            logits: torch.Tensor = self._model(input_ids=tokens[None], use_cache=False).logits
        return logits[0, -1]


@functools.cache
def _register() -> None:
    disable_progress_bar()  # a server's log needs no progress bar, and each starts a thread that stays
    AttentionInterface.register(_ATTENTION_NAME, _attention)


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(_ATTENTION_NAME)


def _load(folder: Path, dtype: torch.dtype) -> Any:
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError("there is no folder with a config.json at this path")
    _check_config_before_loading(AutoConfig.from_pretrained(str(folder), local_files_only=True))
    model, loading = AutoModelForCausalLM.from_pretrained(
        str(folder),
        local_files_only=True,
        dtype=dtype,
        attn_implementation=_ATTENTION_NAME,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UnsupportedModelError(f"its files lack {len(missing)} weights, e.g. {missing[0]}")
    return model


def _check_config_before_loading(config: Any) -> None:
    """Refuses what can be recognised without reading the weights, which may be large."""
    text = config.get_text_config()
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError("it is an encoder-decoder, not a causal LM")
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError("it uses multi-head latent attention (MLA)")
    other = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if other:
        raise UnsupportedModelError(f"it has layers that are no full attention: {', '.join(sorted(other))}")
    if getattr(text, "attention_chunk_size", None):
        raise UnsupportedModelError("it uses chunked attention")


def _check_config(text: Any, max_model_len: int) -> None:
    _check_config_before_loading(text)
    window = getattr(text, "sliding_window", None)
    slides = "sliding_attention" in (getattr(text, "layer_types", None) or ("sliding_attention",))
    if window and slides and getattr(text, "use_sliding_window", True) and window < max_model_len:
        raise UnsupportedModelError(
            f"it attends to a sliding window of {window} tokens only; max_model_len {max_model_len} must not exceed it"
        )
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("dynamic", "longrope"):
        raise UnsupportedModelError(
            f"its {kind} rotary embedding changes the keys of a prefix with the length of what follows"
        )
    longest = getattr(text, "max_position_embeddings", None)
    if longest and max_model_len > longest:
        raise UnsupportedModelError(f"max_model_len {max_model_len} is beyond the {longest} positions it was made for")


def _eos_token_ids(model: Any) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = model.config.get_text_config().eos_token_id
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list) else [found])


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Implements transformers' attention interface. Raises UnsupportedModelError for a kind of attention that pages cannot serve."""
    layer = getattr(module, "layer_idx", None)
    _refuse_variants(current_step(), module, key, value, attention_mask, kwargs)
    assert isinstance(layer, int)
    return paged_attention(layer, query, key, value, scaling), None


_CHANGES_ATTENTION = ("softcap", "s_aux", "position_bias", "head_mask", "block_mask")


def _refuse_variants(
    step: PagedStep,
    module: torch.nn.Module,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    kv = step.kv
    if not isinstance(getattr(module, "layer_idx", None), int):
        raise UnsupportedModelError("its attention modules do not say which layer they are")
    rows = key.shape[2]
    expected = (1, kv.kv_heads, rows, kv.head_dim)
    if tuple(key.shape) != expected or tuple(value.shape) != expected:
        raise UnsupportedModelError(
            f"its attention makes keys {list(key.shape)} and values {list(value.shape)}, not {list(expected)} "
            "(latent attention, or heads that differ by layer)"
        )
    if attention_mask is not None:
        raise UnsupportedModelError("it brings a mask of its own to attention")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedModelError("its attention is not causal")
    window = kwargs.get("sliding_window")
    if window is not None and window < step.max_context:
        raise UnsupportedModelError(f"it attends to a sliding window of {window} tokens only")
    for name in _CHANGES_ATTENTION:
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(f"its attention uses {name}")
