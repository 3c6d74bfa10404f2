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

A completion's way, and where each step is:

1. `app.Proxy.setup` lists the pages. `serving.Serving.completion` answers completions and chats.
2. `requests.Requests.begun` checks the client's key and tenant. `bodies.read_body` reads the body.
3. `requests.Requests.admitted` holds a place for the request, and ends it at its deadline.
4. `requests.Requests.prepared` is all that comes before the decode node: the lookup (`hops.Hops.look_up`),
   the limits, hints, and the prefill node (`hops.Hops.prefill`).
5. `serving.Serving._decode` asks the decode node. `serving.Relay.pass_on` passes its answer on.

Behind a gateway, such as Envoy (`gateway`), `picker` takes the place of `serving`: steps 2 to 4 are the same,
then it names the decode node, and the gateway asks that node. There, rule 3 is the gateway's affair.

`exchange` is the state of a request. `bodies` reads what clients and nodes send. `direct` looks prompts up in
the pool. `routing` (pure) decides which node is next, when to stop, and what is to blame for a failure.
`prefixes` (pure) and `events` know which nodes have the beginning of a prompt. `roles` and `limits` (pure)
follow the nodes' load. `nodes` sends requests to nodes, and checks their health. `keys` admits clients.
`hints` and `pins` keep prompts in the pool. `metrics` counts, and `ui` shows the cluster to browsers.
"""
