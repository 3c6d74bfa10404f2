"""vLLM's offline engine with pd-cache's connector. Run it twice: the second process takes the prompt from the
pool.

pd-cache config example pool > pool.yaml
pd-cache up -c pool.yaml                      # in another terminal
python vllm_offline.py MODEL pool.yaml
"""

import sys

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PROMPT = "Once upon a time, in a machine room far away, two nodes shared one cache. " * 40


def main(model: str, cluster_file: str) -> None:
    connector = KVTransferConfig(
        kv_connector="PdCacheConnector",
        kv_connector_module_path="pd_cache.vllm.connector",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"config_file": cluster_file},
    )
    # eager: it starts sooner
    llm = LLM(model, kv_transfer_config=connector, max_model_len=2048, enforce_eager=True)
    (output,) = llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=16))
    print(f"tokens: {list(output.outputs[0].token_ids)}")
    print(f"cached: {output.num_cached_tokens} of {len(output.prompt_token_ids or ())} tokens of the prompt")


if __name__ == "__main__":  # vLLM starts processes that import this file
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
