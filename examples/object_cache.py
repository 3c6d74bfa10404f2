"""Bytes and tensors by name, in a pool that every process of the cluster sees. Run it twice: the second time,
everything is there.

pd-cache config example pool > pool.yaml
pd-cache up -c pool.yaml                      # prints: ready master 127.0.0.1:50051
python object_cache.py 127.0.0.1:50051        # in another terminal
"""

import sys

import torch

from pd_cache import NodeSettings, ObjectCache

if len(sys.argv) != 2:
    sys.exit(__doc__)

prompt, embedding = b"What is the capital of France?", torch.arange(12.0).reshape(3, 4)
with ObjectCache.open(
    NodeSettings(master=sys.argv[1]), "embeddings of my-model@3f2a"
) as cache:  # what must agree: here, the weights
    cache.wait_available(timeout=30)  # a server need not wait: without its pool, everything is a miss
    there = cache.exists(prompt)
    cache.put(prompt, embedding)  # OK as well if it is there already
    found = cache.get_tensor(prompt)
    print(f"there before: {there}\nfound: {found is not None and torch.equal(found, embedding)}")
    print(f"of another prompt: {cache.get('What is the capital of Spain?')!r}")
