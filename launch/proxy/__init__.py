"""The proxy that clients post their completions to: first to a prefill node, then to a decode node.

What it promises:

1. A request is answered within `request_timeout_s`, whatever the nodes do.
2. The prefill hop is an optimisation: when it fails, the decode node computes the prompt itself. Only what the prefill node
   says about the *request* (4xx) is final.
3. Until the first byte of the answer, a node that fails is replaced by another; after it, the client is told.
4. What the prefill node hands over (`kv_transfer_params`) is forwarded unread, and never taken from a client.
5. A client that goes away takes its upstream connections with it.

`routing` (which node next) and `completion` (what a request says) are pure; `hops` talks to nodes; `app` holds them together.
"""

from launch.proxy.app import Proxy
from launch.proxy.run import run_proxy

__all__ = ["Proxy", "run_proxy"]
