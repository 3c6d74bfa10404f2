"""Connectors of vLLM 0.32, for two nodes on one machine. `bench ttft --pd` makes vLLM load them from here.

Without a GPU, MooncakeConnector's worker asks torch for the current accelerator, which raises.
NixlConnector's worker moves itself to the machine's last core, whatever the node was bound to, so that both
nodes would compute on that core.
"""

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import MooncakeConnector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
from vllm.platforms import current_platform

__all__ = ["MooncakeConnector", "NixlConnector"]

if current_platform.is_cpu():
    torch.accelerator.current_device_index = lambda: 0
    current_platform.discover_numa_topology = list
