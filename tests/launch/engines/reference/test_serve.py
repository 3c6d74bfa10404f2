"""The process: a ready line, SIGTERM, and nothing left open."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from launch.engines.reference import serve
from launch.supervise import stop_signals
from pd_cache.cluster import HandoffConfig

from .conftest import tiny_config

PROGRAM = """
from launch.engines.reference import serve
from pd_cache.cluster import HandoffConfig, ModelConfig, RandomModel, ReferenceEngineConfig

model = RandomModel(vocab_size=300, hidden_size=64, intermediate_size=96, layers=2, heads=4, kv_heads=2)
config = ReferenceEngineConfig(model=ModelConfig(name="tiny", random=model), max_model_len=256, num_blocks=64)


def cache(metadata, layout, kv_caches):
    print("cache", metadata.model.split(":")[0], layout.layers, flush=True)


serve(config, HandoffConfig(), "127.0.0.1", 0, cache, lambda address: print(address, flush=True))
print("closed", flush=True)
"""


def test_a_process_serves_from_its_ready_line_to_its_signal():
    command = [sys.executable, "-W", "error", "-c", PROGRAM]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "cache random-llama-2 2\n"
        address = process.stdout.readline().strip()
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 3}).encode()
        with urllib.request.urlopen(f"http://{address}/v1/completions", body, timeout=60) as response:
            assert len(json.load(response)["choices"][0]["token_ids"]) == 3
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        assert output == "closed\n"
        assert "not for production" in errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", stop_signals())
def test_a_signal_before_the_server_is_up_ends_it_in_order(number):
    handlers = [signal.getsignal(each) for each in stop_signals()]
    closed = []

    def cache(metadata, layout, kv_caches):
        try:
            os.kill(os.getpid(), number)
            time.sleep(10)
        finally:
            closed.append(metadata)

    serve(tiny_config(), HandoffConfig(), "127.0.0.1", 0, cache, lambda address: pytest.fail("it must not be ready"))
    assert len(closed) == 1
    assert [signal.getsignal(each) for each in stop_signals()] == handlers


def test_an_address_in_use_is_an_error_and_leaves_nothing_behind(make_engine):
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="address"):
        serve(tiny_config(), HandoffConfig(), *taken.getsockname(), None, lambda address: pytest.fail("not ready"))
