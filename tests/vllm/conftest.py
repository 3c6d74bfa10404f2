"""A real vLLM, in processes of its own: `make test-vllm`. Without vLLM in this environment nothing here is collected."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

if not collect_ignore_glob:
    from tests.vllm.fixtures import *  # noqa: F403
