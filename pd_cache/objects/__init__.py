"""Stores values of any size by name, in the same pool and tiers as chunks. For programs without a paged
cache."""
