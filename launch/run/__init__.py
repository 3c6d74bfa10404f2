"""Runs nodes: `up` and its supervisor, the roles, and the small server of their health and metrics."""
