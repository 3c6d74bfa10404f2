"""What the model says without a cache: `python -m bench.suites.soak.expected FILE SEED COUNT` prints the answers as JSON.

It computes the prompts of the plan on an engine of its own, and touches neither the cluster nor the pool.
"""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from bench.suites.soak.plan import OUTPUT_TOKENS, served_prompts
from launch.engines.reference import GenerationRequest, ReferenceEngine
from pd_cache.cluster import ReferenceEngineConfig, read_config


def main(file: str, seed: str, count: str) -> None:
    config, _ = read_config(Path(file))
    assert isinstance(config.engine, ReferenceEngineConfig)
    answers = []
    with closing(ReferenceEngine.open(config.engine)) as alone:
        for prompt in served_prompts(int(seed), int(count)):
            request = GenerationRequest(prompt=tuple(prompt), max_tokens=OUTPUT_TOKENS, ignore_eos=True)
            answers.append([event.token for event in alone.submit(request)])
    print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
