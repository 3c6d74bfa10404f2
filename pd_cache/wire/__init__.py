"""The protocol between an engine and its cache server: messages over a channel, descriptors over a lifeline, memory that both map.

`pd_cache.client` and `pd_cache.server` import this package, and it imports neither.
"""
