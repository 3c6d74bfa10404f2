"""Asks a cluster's proxy twice for the same prompt, and prints where its tokens came from.

python ask.py http://10.0.0.1:8000
"""

import json
import sys
import urllib.request

if len(sys.argv) != 2:
    sys.exit(__doc__)

prompt = "Once upon a time, in a machine room far away, two nodes shared one cache. " * 20

for attempt in ("first", "again"):
    body = {"model": "demo", "prompt": prompt, "max_tokens": 16}
    request = urllib.request.Request(
        f"{sys.argv[1]}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as response:
        usage = json.load(response)["pd_cache"]  # an extension of pd-cache's own engine
    for node, tokens in (("prefill", usage["prefill"]), ("decode", usage["self"])):
        print(
            f"{attempt}: {node} node took {tokens['cached_tokens']} tokens from the pool, computed {tokens['computed_tokens']}"
        )
