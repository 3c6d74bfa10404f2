"""pd-cache inside vLLM: `kv_connector: PdCacheConnector`, `kv_connector_module_path:
pd_cache.vllm.connector`.

- `connector.py` has the hooks that vLLM calls; no failure in here reaches vLLM;
- `scheduler.py` runs in the scheduler's process: it decides what is looked up, loaded and stored;
- `worker.py` runs in each worker's process: it moves the KV, off the model's thread;
- `steps.py` has the messages between the two;
- `files.py` lets vLLM's API server report what the connector knows.

Only `connector.py`, `stats.py` and `model.py` import vLLM when they are imported.
"""
