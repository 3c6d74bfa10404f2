"""The proxy to which clients post their completions. It sends each first to a prefill node, then to a decode node.

It guarantees:

1. A request is answered within `request_timeout_s`, whatever the nodes do.
2. The prefill hop is an optimisation: if it fails, the decode node computes the prompt itself. It is skipped if it would gain
   nothing (`direct`). Only a prefill node's refusal of the *request* (4xx) is final.
3. Until the first byte of the answer, a node that fails is replaced by another; after it, the client gets an error.
4. What the prefill node hands over (`kv_transfer_params`) is forwarded unread, and never accepted from a client.
5. A client that goes away takes its upstream connections with it.
6. Nodes come and go with discovery's view (`node_pools`). The proxy waits for neither discovery nor the pool.

Pure modules: `routing` (which node next), `attempts` (when to stop, and which side is at fault), `budget` (how many retries), `prefixes`
(which nodes have seen a prompt), `breaker` (which nodes to leave alone), `admission` (how many requests at a time), `completion` (what a
request says).

The others: `edge` turns every outcome into an answer, `requests` takes a request from its key to its last byte. `keys` identifies the
client, `bodies` reads the body, `completions` takes it over the two hops, `models` lists models, `delivery` ends it. `overview` reports
on the proxy, and `ui` shows the cluster to browsers. `hops` talks to nodes, `health` checks them, `proxy` holds it all together.
"""

from launch.proxy.proxy import Proxy

__all__ = ["Proxy"]
