"""What operators do to a running cluster, and see of it: one module for each command or pair of commands of
`launch/cli.py`; below them `state` (what a cluster is), `watched` (what asks it), `figures` (what its metrics
say) and `pool_lookups`."""
