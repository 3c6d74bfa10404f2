"""The operators' commands for a running cluster: one module for each command or pair of commands of
`launch/cli.py`; below them `state` (what a cluster is), `watched` (what asks it), `figures` (what its metrics
say) and `pool_lookups`."""
