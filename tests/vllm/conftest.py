"""A real vLLM, in processes of its own: `make test-vllm`. Without vLLM in this environment nothing here is
collected."""

import importlib.util
import os

from tests.conftest import MOONCAKES_PATIENCE

for variable in MOONCAKES_PATIENCE:
    os.environ.pop(variable, None)  # servers are processes of their own, with deadlines of their own

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

if not collect_ignore_glob:
    from tests.vllm.fixtures import *  # noqa: F403
