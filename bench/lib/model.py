"""A small Llama with seeded random weights and a tokenizer of numbers, in a folder as Hugging Face lays them out."""

from __future__ import annotations

from pathlib import Path

VOCABULARY = 4096


def write_model(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 256,
    layers: int = 4,
    heads: int = 8,
    kv_heads: int = 4,
    positions: int = 16384,
) -> Path:
    """Returns the folder; the same seed gives the same weights."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=positions,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.05,  # far from each other, so that rounding never decides which token is next
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer = Tokenizer(WordLevel({f"t{index}": index for index in range(VOCABULARY)}, unk_token="t2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="t0",
        eos_token="t1",
        unk_token="t2",
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    ).save_pretrained(folder)
    return folder
