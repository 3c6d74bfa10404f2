"""An engine's side of its host's cache server.

`ServerCache` is the cache itself. It uses a `ServerConnection`, which outlives restarts of the server. Lookup clients and the two
adapters are thin layers over it; the adapters' API is that of LMCache's multi-process adapters in vLLM.
"""
