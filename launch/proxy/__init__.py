"""The proxy to which clients post their completions. It sends each first to a prefill node, then to a decode
node.

It guarantees:

1. A request is answered within `request_timeout_s`, whatever the nodes do.
2. The prefill hop is an optimisation: if prefill nodes fail or refuse, the decode node computes the prompt
   itself, and only its refusal goes to the client. The hop is skipped if it would gain nothing.
3. Until the first byte of the answer, a decode node that fails is replaced by another, unless the request has
   failed two nodes, or too many requests were tried again lately (`RetryBudget`). A node that keeps its
   connection and says nothing is not replaced: it may have a long queue. After the first byte, the client
   gets an error.
4. What the prefill node hands over (`kv_transfer_params`) is forwarded unread, and never accepted from a
   client.
5. A client that goes away takes its upstream connections with it.
6. Nodes come and go with discovery's view (`nodes`). The proxy waits for neither discovery nor the pool.

A completion's way, by file and function:

    app.py        Proxy.setup                  lists the pages
    serving.py    Serving.completion           is the way: accepted, prepare, _decode
    requests.py     Requests.accepted          checks the key, reads the body, holds a place; at the end, logs
    requests.py       _until_its_deadline      keeps rules 1 and 5
    requests.py     Requests.prepare           is all that comes before the decode node, a step a line:
    requests.py       _read                    reads the prompt out of the body
    requests.py       _decide, _why_direct     looks it up (Hops.look_up): is a prefill node needed?
    requests.py       _within_limits           with limits, refuses it, or lets it wait
    requests.py       _choose_decode_node      already, if one prefetched it or should load it meanwhile
    requests.py       _prefill                 has a prefill node compute it (Hops.prefill)
    serving.py      Serving._decode, _ask      asks a decode node; Attempts (routing) keeps rule 3
    serving.py      Relay.pass_on              passes its answer on, most bytes in a _Shortcut

Each prompt that a node is to compute or answer is in `Hops.asking`, which counts it. What else is counted,
reported or traced changes nothing on this way.

Behind a gateway, such as Envoy, `gateway/picker` takes the place of `serving`. It takes the same steps up to
`Requests.prepare`, but also holds a place while it reads the body. Then it names the decode node, and the
gateway asks that node. From there on, rule 3 does not hold.

`exchange` is the state of a request. `bodies` reads what clients and nodes send. `lookups` looks prompts up
in the pool. `nodes` sends requests to nodes, and checks their health. `events` knows what the nodes' own
caches hold. `keys` admits clients. `metrics` counts. In folders: `routing` (pure) decides which node gets a
request, `hints` keeps prompts in the pool, `gateway` serves gateways, and `ui` shows the cluster to browsers.
"""
