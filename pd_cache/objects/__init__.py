"""Values of any size by name, in the same pool and tiers as chunks, for programs that have no paged cache."""
