"""pd-cache inside vLLM: `kv_connector: PdCacheConnector`, `kv_connector_module_path: pd_cache.vllm.connector`.

- `connector.py` is what vLLM sees; it keeps failures in here from reaching vLLM;
- `scheduler.py` decides, in the scheduler's process, what is looked up, loaded and stored;
- `worker.py` moves the KV, in each worker's process, off the model's thread;
- `steps.py` is what the two exchange with every step;
- `files.py` makes vLLM's server tell what the connector knows.

Only `connector.py`, `stats.py` and `model.py` import vLLM when they are imported.
"""
