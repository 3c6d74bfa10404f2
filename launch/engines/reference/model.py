"""Loading a causal LM and computing steps of it over the paged buffer."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from launch.engines.reference.attention import (
    ATTENTION_NAME,
    ROW_QUANTUM,
    PagedKV,
    PagedStep,
    Segment,
    attending,
    cut_segments,
    paged_attention,
    round_up,
)
from launch.engines.reference.errors import UnsupportedModelError
from pd_cache.cluster import ModelConfig, RandomModel, ReferenceEngineConfig
from pd_cache.weights import weights_digest

_PROBE_TOKENS = 20
_PROBE_SPLIT = 7
_PROBE_BLOCK = 8


class StepPart(NamedTuple):
    """The tokens of one request in a step."""

    tokens: Sequence[int]
    position: int
    """Position of the first of them; everything before it lies in the pages already."""
    blocks: Sequence[int]
    """The blocks that the request owns, in order."""
    wants_logits: bool
    """Whether the last of these tokens predicts one that is wanted."""


class PagedModel:
    """A causal LM whose attention reads one paged buffer. Not thread-safe: one thread computes.

    Load one with `load_model`. `kv` is the buffer, `identity` names the weights for the cache's namespace.
    """

    def __init__(self, model: Any, name: str, identity: str, kv: PagedKV, max_context: int) -> None:
        self.name = name
        self.identity = identity
        self.kv = kv
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.eos_token_ids = _eos_token_ids(model)
        self._model = model
        self._max_context = max_context

    def step(self, parts: Sequence[StepPart]) -> torch.Tensor:
        """Compute the tokens of all parts and leave their KV in the pages.

        Returns float32 logits `[parts that want some, vocab_size]`, in the order of the parts.
        """
        return self._step(self.kv, parts)[0]

    @torch.inference_mode()
    def _step(self, kv: PagedKV, parts: Sequence[StepPart]) -> tuple[torch.Tensor, set[int]]:
        tokens: list[int] = []
        positions: list[int] = []
        segments: list[Segment] = []
        slots: list[torch.Tensor] = []
        wanted: list[int] = []
        for part in parts:
            count = len(part.tokens)
            end = part.position + count
            blocks = part.blocks[: round_up(end, kv.block_size) // kv.block_size]
            segments += cut_segments(len(tokens), part.position, count, blocks, kv.block_size)
            slots.append(kv.slots(blocks, end)[part.position :])
            tokens += part.tokens
            positions += range(part.position, end)
            if part.wants_logits:
                wanted.append(len(tokens) - 1)
        padding = [0] * (round_up(len(tokens), ROW_QUANTUM) - len(tokens))
        rows = wanted + wanted[-1:] * (round_up(len(wanted), ROW_QUANTUM) - len(wanted))
        step = PagedStep(kv, torch.cat(slots), tuple(segments), self._max_context)
        with attending(step):
            output = self._model(
                input_ids=torch.tensor([tokens + padding]),
                position_ids=torch.tensor([positions + padding]),
                use_cache=False,
                logits_to_keep=torch.tensor(rows, dtype=torch.int64),
            )
        logits = output.logits
        if logits.shape[:2] != (1, len(rows)):
            raise UnsupportedModelError(f"it gives logits {list(logits.shape)} where {len(rows)} rows were asked for")
        return logits[0, : len(wanted)].float(), step.layers_seen

    def probe(self) -> None:
        """Check that this model computes the same over pages, in two steps, as with its own attention in one.

        UnsupportedModelError with the reason if not.
        """
        text = self._model.config.get_text_config()
        layers = int(text.num_hidden_layers)
        kv = PagedKV(
            layers=layers,
            num_blocks=_PROBE_TOKENS // _PROBE_BLOCK + 1,
            kv_heads=self.kv.kv_heads,
            block_size=_PROBE_BLOCK,
            head_dim=self.kv.head_dim,
            dtype=self.kv.buffer.dtype,
        )
        tokens = [(7 + 13 * index) % self.vocab_size for index in range(_PROBE_TOKENS)]
        blocks = list(reversed(range(kv.num_blocks)))
        _, seen = self._step(kv, [StepPart(tokens[:_PROBE_SPLIT], 0, blocks, False)])
        if seen != set(range(layers)):
            missing = sorted(set(range(layers)) - seen)
            raise UnsupportedModelError(
                f"layers {missing} of {layers} do not attend through transformers' attention interface "
                "(state-space, convolution or their own attention)"
            )
        paged, _ = self._step(kv, [StepPart(tokens[_PROBE_SPLIT:], _PROBE_SPLIT, blocks, True)])
        with torch.inference_mode(), _own_attention(self._model):
            own = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].float()
        tolerance = 1e-3 if kv.buffer.dtype == torch.float32 else 0.1
        error = float((paged[0] - own).abs().max() / own.abs().max().clamp(min=1e-6))
        if not error <= tolerance:
            raise UnsupportedModelError(
                f"its logits over pages differ from its own by {error:.2g} of their size (allowed: {tolerance})"
            )


def load_model(config: ReferenceEngineConfig) -> PagedModel:
    """Load what `config.model` describes, allocate its paged buffer and check that the two fit.

    Nothing is downloaded, and no code of a model's folder is run. UnsupportedModelError, naming model and reason, if it
    cannot be served.
    """
    _register()
    dtype: torch.dtype = getattr(torch, config.dtype)
    source = config.model
    try:
        if source.random is not None:
            model = _random_model(source.random, config.max_model_len, dtype)
            identity = _random_identity(source.random, config.dtype)
        else:
            assert source.path is not None
            folder = Path(source.path)
            _check_folder(folder)
            model = _folder_model(folder, dtype)
            identity = f"folder:{config.dtype}:{weights_digest(folder)}"
        model.eval()
        text = model.config.get_text_config()
        _check_config(text, config.max_model_len)
        heads = int(text.num_attention_heads)
        kv = PagedKV(
            layers=int(text.num_hidden_layers),
            num_blocks=config.num_blocks,
            kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
            block_size=config.block_size,
            head_dim=int(getattr(text, "head_dim", None) or text.hidden_size // heads),
            dtype=dtype,
        )
        paged = PagedModel(model, source.name, identity, kv, config.max_model_len)
        paged.probe()
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"model {_describe(source)} cannot be served: {error}") from None
    except (
        Exception
    ) as error:  # what transformers raises for a folder that it cannot make a model of has no common root
        raise UnsupportedModelError(
            f"model {_describe(source)} cannot be served: {type(error).__name__}: {error}"
        ) from error
    return paged


def _describe(source: ModelConfig) -> str:
    return f"{source.name!r} ({source.path})" if source.path else f"{source.name!r} (random)"


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # a server's log is no place for one, and each starts a thread that stays

    AttentionInterface.register(ATTENTION_NAME, paged_attention)


@contextmanager
def _own_attention(model: Any) -> Iterator[None]:
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


def _random_model(random: RandomModel, max_model_len: int, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=random.vocab_size,
        hidden_size=random.hidden_size,
        intermediate_size=random.intermediate_size,
        num_hidden_layers=random.layers,
        num_attention_heads=random.heads,
        num_key_value_heads=random.kv_heads,
        max_position_embeddings=max_model_len,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation=ATTENTION_NAME,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(random.seed)
        # Drawn in float32 whatever the dtype, so that a seed is one model.
        return LlamaForCausalLM(config).to(dtype)


def _random_identity(random: RandomModel, dtype: str) -> str:
    described = json.dumps({"dtype": dtype, **msgspec.to_builtins(random)}, sort_keys=True)
    return f"random-llama-1:{hashlib.sha256(described.encode()).hexdigest()[:32]}"


def _check_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise UnsupportedModelError("there is no folder with a config.json at this path")


def _folder_model(folder: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    _check_config_before_loading(AutoConfig.from_pretrained(str(folder), local_files_only=True))
    model, loading = AutoModelForCausalLM.from_pretrained(
        str(folder),
        local_files_only=True,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        output_loading_info=True,
    )
    missing = sorted(loading["missing_keys"])
    if missing:
        raise UnsupportedModelError(f"its files lack {len(missing)} weights, e.g. {missing[0]}")
    return model


def _check_config_before_loading(config: Any) -> None:
    """What can be told without reading weights, which may be many."""
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
