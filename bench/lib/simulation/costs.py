"""Unit costs: what each step of a request takes, in seconds of one core unless its name says otherwise.

`measuring.py` measures them on this machine; a YAML file may give some or all of them for other machines. A cost that grows with two things
is a sum, such as `request_s + token_s * tokens`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec

from pd_cache.cluster.document import dump_document, parse_document
from pd_cache.errors import ConfigError

_LARGEST = 64 << 10
Cost = Annotated[float, msgspec.Meta(ge=0, le=1e6)]
Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]


class _CostSection(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    pass


class MachineCosts(_CostSection, frozen=True, kw_only=True):
    """A machine, of which each node has one."""

    cores: Annotated[float, msgspec.Meta(gt=0, le=4096)] = 2.0
    crowded: Annotated[float, msgspec.Meta(ge=1, le=10)] = 1.0
    """How many times as long work takes while another core is busy, too."""
    idle_cores: Annotated[float, msgspec.Meta(ge=0, le=4096)] = 0.0
    """What the processes of a cluster on one machine, together, take of its cores while nothing is asked of them; of a validation only."""
    link_bytes_per_s: Annotated[float, msgspec.Meta(gt=0, le=1e15)] = 1.25e9
    """In each direction; 10 Gbit/s by default. Nothing measures it here, where all nodes are on one machine."""


class ServiceCosts(_CostSection, frozen=True, kw_only=True):
    """What a process pays for a request apart from computing: reading the body, choosing, passing tokens on."""

    request_s: Cost = 0.0
    token_s: Cost = 0.0
    """For each token of the prompt."""
    event_s: Cost = 0.0
    """For each token of the answer."""
    hop_s: Cost = 0.0
    """For a prefill node on the way; of the proxy only."""
    node_s: Cost = 0.0
    """For each node that is chosen from; of the proxy only."""


class PrefillCosts(_CostSection, frozen=True, kw_only=True):
    """A step that computes tokens of one prompt."""

    step_s: Cost = 0.0
    token_s: Cost = 1e-4
    context_s: Cost = 0.0
    """For each token and each token before it."""

    def step(self, tokens: int, position: int) -> float:
        """Returns the seconds of a step that computes `tokens` tokens behind `position` others."""
        return self.step_s + self.token_s * tokens + self.context_s * tokens * (position + tokens / 2)

    def times(self, factor: float) -> PrefillCosts:
        """Returns these costs, each times `factor`."""
        return PrefillCosts(
            step_s=factor * self.step_s, token_s=factor * self.token_s, context_s=factor * self.context_s
        )


class DecodeCosts(_CostSection, frozen=True, kw_only=True):
    """A step that computes one token of each running request."""

    step_s: Cost = 0.01
    sequence_s: Cost = 0.0
    """For each request."""
    context_s: Cost = 0.0
    """For each token before the new one."""

    def step(self, sequences: int, context: float) -> float:
        """Returns the seconds of a step. `context`: the tokens before the new ones, of all sequences together."""
        return self.step_s + self.sequence_s * sequences + self.context_s * context


class PoolCosts(_CostSection, frozen=True, kw_only=True):
    """A call of the pool: a lookup, a store, a load."""

    call_s: Cost = 0.0
    """At the node that calls."""
    object_s: Cost = 0.0
    byte_s: Cost = 0.0
    owner_object_s: Cost = 0.0
    """At the node in whose memory the object is."""
    owner_byte_s: Cost = 0.0
    master_s: Cost = 0.0
    master_object_s: Cost = 0.0


class EngineShape(_CostSection, frozen=True, kw_only=True):
    """What an engine holds and does at a time."""

    chunk_tokens: Count = 512
    kv_bytes_per_token: Count = 131072
    kv_tokens: Count = 500_000
    """How many tokens its paged cache has room for."""
    step_tokens: Count = 2048
    """The most prompt tokens of a step."""
    max_running: Count = 64
    max_queue: Count = 1024


class UnitCosts(_CostSection, frozen=True, kw_only=True):
    """Everything that a simulated cluster needs to know about time."""

    machine: MachineCosts = MachineCosts()
    engine: EngineShape = EngineShape()
    prefill: PrefillCosts = PrefillCosts()
    decode: DecodeCosts = DecodeCosts()
    proxy: ServiceCosts = ServiceCosts()
    node: ServiceCosts = ServiceCosts()
    client: ServiceCosts = ServiceCosts()
    """What sends the requests. It has a machine of its own, except in a validation."""
    lookup: PoolCosts = PoolCosts()
    store: PoolCosts = PoolCosts()
    """Into the node's own memory."""
    load: PoolCosts = PoolCosts()
    """From another node's memory."""
    load_own: PoolCosts = PoolCosts()
    """From the node's own memory."""

    @property
    def chunk_bytes(self) -> int:
        return self.engine.chunk_tokens * self.engine.kv_bytes_per_token


def read_costs(file: Path, measured: UnitCosts) -> UnitCosts:
    """Returns the costs of a YAML file; what it leaves out is as measured. Raises ConfigError, which names the file and the key, for a
    file that holds anything else."""
    try:
        with file.open("rb") as opened:
            data = opened.read(_LARGEST + 1)
        text = data.decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file}: cannot be read: {error}") from None
    if len(data) > _LARGEST:
        raise ConfigError(f"{file}: is larger than {_LARGEST >> 10} KiB")
    given = parse_document(text, file).tree
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: expected sections such as `prefill`, got {given!r:.80}")
    whole: dict[str, Any] = msgspec.to_builtins(measured)
    for section, values in given.items():
        if section not in whole:
            raise ConfigError(f"{file}: {section}: no such section; there are {', '.join(whole)}")
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {section}: expected keys and numbers, got {values!r:.80}")
        if unknown := [key for key in values if key not in whole[section]]:
            raise ConfigError(f"{file}: {section}.{unknown[0]}: no such cost; there are {', '.join(whole[section])}")
        whole[section] |= values
    try:
        return msgspec.convert(whole, UnitCosts, strict=False)  # to YAML, 1e-4 is a text
    except msgspec.ValidationError as error:
        said, _, path = str(error).partition(" - at `$.")
        expected = said.partition(", got")[0]
        section, _, key = path.rstrip("`").partition(".")
        raise ConfigError(f"{file}: {section}.{key}: {expected}, got {whole[section][key]!r:.80}") from None


def write_costs(costs: UnitCosts, file: Path) -> None:
    """Writes costs, to six digits, in the form that `read_costs` reads. Raises ConfigError if the file cannot be written."""
    rounded = {
        section: {
            key: type(value)(f"{value:.6g}") if isinstance(value, float) else value for key, value in values.items()
        }
        for section, values in msgspec.to_builtins(costs).items()
    }
    try:
        file.write_text(dump_document(rounded))
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}") from None
