"""LMCache, in an environment of its own: `make test-lmcache`. Without LMCache nothing here is collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("lmcache") else ["test_*.py"]
