"""Small models with images and random weights, in which an image decides which tokens come after it."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

WORDS = 512
SIDE, PATCH = 80, 8
PATCHES = (SIDE // PATCH) ** 2
"""Of an image: it reaches into two or three chunks."""
TEXT = {
    "vocab_size": WORDS, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "initializer_range": 0.2,
}  # fmt: skip


def write_llava(folder):
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=PATCH
    )  # fmt: skip
    _write_weights(
        folder,
        transformers.LlavaForConditionalGeneration,
        transformers.LlavaConfig(
            vision_config=vision,
            text_config=transformers.LlamaConfig(**TEXT, tie_word_embeddings=False),
            image_token_id=3,
            image_seq_length=PATCHES,
            vision_feature_layer=-1,
        ),
    )
    images = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    transformers.LlavaProcessor(
        images,
        _tokenizer({"image_token": "<image>"}),
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ).save_pretrained(folder)


def write_qwen(folder):
    """A Qwen2.5-VL: a token of an image has three positions (M-RoPE)."""
    vision = {
        "depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "patch_size": PATCH // 2, "window_size": 4 * PATCH,
        "out_hidden_size": TEXT["hidden_size"], "fullatt_block_indexes": [1],
    }  # fmt: skip
    _write_weights(
        folder,
        transformers.Qwen2_5_VLForConditionalGeneration,
        transformers.Qwen2_5_VLConfig(
            vision_config=vision,
            text_config={**TEXT, "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6]}},
            vision_start_token_id=3,
            image_token_id=4,
            vision_end_token_id=5,
            video_token_id=6,
        ),
    )
    pixels = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessorPil(patch_size=PATCH // 2, size=pixels),
        _tokenizer(
            {
                "vision_start_token": "<|vision_start|>",
                "image_token": "<|image_pad|>",
                "vision_end_token": "<|vision_end|>",
                "video_token": "<|video_pad|>",
            }
        ),
        transformers.Qwen2VLVideoProcessor(patch_size=PATCH // 2, size=pixels),
    ).save_pretrained(folder)


def write_gemma(folder):
    """A Gemma 3: one of its two layers has a window."""
    vision = transformers.SiglipVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=SIDE, patch_size=PATCH,
        vision_use_head=False,
    )  # fmt: skip
    text = transformers.Gemma3TextConfig(
        **TEXT, head_dim=32, query_pre_attn_scalar=32, sliding_window=128, layer_types=["sliding_attention", "full_attention"]
    )  # fmt: skip
    _write_weights(
        folder,
        transformers.Gemma3ForConditionalGeneration,
        transformers.Gemma3Config(
            vision_config=vision,
            text_config=text,
            mm_tokens_per_image=PATCHES,
            boi_token_index=3,
            image_token_index=4,
            eoi_token_index=5,
        ),
    )
    tokenizer = _tokenizer(
        {"boi_token": "<start_of_image>", "image_token": "<image_soft_token>", "eoi_token": "<end_of_image>"},
        *("\n" * count for count in range(1, 5)),
    )
    transformers.Gemma3Processor(
        transformers.Gemma3ImageProcessorPil(size={"height": SIDE, "width": SIDE}),
        tokenizer,
        image_seq_length=PATCHES,
    ).save_pretrained(folder)


class MediaModel(NamedTuple):
    write: Callable[[Path], None]
    """Writes it into a folder."""
    image: str
    """What stands for an image in a text."""
    tokens: int
    """Of an image, and those around it."""


LLAVA = MediaModel(write_llava, "<image>", PATCHES)
QWEN = MediaModel(write_qwen, "<|vision_start|><|image_pad|><|vision_end|>", PATCHES + 2)
GEMMA = MediaModel(write_gemma, "<start_of_image>", PATCHES + 2)


def _write_weights(folder, kind, config):
    transformers.set_seed(0)
    model = kind(config)
    for name, parameter in model.named_parameters():
        if ("vision" in name or "visual" in name or "projector" in name) and parameter.dim() > 1:
            parameter.data.normal_(0, 0.1)
        elif "embed_tokens" in name and config.tie_word_embeddings:
            parameter.data *= 0.2  # otherwise each token follows itself
    model.save_pretrained(folder)
    # vLLM's own models know the names that CLIP and SigLIP had before transformers 5
    weights = load_file(folder / "model.safetensors")
    renamed = {
        re.sub(r"vision_tower\.(?!vision_model)", "vision_tower.vision_model.", name): tensor
        for name, tensor in weights.items()
    }
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})


def _tokenizer(special, *words):
    """`special`: tokens by name, after those that each model has; then `words`, which no text has."""
    named = ["<s>", "</s>", "<unk>", *special.values(), *words]
    words = [*named, *(f"t{index}" for index in range(len(named), WORDS))]
    tokenizer = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", extra_special_tokens=special,
        chat_template="{% for message in messages %}{{ message['content'] }} {% endfor %}",
    )  # fmt: skip
