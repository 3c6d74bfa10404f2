"""Unit costs of each step of a request, in seconds of one core unless the name says otherwise.

The defaults for services and the pool were measured on two cores without a network. The defaults for machines
and engines are assumed, for one accelerator a node. A YAML file may replace them. A cost that depends on two
figures is a sum, such as `request_s + token_s * tokens`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from pd_cache.cluster.reader import parse_document
from pd_cache.errors import ConfigError

Cost = Annotated[float, msgspec.Meta(ge=0)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class _CostSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class MachineCosts(_CostSection, frozen=True):
    """A node's machine."""

    cores: Count = 16
    link_bytes_per_s: Annotated[float, msgspec.Meta(gt=0)] = 12.5e9
    """The link's rate in each direction; 100 Gbit/s by default."""


class ServiceCosts(_CostSection, frozen=True):
    """The cost of a request at a server, without computing: reading the body, choosing a node, passing tokens
    on."""

    request_s: Cost = 0.0
    token_s: Cost = 0.0
    """For each token of the prompt."""
    event_s: Cost = 0.0
    """For each token of the answer."""
    hop_s: Cost = 0.0
    """For a prefill hop. Only proxies and pickers have `hop_s` and `node_s`."""
    node_s: Cost = 0.0
    """For each node from which a proxy chooses."""


class PrefillCosts(_CostSection, frozen=True):
    """A step that computes tokens of one prompt."""

    step_s: Cost = 0.003
    token_s: Cost = 8e-5
    context_s: Cost = 0.0
    """For each pair of a computed token and a token before it."""

    def step(self, tokens: int, position: int) -> float:
        """Returns the seconds of a step that computes `tokens` tokens after `position` others."""
        return self.step_s + self.token_s * tokens + self.context_s * tokens * (position + tokens / 2)


class DecodeCosts(_CostSection, frozen=True):
    """A step that computes one token of each running request."""

    step_s: Cost = 0.008
    sequence_s: Cost = 2e-5
    """For each request."""
    context_s: Cost = 3e-8
    """For each token before the new one."""

    def step(self, sequences: int, context: float) -> float:
        """Returns the seconds of a step. `context`: the tokens before the new ones, of all sequences
        together."""
        return self.step_s + self.sequence_s * sequences + self.context_s * context


class PoolCosts(_CostSection, frozen=True):
    """A call of the pool: a lookup, a store, a load."""

    call_s: Cost = 0.0
    """The cost of a call at the node that calls."""
    object_s: Cost = 0.0
    byte_s: Cost = 0.0
    owner_byte_s: Cost = 0.0
    """The cost of a byte at the node that has the object in its memory."""
    master_s: Cost = 0.0
    master_object_s: Cost = 0.0


class EngineShape(_CostSection, frozen=True):
    """The limits of an engine."""

    chunk_tokens: Count = 512
    kv_bytes_per_token: Count = 131072
    kv_tokens: Count = 400_000
    """How many tokens its paged cache has room for."""
    step_tokens: Count = 2048
    """The most prompt tokens of a step."""
    max_running: Count = 128
    max_queue: Count = 1024


class UnitCosts(_CostSection, frozen=True):
    """All costs of a simulated cluster."""

    machine: MachineCosts = MachineCosts()
    engine: EngineShape = EngineShape()
    prefill: PrefillCosts = PrefillCosts()
    decode: DecodeCosts = DecodeCosts()
    proxy: ServiceCosts = ServiceCosts(request_s=6e-4, token_s=3.5e-8, event_s=3e-5, hop_s=4e-4, node_s=8e-7)
    """`bench proxy` has measured the costs of `proxy`, `picker` and `envoy`."""
    picker: ServiceCosts = ServiceCosts(request_s=1.3e-3, token_s=8e-8, hop_s=4e-4, node_s=8e-7)
    """The proxy behind Envoy."""
    envoy: ServiceCosts = ServiceCosts(request_s=4.6e-4, token_s=3.7e-8, event_s=3.5e-5)
    """Envoy before a picker, on all cores of its machine."""
    node: ServiceCosts = ServiceCosts(request_s=1.4e-3, token_s=4.6e-6)
    lookup: PoolCosts = PoolCosts(call_s=1.6e-4, object_s=1.2e-6, master_s=3.3e-5, master_object_s=4.1e-7)
    store: PoolCosts = PoolCosts(call_s=1e-3, object_s=2.6e-4, byte_s=3.8e-10, owner_byte_s=1e-10, master_s=1.8e-4, master_object_s=2.7e-5)  # fmt: skip
    """A store into the node's own memory."""
    load: PoolCosts = PoolCosts(
        call_s=1.2e-3, object_s=3e-4, byte_s=1e-10, master_s=5.3e-5, master_object_s=2e-5
    )
    """A load from another node's memory, by RDMA: the owner's processors do nothing."""
    load_own: PoolCosts = PoolCosts(call_s=1.2e-3, object_s=9.2e-5, byte_s=1.5e-9, owner_byte_s=5.5e-11, master_s=6.6e-5, master_object_s=5.4e-6)  # fmt: skip
    """A load from the node's own memory."""

    @property
    def chunk_bytes(self) -> int:
        return self.engine.chunk_tokens * self.engine.kv_bytes_per_token


def read_costs(file: Path) -> UnitCosts:
    """Returns the costs of a YAML file. Costs that the file leaves out keep their defaults.

    Raises ConfigError, which names the file and the key, for a file that holds anything else.
    """
    tree = parse_document(file.read_text(), file).tree
    try:
        # YAML reads 1e-4 as a string
        return msgspec.convert({} if tree is None else tree, UnitCosts, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{file}: {error}") from None
