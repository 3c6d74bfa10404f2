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

A completion's way: `app` (the socket, the outermost handler, and the proxy's own pages) →
`Serving._answered`, inside of `Requests.begun` (its key, its end) and `Requests.admitted` (its place, its
deadline) → `Requests.prepared`: `Hops.judge` decides whether a prefill node is needed, and `Hops.prefill`
asks one → `Serving._decode` asks the decode node → `Relay.pass_on`. `exchange` is the request's state.

`bodies` reads what clients and nodes send, and `direct` looks prompts up in the pool. `routing` (pure)
decides which node is next, when to stop, and what is to blame for a failure. `prefixes` (pure) and `events`
know which nodes have the beginning of a prompt. `roles` and `limits` (pure) follow the nodes' load. `nodes`
sends requests to nodes, and checks their health. `keys` admits clients, `hints` and `pins` keep prompts in
the pool, `metrics` counts, and `ui` shows the cluster to browsers.

Behind a gateway, such as Envoy (`gateway`), `picker` takes the place of `serving`: it reads the client's body
and names the decode node, and the gateway asks that node. Then rule 3 is the gateway's affair.
"""
