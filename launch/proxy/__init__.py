"""The proxy to which clients post their completions. It sends each first to a prefill node, then to a decode
node.

It guarantees:

1. A request is answered within `request_timeout_s`, whatever the nodes do.
2. The prefill hop is an optimisation: if prefill nodes fail or refuse, the decode node computes the prompt
   itself, and only its refusal goes to the client. The hop is skipped if it would gain nothing (`direct`).
3. Until the first byte of the answer, a node that fails is replaced by another; after it, the client gets an
   error.
4. What the prefill node hands over (`kv_transfer_params`) is forwarded unread, and never accepted from a
   client.
5. A client that goes away takes its upstream connections with it.
6. Nodes come and go with discovery's view (`nodes`). The proxy waits for neither discovery nor the pool.

A request's way: `app` (the socket, the outermost handler, and the proxy's own pages) → `serving` (the
client's body, the decode node, the answer's bytes) → `requests` (from its key to its end; `exchange` is its
state) → `keys`, `bodies` → `direct` (does it need a prefill node?) → `routing` (which node next, when to
stop, whom a failure is attributed to; pure) → `hops` (the prefill hop and the stream) → `nodes` (what nodes
answer, their health, discovery). `prefixes` (pure) and `events` know which nodes have the beginning of a
prompt, `hints` and `pins` keep prompts in the pool, `metrics` counts, and `ui` shows the cluster to browsers.
"""
