"""`bench lookup --groups`: ours and MooncakeStoreConnector's lookup find the same prefix, each by its own keys."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.support.pool import ROOT


def test_lookups_in_deepseeks_layer_groups_are_measured_beside_mooncake_store_connectors() -> None:
    command = [sys.executable, "-m", "launch", "bench", "lookup", "--groups", "--clients", "1", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-4000:]
    groups = json.loads(done.stdout.splitlines()[-1])["groups"]
    # ours: a chunk of 256 tokens in each of five groups; theirs: in each group, the blocks that a hit needs that ends at such a chunk
    assert [(row["tokens"], row["keys"], row["their_keys"]) for row in groups] == [(4096, 80, 368), (32768, 640, 2944)]
    assert all(row["lookup_ms"] > 0 and row["their_lookup_ms"] > 0 for row in groups)
