"""A cluster in simulation: discrete events, costs that were measured, and the product's own policies.

Read `requests_way.py` first: it is a request's way, as in docs/architecture.md, in simulated time. The policies are the product's modules
(`launch/proxy/`: routing, attempts, budget, admission, direct; `pd_cache/lookup`, `pd_cache/groups.py`, `pd_cache/backends/eviction.py`).
What is simulated are the machines: processors and links that are shared fairly (`resources.py`), engines (`computing.py`) and the pool
(`stored.py`), at unit costs (`costs.py`) that `measuring.py` measures on this machine or a file gives.
"""
