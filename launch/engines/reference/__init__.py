"""The reference engine: a small engine with a paged KV cache, for trying out, testing and measuring pd-cache.

It serves a Llama with random weights on the CPU. It is neither fast nor made for production; it is made to be
right. A prompt gives the same tokens whether its prefix was computed here or loaded from the pool, and
requests are answered whatever the cache does.

A request's path: `api` reads it (`protocol`) and submits it (`requests`) to the `engine`. The engine's thread
schedules the request. Through the `prefix_cache` it reserves blocks, loads the prefix and stores chunks. It
computes the rest with the `model`, and puts tokens into the `Generation` from which the server reads.
"""
