"""What an engine and its cache server send each other: messages over a channel, descriptors over a lifeline, memory that both map.

Below both of them: `pd_cache.client` and `pd_cache.server` import it, and it imports neither.
"""
