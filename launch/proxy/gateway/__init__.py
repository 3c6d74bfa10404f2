"""The proxy behind a gateway, such as Envoy: it picks decode nodes, and the gateway asks them.

`picker` answers gateways, with the messages of `ext_proc`. `envoy` runs our own Envoy in front of the proxy,
with `envoy.yaml`.
"""
