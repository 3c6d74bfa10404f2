"""What an engine has of its host's cache server.

`ServerCache` is the cache itself, over a `ServerConnection` that survives the server. Lookup clients and the two adapters, whose API is
that of LMCache's multi-process adapters in vLLM, are shells over it.
"""
