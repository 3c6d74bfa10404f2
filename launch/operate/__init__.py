"""What operators do to a running cluster, and see of it: one module for each command or pair of commands of `launch/cli.py`."""
