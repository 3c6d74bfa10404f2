"""`/query` of a cluster as `up` runs it: the proxy asks the pool what it holds."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from tests.support.cluster import CHUNK, started
from tests.support.waiting import wait_for


def post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def test_what_a_request_stored_is_found_by_queries_for_every_node_that_could_load_it(tmp_path: Path) -> None:
    nodes = [
        {"name": "master", "role": "master", "port": 0, "metrics_port": 0},
        {"name": "store-0", "role": "store", "segment_size": "64MiB"},
        {"name": "prefill-0", "role": "prefill", "port": 0},
        {"name": "decode-0", "role": "decode", "port": 0},
        {"name": "proxy", "role": "proxy", "port": 0},
    ]
    tokens = [number % 500 for number in range(3 * CHUNK + 10)]
    with started(tmp_path, nodes=nodes, proxy={"direct_tokens": 1}) as cluster:
        proxy = cluster.urls["proxy"]

        def there() -> int:
            try:
                hits = post(f"{proxy}/query", {"token_ids": tokens})["default"]
            except urllib.error.HTTPError:  # 503 until the nodes have said how they name their chunks
                return -1
            return int(hits["prefill-0"]["CPU"]) if "prefill-0" in hits else -1

        wait_for(lambda: there() == 0, what="nothing is stored")
        post(f"{proxy}/v1/completions", {"model": "tiny", "prompt": tokens, "max_tokens": 1})
        wait_for(lambda: there() == 3 * CHUNK, what="the pool has it")
