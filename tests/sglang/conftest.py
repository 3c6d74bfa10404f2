"""SGLang, in an environment of its own: `make test-sglang`. Without SGLang nothing here is collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("sglang") else ["test_*.py"]
