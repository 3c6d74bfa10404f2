"""SGLang's own host pools, small ones, and our backend under them as the suite of all adapters drives it."""

import importlib.util
import itertools
import threading
from functools import partial

import pytest
import torch

from tests.support import sglang_pools
from tests.support.adapters import PAGE, AdapterSubject, options_of
from tests.support.needs import NO_SGLANG
from tests.support.waiting import wait_for

PAGES = 16
TOKENS = 4
"""Tokens of a page."""

mha_pool = partial(sglang_pools.mha_pool, pages=PAGES, tokens=TOKENS, layers=3, heads=2, width=8)
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "kv_cache_dim": 24 + 8, "dtype": torch.bfloat16}


def need_sglang():
    """Skips the test if there is no SGLang."""
    if importlib.util.find_spec("sglang") is None:
        pytest.skip(NO_SGLANG)
    sglang_pools.import_sglang()
    from sglang.srt.mem_cache.pool_host import base

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = -(1 << 50)  # SGLang wants 10 GiB free beside the smallest pool


def mla_pool(layout):
    """A host pool for latents of a model with three layers."""
    sglang_pools.import_sglang()
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = [torch.zeros((TOKENS, 1, 24 + 8), dtype=torch.bfloat16) for _ in range(3)]
    info = MLABufferInfo(
        buffers=tuple(device), data_ptrs=sglang_pools.pointers(device), layer_indices=(0, 1, 2), device_layer_num=3,
        page_size=TOKENS, device=torch.device("cpu"), **_LATENT,
    )  # fmt: skip
    sizes = sglang_pools.sizes(layout, PAGES, TOKENS)
    return MLATokenToKVPoolHost(info, start_layer=0, end_layer=3, target_layer_num=3, **sizes)


def storage_config(extra, **changes):
    """What SGLang tells our backend about an engine of one rank."""
    return sglang_pools.storage_config(sglang_pools.our_options(**{"revision": "test", **extra}), **changes)


def open_backend(settings, host, *, salt, options=None, **changes):
    """Our backend, by SGLang's own factory. `options` are further keys of its extra config."""
    config = storage_config({**options_of(settings, salt), **(options or {})}, **changes)
    return sglang_pools.open_backend(host, config)


class SglangSubject(AdapterSubject):
    """The backend under a real host pool whose pages are exactly the suite's values."""

    def __init__(self, settings, namespace):
        need_sglang()
        # 2 (K and V) x layers x tokens x heads x width bytes
        layers, heads = 5, 10
        self.host = mha_pool(
            "page_first",
            dtype=torch.uint8,
            heads=heads,
            layers=layers,
            width=PAGE // (2 * layers * heads * TOKENS),
        )
        self.backend = open_backend(settings, self.host, salt=namespace)
        assert self.backend._pools["kv"].bytes == PAGE
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def _indices(self, count):
        return torch.arange(count * TOKENS, dtype=torch.int64)

    def _page(self, page):
        return self.host.kv_buffer[:, page * TOKENS : (page + 1) * TOKENS]

    def store(self, values):
        with self._lock:
            stored = []
            names = list(values)
            for start in range(0, len(names), PAGES):
                part = names[start : start + PAGES]
                for page, name in enumerate(part):
                    given = torch.frombuffer(bytearray(values[name]), dtype=torch.uint8)
                    self._page(page).copy_(given.reshape(self._page(page).shape))
                stored += self.backend.batch_set_v1(part, self._indices(len(part)))
            return stored

    def has(self, names):
        return [self.backend.exists(name) for name in names]

    def load(self, names):
        with self._lock:
            loaded = []
            for start in range(0, len(names), PAGES):
                part = list(names[start : start + PAGES])
                self.host.kv_buffer.fill_(255)
                found = self.backend.batch_get_v1(part, self._indices(len(part)))
                loaded += [
                    self._page(page).contiguous().numpy().tobytes() if ok else None
                    for page, ok in enumerate(found)
                ]
            return loaded

    def wait_available(self):
        self.backend.cache.wait_available(60)
        wait_for(lambda: all(self.store({"ready": bytes(PAGE)})), "a store")

    def close(self):
        self.backend.close()
