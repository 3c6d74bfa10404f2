"""The operators' commands for a running cluster: one module for each command or pair of commands of
`launch/cli.py`."""
