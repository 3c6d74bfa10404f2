"""Two engines of your own that share a pool: one computes a prompt, the other loads it.

pd-cache config example pool > pool.yaml
pd-cache up -c pool.yaml                      # prints: ready master 127.0.0.1:50051
python embed_engine.py 127.0.0.1:50051        # in another terminal
"""

import sys

import torch

from pd_cache import CacheEngineBuilder, CacheMetadata, KVLayout, NodeSettings, PromptCache

if len(sys.argv) != 2:
    sys.exit(__doc__)

LAYERS, BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM = 4, 128, 16, 8, 64
PROMPT = list(range(1000))  # token ids: three chunks of 256, and 232 that are no whole chunk

# each engine has a paged buffer, a tensor a layer; here the prompt lies in the first blocks of one and the
# last of the other
shape = (BLOCKS, KV_HEADS, BLOCK_SIZE, 2 * HEAD_DIM)
prefill_kv = [torch.randn(shape, generator=torch.Generator().manual_seed(layer)) for layer in range(LAYERS)]
decode_kv = [torch.zeros(shape) for _ in range(LAYERS)]
prefill_slots = torch.arange(len(PROMPT))  # slot = block * BLOCK_SIZE + offset
decode_slots = torch.arange(len(PROMPT)) + BLOCKS // 2 * BLOCK_SIZE

settings = NodeSettings(master=sys.argv[1])
layout = KVLayout.from_tensors(prefill_kv)
metadata = CacheMetadata.of("my-model@3f2a", layout)  # what identifies the weights
try:
    prefill = CacheEngineBuilder.get_or_create("prefill", settings, metadata, layout)
    decode = CacheEngineBuilder.get_or_create("decode", settings, metadata, layout)
    # an engine that serves need not wait: without its pool, everything is a miss
    prefill.wait_available(timeout=30)
    decode.wait_available(timeout=30)
    stored = PromptCache(prefill).store(
        PROMPT, kv_caches=prefill_kv, slot_mapping=prefill_slots, timeout=30
    )  # seconds, all in all
    prompts = PromptCache(decode)
    found = prompts.lookup(PROMPT, timeout=30)
    loaded = prompts.retrieve(PROMPT, kv_caches=decode_kv, slot_mapping=decode_slots, timeout=30)
finally:
    CacheEngineBuilder.destroy("prefill")
    CacheEngineBuilder.destroy("decode")

count = int(loaded.sum())
theirs, ours = slice(count // BLOCK_SIZE), slice(BLOCKS // 2, BLOCKS // 2 + count // BLOCK_SIZE)
same = all(torch.equal(a[theirs], b[ours]) for a, b in zip(prefill_kv, decode_kv, strict=True))
print(f"stored: {stored} tokens\nfound: {found} tokens")
print(f"loaded: {count} tokens, the same bytes: {same}; to compute: {len(PROMPT) - count}")
