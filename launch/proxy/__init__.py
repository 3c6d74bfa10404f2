"""The proxy to which clients post their completions. It sends each first to a prefill node, then to a decode
node.

It guarantees:

1. A request is answered within `request_timeout_s`, whatever the nodes do.
2. The prefill hop is an optimisation, and skipped if it would gain nothing. If prefill nodes fail, refuse or
   hang, the decode node computes the prompt. But a request during which two nodes lost their connections may
   have brought them down: it goes to no further node, and the client gets a 502.
3. Until the answer's first byte, a decode node that fails is replaced, unless the request has failed two, or
   too many were tried again lately (`RetryBudget`). A silent node is not replaced: it may have a long queue.
   After the first byte, the client gets an error.
4. What the prefill node hands over (`kv_transfer_params`) is forwarded unread, and never accepted from a
   client.
5. A client that goes away takes its upstream connections with it.
6. Nodes come and go with discovery's view (`nodes`). The proxy does not wait for discovery, and for the pool
   only as long as a lookup may take.

A completion's way takes five minutes. Read these functions, in this order, and open nothing else:

    serving.py    Serving.completion    is the way
    requests.py   Requests.accepted     checks the key, reads the body, holds a place; at the end, logs
    requests.py   Requests.prepare      does all that comes before the decode node, a step a line
    serving.py    Serving._decode       asks decode nodes, until one answers
    serving.py    Serving._ask          asks one decode node, and passes its answer on

Then, by question:

    app.py        Proxy.setup           Which pages are there?
    requests.py   _until_its_deadline   What ends a request: its deadline, its client, a shutdown?
    hops.py       Hops.look_up          What does the pool hold of the prompt?
    requests.py   _why_direct           Why is no prefill node needed?
    requests.py   _within_limits        Would the request miss its limits? May it wait?
    requests.py   _loading_node         Which decode node loads the prompt during the prefill hop?
    hops.py       Hops.prefill          Which prefill nodes are asked, and for how long?
    node_pool.py  Attempts              Which node is next? What is to blame for a failure? (`routing`)
    hops.py       Hops.asking           What counts while a node has the prompt?
    serving.py    Relay.pass_on         How do an answer's bytes pass? Most pass in a `_Shortcut`.

What is counted, reported or traced changes nothing on this way.

Behind a gateway, such as Envoy, `gateway/picker` takes the place of `serving`. It takes the same steps up to
`Requests.prepare`, but also holds a place while it reads the body. Then it names the decode node, and the
gateway asks that node. From there on, rules 1, 3 and 5 are up to the gateway. If answers pass the picker, the
request ends with its answer, otherwise with the answer's head.

A *hop* is a request's part at a prefill or a decode node. `exchange` is the state of a request, and `trips`
is what the proxy's pages say about its hops. `bodies` reads what clients and nodes send. `lookups` looks
prompts up in the pool. `nodes` sends requests to nodes, and checks their health. `events` knows what the
nodes' own caches hold. `keys` admits clients. `metrics` counts. In folders: `routing` (pure) decides which
node gets a request, `hints` keeps prompts in the pool, `gateway` serves gateways, and `ui` shows the cluster
to browsers.
"""
