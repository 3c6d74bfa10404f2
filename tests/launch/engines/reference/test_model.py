"""The paged attention gives what the model's own attention gives, or the model is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from launch.engines.reference import ReferenceEngine, UnsupportedModelError, load_model
from launch.engines.reference.model import StepPart
from pd_cache.cluster import ModelConfig, RandomModel
from pd_cache.layout import PageKind

from .conftest import TINY, prompt_of, request_of, tiny_config, tokens_of

transformers = pytest.importorskip("transformers")


def folder_config(path, **changes):
    return tiny_config(model=ModelConfig(name="folder", path=str(path)), **changes)


def small(kind, **changes):
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return kind(**{**shape, **heads, **changes})


def save(config, folder, kind=None) -> str:
    torch.manual_seed(3)
    model = (kind or transformers.AutoModelForCausalLM.from_config)(config)
    model.save_pretrained(folder)
    return str(folder)


def own_greedy(model, prompt, count: int) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and tokens with the model's own attention over the whole text, no KV kept."""
    tokens, logits = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logits.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return logits, tokens[len(prompt) :]


def paged_greedy(paged, prompt, count: int, step: int = 16) -> tuple[list[torch.Tensor], list[int]]:
    blocks = list(range(40, 8, -1))
    logits, produced = [], []
    for start in range(0, len(prompt), step):
        end = min(start + step, len(prompt))
        row = paged.step([StepPart(prompt[start:end], start, blocks, end == len(prompt))])
    for position in range(len(prompt), len(prompt) + count):
        logits.append(row[0])
        produced.append(int(row[0].argmax()))
        row = paged.step([StepPart(produced[-1:], position, blocks, True)])
    return logits, produced


def assert_same_as_own(paged, own, prompt) -> None:
    own_logits, own_tokens = own_greedy(own, prompt, 6)
    paged_logits, paged_tokens = paged_greedy(paged, prompt, 6)
    torch.testing.assert_close(torch.stack(paged_logits), torch.stack(own_logits), rtol=1e-4, atol=1e-5)
    assert paged_tokens == own_tokens


def test_random_model_over_pages_gives_what_its_own_attention_gives():
    paged = load_model(tiny_config())
    config = small(
        transformers.LlamaConfig, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False
    )
    torch.manual_seed(TINY.seed)
    assert_same_as_own(paged, transformers.LlamaForCausalLM(config).eval(), prompt_of(45))


@pytest.mark.parametrize(
    "config",
    [
        small(transformers.LlamaConfig, eos_token_id=None),
        small(transformers.Qwen2Config, eos_token_id=None),
        small(transformers.Qwen3Config, head_dim=32, eos_token_id=None),
        transformers.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=512, eos_token_id=None),
        small(transformers.MistralConfig, sliding_window=256, eos_token_id=None),
    ],
    ids=lambda config: config.model_type,
)
def test_folder_over_pages_gives_what_its_own_attention_gives(config, tmp_path):
    path = save(config, tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
    assert_same_as_own(load_model(folder_config(path)), own, prompt_of(45))


def test_contexts_beyond_a_padding_quantum_are_right():
    paged = load_model(tiny_config(max_model_len=512))
    prompt = prompt_of(300)
    with torch.inference_mode():
        paged._model.set_attn_implementation("eager")
        own = paged._model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, -1]
        paged._model.set_attn_implementation("pd_cache_paged")
    blocks = list(range(64))
    for cut in (299, 256, 100):
        paged.step([StepPart(prompt[:cut], 0, blocks, False)])
        logits = paged.step([StepPart(prompt[cut:], cut, blocks, True)])
        torch.testing.assert_close(logits[0], own, rtol=1e-4, atol=1e-5)


def test_how_a_prompt_is_cut_into_steps_and_what_runs_beside_it_changes_nothing():
    paged = load_model(tiny_config(max_model_len=512, num_blocks=128))
    prompt, blocks, other = prompt_of(290), list(range(40)), list(range(50, 90))

    def computed(cuts, beside):
        paged.kv.buffer.zero_()
        for start, end in itertools.pairwise(cuts):
            parts = [StepPart(prompt[start:end], start, blocks, True)]
            if beside:
                parts.insert(0, StepPart(prompt[:7], 0, other, True))
            logits = paged.step(parts)[-1]
        return torch.cat([logits, paged.kv.buffer[:, :37].flatten()])

    whole = computed([0, 290], beside=False)
    for cuts in ([0, 289, 290], [0, 16, 32, 256, 290], [0, 1, 77, 260, 288, 290]):
        for beside in (False, True):
            # Bit for bit on the machines it was tried on; a CPU with other kernels may round differently.
            torch.testing.assert_close(computed(cuts, beside), whole, rtol=0, atol=1e-6)


def test_what_a_block_held_before_does_not_leak_into_its_next_tenant():
    paged = load_model(tiny_config())
    fresh = paged_greedy(paged, prompt_of(20), 3)
    paged.kv.buffer.fill_(float("nan"))
    assert paged_greedy(paged, prompt_of(20), 3)[1] == fresh[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_served(dtype):
    engine = ReferenceEngine.open(tiny_config(dtype=dtype))
    try:
        assert len(tokens_of(engine.submit(request_of(20)))) == 6
    finally:
        engine.close()


def test_all_layers_lie_in_one_allocation_of_heads_first_pages():
    kv = load_model(tiny_config()).kv
    tensors = list(kv.kv_caches.values())
    assert [tuple(tensor.shape) for tensor in tensors] == [(64, 2, 8, 32)] * 2
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    assert kv.layout.kind is PageKind.HEADS_FIRST
    assert not tensors[0].is_inference()


def test_a_seed_is_one_model_and_one_identity():
    base = load_model(tiny_config())
    again = load_model(tiny_config(num_blocks=50, step_tokens=64))
    other = load_model(tiny_config(model=ModelConfig(name="tiny", random=RandomModel(seed=1, layers=1))))
    half = load_model(tiny_config(dtype="bfloat16"))
    assert base.identity == again.identity
    assert len({base.identity, other.identity, half.identity}) == 3
    assert paged_greedy(base, prompt_of(20), 4)[1] == paged_greedy(again, prompt_of(20), 4)[1]


def test_loading_does_not_touch_the_callers_random_numbers():
    torch.manual_seed(5)
    first = torch.rand(1)
    torch.manual_seed(5)
    load_model(tiny_config())
    assert torch.equal(torch.rand(1), first)


def test_a_folders_identity_follows_its_weights(tmp_path):
    path = save(small(transformers.LlamaConfig), tmp_path)
    before = load_model(folder_config(path)).identity
    assert load_model(folder_config(path)).identity == before
    file = tmp_path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    assert load_model(folder_config(path)).identity != before


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (small(transformers.MistralConfig, sliding_window=64), "sliding window of 64"),
        (small(transformers.Gemma2Config, head_dim=16), "softcap|sliding window"),
        (small(transformers.LlamaConfig, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic rotary"),
        (small(transformers.LlamaConfig, max_position_embeddings=128), "128 positions"),
        (
            transformers.MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, state_size=4),
            "mamba|attention",
        ),
    ],
    ids=["sliding", "softcap", "dynamic-rope", "positions", "state-space"],
)
def test_a_model_that_pages_cannot_serve_is_refused_with_the_reason(config, reason, tmp_path):
    path = save(config, tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"'folder' .*({reason})"):
        load_model(folder_config(path))


def test_latent_attention_is_refused_before_its_weights_are_read(tmp_path):
    config = transformers.DeepseekV2Config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        load_model(folder_config(tmp_path))


def test_an_encoder_decoder_is_refused(tmp_path):
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(folder_config(tmp_path))


def test_a_folder_that_is_missing_or_lacks_weights_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"no folder with a config\.json"):
        load_model(folder_config(tmp_path / "nowhere"))
    path = save(small(transformers.LlamaConfig), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors"):
        load_model(folder_config(path))


def test_a_folder_with_some_weights_missing_is_refused(tmp_path):
    from safetensors.torch import load_file, save_file

    path = save(small(transformers.LlamaConfig), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="lack 1 weights"):
        load_model(folder_config(path))
