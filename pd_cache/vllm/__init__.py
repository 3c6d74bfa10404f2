"""pd-cache inside of vLLM: `kv_connector: PdCacheConnector`, `kv_connector_module_path: pd_cache.vllm.connector`.

- `connector.py` is what vLLM sees, and keeps whatever goes wrong in here from reaching it;
- `scheduler.py` decides, in the scheduler's process, what is looked up, loaded and stored;
- `worker.py` moves the KV, in each worker's process, off the model's thread;
- `messages.py` is what the two tell each other with every step;
- `health.py` has vLLM's `/health` tell the namespace.
"""
