"""The cache server, one per host for any number of engines, and its clients.

`server.py` owns the tiers and their staging memory. Engines reach it with `client.py`, over the messages of
`protocol.py`, and lend it their KV tensors (`memory.py`). `fence.py` decides which side may touch an engine's
blocks. `adapters.py` has the API of LMCache's multi-process adapters in vLLM.

This package imports none of its modules.
"""
