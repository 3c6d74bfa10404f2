"""The cache server: one per host, for any number of engines. And a server for lookups alone (`lookup_server`).

A `cache_server` owns the backends, their staging memory and the local tiers. Engines reach it over ZMQ, and lend it their KV tensors over
a lifeline: both protocols are in `pd_cache.wire`.

This package imports none of its modules.
"""
