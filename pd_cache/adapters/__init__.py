"""pd-cache under engines and caches that others wrote, each over an `ObjectCache`. Only `lmcache`,
`sglang_hicache` and `vllm_tier` import their peers."""
