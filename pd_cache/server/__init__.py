"""The multi-process mode: one cache server per host, and what engines talk to it with.

A server (`app`) owns the backend, its staging memory and the local tiers. Engines reach it over ZMQ (`channel`, `messages`)
and lend it their KV tensors (`sharing`, over the connection of `lifeline`). What engines use: `scheduler_adapter` and
`worker_adapter`, whose API is that of LMCache's multi-process adapters in vLLM, or `remote`, which looks like a `CacheEngine`.

This package imports none of its modules: `channel` and `messages` serve the lookup clients, too.
"""
