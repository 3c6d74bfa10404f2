"""A cluster in simulation: discrete events, unit costs, and the product's own policies.

Read `cluster.py` first: it is a request's way, as in docs/architecture.md, in simulated time. The policies
are the proxy's modules (routing, attempts, budget, admission, the rule that sends a prompt past the prefill
nodes). Machines and links (`clock.Station`), engines (`engine`) and the pool are simulated, at unit costs
(`costs`), under a load (`workload`).
"""
