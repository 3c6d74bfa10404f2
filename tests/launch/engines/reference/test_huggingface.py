"""Models of transformers over pages give what their own attention gives, or are refused with the reason."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from launch.engines.reference import load_model
from launch.engines.reference.llama import RandomLlama
from pd_cache.cluster import ModelConfig
from pd_cache.errors import UnsupportedModelError

from .conftest import TINY, paged_greedy, prompt_of, tiny_config


@pytest.fixture(scope="module")
def transformers() -> ModuleType:
    """Imported for the tests that run here alone: that takes seconds, also in workers that only collect this file."""
    module = pytest.importorskip("transformers")
    module.utils.logging.disable_progress_bar()  # each bar of a model that is saved or loaded would start a thread that stays
    return module


def folder_config(path, **changes):
    return tiny_config(model=ModelConfig(name="folder", path=str(path)), **changes)


def small(kind, **changes):
    shape = {"vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    return kind(**{**shape, **heads, **changes})


def save(transformers, config, folder) -> str:
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return str(folder)


def own_greedy(model, prompt, count: int) -> tuple[list[torch.Tensor], list[int]]:
    """Logits and tokens with the model's own attention over the whole text, no KV kept."""
    tokens, logits = list(prompt), []
    with torch.inference_mode():
        for _ in range(count):
            logits.append(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1])
            tokens.append(int(logits[-1].argmax()))
    return logits, tokens[len(prompt) :]


def assert_same_as_own(paged, own, prompt) -> None:
    own_logits, own_tokens = own_greedy(own, prompt, 6)
    paged_logits, paged_tokens = paged_greedy(paged, prompt, 6)
    torch.testing.assert_close(torch.stack(paged_logits), torch.stack(own_logits), rtol=1e-4, atol=1e-5)
    assert paged_tokens == own_tokens


def test_random_model_is_transformers_llama_of_its_weights_over_pages_and_alone(transformers):
    paged = load_model(tiny_config())
    config = small(
        transformers.LlamaConfig, bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False
    )
    llama = transformers.LlamaForCausalLM(config).eval()
    loaded = llama.load_state_dict(RandomLlama(TINY, torch.float32).weights, strict=False)
    assert not loaded.unexpected_keys
    assert all("norm" in name for name in loaded.missing_keys), "which stay one"
    assert_same_as_own(paged, llama, prompt_of(45))
    own = paged._model.own_logits(torch.tensor(prompt_of(45)))
    torch.testing.assert_close(own, own_greedy(llama, prompt_of(45), 1)[0][0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        lambda of: small(of.LlamaConfig, eos_token_id=None),
        lambda of: small(of.Qwen2Config, eos_token_id=None),
        lambda of: small(of.Qwen3Config, head_dim=32, eos_token_id=None),
        lambda of: of.GPT2Config(vocab_size=300, n_embd=64, n_layer=2, n_head=4, n_positions=512, eos_token_id=None),
        lambda of: small(of.MistralConfig, sliding_window=256, eos_token_id=None),
    ],
    ids=["llama", "qwen2", "qwen3", "gpt2", "mistral"],
)
def test_folder_over_pages_gives_what_its_own_attention_gives(transformers, config, tmp_path):
    path = save(transformers, config(transformers), tmp_path)
    own = transformers.AutoModelForCausalLM.from_pretrained(path, local_files_only=True).eval()
    assert_same_as_own(load_model(folder_config(path)), own, prompt_of(45))


def test_a_folders_identity_follows_its_weights(transformers, tmp_path):
    path = save(transformers, small(transformers.LlamaConfig), tmp_path)
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
        (lambda of: small(of.MistralConfig, sliding_window=64), "sliding window of 64"),
        (lambda of: small(of.Gemma2Config, head_dim=16), "softcap|sliding window"),
        (lambda of: small(of.LlamaConfig, rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "dynamic rotary"),
        (lambda of: small(of.LlamaConfig, max_position_embeddings=128), "128 positions"),
        (
            lambda of: of.MambaConfig(vocab_size=300, hidden_size=64, num_hidden_layers=2, state_size=4),
            "mamba|attention",
        ),
    ],
    ids=["sliding", "softcap", "dynamic-rope", "positions", "state-space"],
)
def test_a_model_that_pages_cannot_serve_is_refused_with_the_reason(transformers, config, reason, tmp_path):
    path = save(transformers, config(transformers), tmp_path)
    with pytest.raises(UnsupportedModelError, match=rf"'folder' .*({reason})"):
        load_model(folder_config(path))


def test_latent_attention_is_refused_before_its_weights_are_read(transformers, tmp_path):
    config = transformers.DeepseekV2Config(num_hidden_layers=1)
    config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="latent attention"):
        load_model(folder_config(tmp_path))


def test_an_encoder_decoder_is_refused(transformers, tmp_path):
    transformers.T5Config().save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="encoder-decoder"):
        load_model(folder_config(tmp_path))


def test_a_folder_that_is_missing_or_lacks_weights_is_refused(transformers, tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"no folder with a config\.json"):
        load_model(folder_config(tmp_path / "nowhere"))
    path = save(transformers, small(transformers.LlamaConfig), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"model\.safetensors"):
        load_model(folder_config(path))


def test_a_folder_with_some_weights_missing_is_refused(transformers, tmp_path):
    from safetensors.torch import load_file, save_file

    path = save(transformers, small(transformers.LlamaConfig), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match="lack 1 weights"):
        load_model(folder_config(path))
