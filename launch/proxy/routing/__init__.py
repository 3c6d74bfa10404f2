"""Decides which node gets a request, and when. Pure: the time comes from the caller, so `bench` runs it in
simulated time.

`node_pool` takes the cheapest node, and decides when to stop, and what is to blame for a failure. `prefixes`
guesses which nodes have the beginning of a prompt. `direct` says which prompts need no prefill node. `roles`
decides which nodes prefill. `limits` predicts when a request's first token will come.
"""
