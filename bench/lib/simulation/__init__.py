"""A cluster in simulation: discrete events, unit costs, and the product's own policies.

Read `cluster.py` first: it is a request's way, as in docs/architecture.md, in simulated time. The policies
are the proxy's own modules (routing, attempts, budget, admission, and the rule by which a prompt skips the
prefill nodes). Machines and links (`clock.Station`), engines (`engine`) and the pool are simulated. Each step
takes its unit cost (`costs`); the requests come from `workload`.
"""
