"""A cluster of real processes under random operations and random faults, watched by an oracle that knows
every byte.

It answers one question: whatever happens to the cache, does it ever change a byte, keep a caller waiting,
raise, or leave something behind? `make soak MINUTES=10 SEED=7` runs it (`__main__`). The seed determines the
plan: operations, requests and faults.
"""
