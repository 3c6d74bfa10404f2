"""`examples/vllm_offline.py`, run twice as `examples/README.md` says."""

import yaml

from tests.support.cli import printed
from tests.support.pool import ROOT
from tests.vllm.servers import ENV, PROGRAM

PATIENT = {
    "transfer": {
        "staging_size": "32MiB",
        "timeouts": {"exist_ms": 10_000, "get_ms": 10_000, "put_ms": 10_000},
    },
    "connector": {"lookup_timeout_ms": 10_000, "load_timeout_ms": 60_000},
}
"""Deadlines that no machine is too busy for."""


def run(model, file):
    """The lines that the example prints itself."""
    lines = printed(PROGRAM[0], ROOT / "examples" / "vllm_offline.py", model, file, **ENV).splitlines()
    return [line for line in lines if line.startswith(("tokens: ", "cached: "))]


def test_the_second_process_takes_the_prompt_from_the_pool(model, vllm_pool, tmp_path):
    file = tmp_path / "pool.yaml"
    file.write_text(yaml.safe_dump({**PATIENT, "nodes": [vllm_pool.master]}))
    tokens, cached = run(model, file)
    assert cached.startswith("cached: 0 of ")
    again, found = run(model, file)
    assert again == tokens
    assert found.startswith("cached: 512 of "), "two chunks of 256"
