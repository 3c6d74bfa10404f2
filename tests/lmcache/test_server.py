"""A real `lmcache server` with our plugin below it and vLLM's own connector above it."""

import contextlib
import json
import os
import random
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from bench.lib.small_models import VOCABULARY, write_model
from launch.run.supervise import end, spawn_child
from tests.support.pool import Pool, free_port
from tests.support.waiting import wait_for
from tests.vllm.servers import by_hand, connector

pytestmark = pytest.mark.slow

CHUNK = 64
PROMPT = 500
"""Tokens: seven whole chunks, and some."""


class LMCacheServer:
    """`lmcache server` over the pool, with an L1 of its own."""

    def __init__(self, pool, log):
        self.port, self.http_port = free_port(), free_port()
        plugin = {
            "type": "plugin",
            "module_path": "pd_cache.adapters.lmcache",
            "class_name": "PdCacheL2Adapter",
            "shared": True,
            "adapter_params": {
                "master": pool.address,
                "transfer": {
                    "staging_size": "32MiB",
                    "prefault": False,
                    "timeouts": {"exist_ms": 5000, "get_ms": 5000, "put_ms": 5000},
                },
                "part_size": "1MiB",
            },
        }
        command = [
            *(str(Path(sys.executable).parent / "lmcache"), "server", "--port", str(self.port)),
            *("--http-port", str(self.http_port), "--chunk-size", str(CHUNK), "--l1-size-gb", "0.25"),
            # on a CPU, the engine copies, through shared memory
            *("--supported-transfer-mode", "auto", "--shm-name", f"lmcache-{self.port}", "--no-l1-use-lazy"),
            *("--disable-observability", "--l2-adapter", json.dumps(plugin)),
            *("--eviction-policy", "LRU"),
        ]
        env = {
            **os.environ,
            "MC_LOG_LEVEL": "ERROR",
            "LMCACHE_DISABLE_BANNER": "1",
            "LMCACHE_TRACK_USAGE": "false",
        }
        self._log = log.open("ab")
        self.process = spawn_child(command, stdout=self._log, stderr=subprocess.STDOUT, env=env)
        try:
            wait_for(self._is_healthy, "lmcache server")
        except BaseException:
            self.close()
            raise

    def _is_healthy(self):
        assert self.process.poll() is None, Path(self._log.name).read_text()[-4000:]
        with contextlib.suppress(OSError):
            return self.ask("/healthcheck") is not None
        return False

    def ask(self, path, method="GET"):
        request = urllib.request.Request(f"http://127.0.0.1:{self.http_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    def forget(self):
        """Empties its own memory; what is below stays."""
        self.ask("/cache/clear", "POST")

    def connector(self):
        """vLLM's flag."""
        at = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": self.port, "lmcache.mp.mq_timeout": 60}
        return connector("LMCacheMPConnector", "kv_both", at)

    def close(self):
        end([self.process], 60)
        self._log.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "llama")


def prompt(seed):
    rng = random.Random(f"lmcache {seed}")
    return [rng.randrange(10, VOCABULARY) for _ in range(PROMPT)]


def forgotten(server, vllm):
    """Leaves only what is in the pool."""
    vllm.forget_prefixes()
    server.forget()


def test_a_second_vllm_finds_what_the_first_stored_and_damage_and_a_dead_pool_are_computed_again(
    model, tmp_path
):
    log = tmp_path / "lmcache.log"
    pool = Pool(tmp_path, client_ttl_s=5).start()
    prompts = [prompt(n) for n in range(3)]
    try:
        with (
            contextlib.closing(LMCacheServer(pool, log)) as server,
            by_hand(model, server.connector()) as first,
        ):
            computed = [first.complete(one) for one in prompts]
            assert [answer.cached for answer in computed] == [0, 0, 0]
            wait_for(lambda: len(pool.keys()) >= 3 * (PROMPT // CHUNK), "all chunks in the pool")
        with (
            contextlib.closing(LMCacheServer(pool, log)) as server,
            by_hand(model, server.connector()) as second,
        ):
            loaded = second.complete(prompts[0])
            assert loaded.tokens == computed[0].tokens
            assert loaded.cached >= PROMPT // CHUNK * CHUNK - CHUNK

            pool.damage(*pool.keys())
            forgotten(server, second)
            damaged = second.complete(prompts[1])
            assert damaged.tokens == computed[1].tokens
            assert damaged.cached == 0, "what is damaged is not there"

            forgotten(server, second)
            pool.kill("store-0")
            pool.kill("master")
            alone = second.complete(prompts[2])
            assert alone.tokens == computed[2].tokens
            assert alone.cached == 0
    finally:
        pool.end()
