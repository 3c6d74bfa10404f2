"""Cache engines over a real pool, small enough to fill and empty in milliseconds."""

import uuid
from contextlib import contextmanager

import torch

from pd_cache.cache import CacheEngineBuilder, PromptCache
from pd_cache.chunks import CacheMetadata
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from tests.support.kv import holds_token, make_cache, write_prompt

BLOCK, CHUNK, BLOCKS = 4, 8, 64
FAST = {
    "breaker": {"failures": 2, "probe_interval_ms": 200},
    "timeouts": {"exist_ms": 2_000, "get_ms": 4_000, "put_ms": 4_000},
}
"""What notices soon that a pool has gone or is back."""


def troubles(metrics, op):
    """What was counted as trouble of `op`, by reason."""
    return {key[2]: value for key, value in metrics.totals().items() if key[:2] == ("troubles", op)}


class Host:
    """One engine with a paged cache of its own, as a prefill or decode node has them."""

    def __init__(self, engine, cache):
        self.engine = engine
        self.cache = cache
        self.layout = engine.layout
        self.prompts = PromptCache(engine)

    def compute(self, tokens, slots):
        """Fill the slots as the model would."""
        write_prompt(self.cache, self.layout, tokens, slots)

    def holds(self, tokens, slots):
        """Whether the slots hold what the model would have computed for the prompt's first tokens, as many as
        there are slots."""
        return all(
            holds_token(self.cache, self.layout, tokens[: at + 1], slot) for at, slot in enumerate(slots)
        )

    def lookup(self, tokens, **options):
        return self.prompts.lookup(tokens, **options)

    def store(self, tokens, slots, **options):
        return self.prompts.store(
            tokens, kv_caches=self.cache, slot_mapping=torch.tensor(slots, dtype=torch.int64), **options
        )

    def retrieve(self, tokens, slots, **options):
        mask = self.prompts.retrieve(
            tokens, kv_caches=self.cache, slot_mapping=torch.tensor(slots, dtype=torch.int64), **options
        )
        assert mask.dtype == torch.bool
        assert mask.device.type == "cpu"
        return [bool(value) for value in mask]

    def keys(self, tokens):
        return self.engine.database.keys(self.engine.database.name_chunks(tokens))

    def troubles(self, op):
        """What was counted as trouble of `op`, by reason."""
        return troubles(self.engine.metrics, op)


@contextmanager
def host(pool, *, model=None, tensors=None, place=None, segment_size=0, wait=True, cache=None, **transfer):
    """A host in a new namespace, or in the namespace of `model`. `place` says which rank it is, and goes to
    `CacheMetadata.of`."""
    tensors = tensors or make_cache(blocks=BLOCKS, block_size=BLOCK)
    layout = KVLayout.from_tensors(tensors)
    metadata = CacheMetadata.of(model or uuid.uuid4().hex, layout, **(place or {}))
    settings = pool.settings(cache or CacheConfig(chunk_size=CHUNK), transfer, segment_size)
    instance = uuid.uuid4().hex
    engine = CacheEngineBuilder.get_or_create(instance, settings, metadata, layout)
    try:
        if wait:
            engine.wait_available(60)
        yield Host(engine, tensors)
    finally:
        CacheEngineBuilder.destroy(instance)
        engine.backend.memory.pool.check_integrity()


def random_slots(rng, count):
    """`count` different slots, in whole blocks."""
    blocks = rng.sample(range(BLOCKS), -(-count // BLOCK))
    return [block * BLOCK + offset for block in blocks for offset in range(BLOCK)][:count]
