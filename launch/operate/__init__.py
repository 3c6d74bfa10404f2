"""The operators' commands for a running cluster: one module for each command or pair of commands of
`launch/cli.py`; below them `state` (the state of a cluster), `watched` (asks the nodes), `figures` (reads
their metrics) and `pool_lookups`."""
