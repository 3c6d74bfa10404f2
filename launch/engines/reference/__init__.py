"""The reference engine: a small engine with a paged KV cache, for trying out, testing and measuring pd-cache.

It serves a Llama with random weights on the CPU. It is neither fast nor made for production; it is made to be
right. A prompt gives the same tokens whether its prefix was computed here or loaded from the pool, and
requests are answered whatever the cache does.

A request's path: `api` reads it (`protocol`) and submits it (`requests`) to the `engine`, whose thread
schedules it: it has the `prefix_cache` reserve blocks and load the prefix, computes the rest with the `model`
through the pages, has the chunks stored, and puts tokens into the `Generation` from which the server reads.
"""
