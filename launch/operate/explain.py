"""`pd-cache explain`: says why a request's prompt was computed, and how much of a prompt each node would find
now.

Proxies and nodes keep reports on the last requests (`/requests/ID`). For a prompt, this process looks in the
pool, under the node's namespaces, for the chunks that the node would find.
"""

from __future__ import annotations

import contextlib
import itertools
import urllib.parse
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec.structs import replace

from launch.discovery import View, master_of
from launch.http import NOBODY, BadStatus, fetch, proxy_access
from launch.proxy.lookups import Pool, hash_seeds, open_lookup
from launch.proxy.routing.prefixes import PromptNamer
from launch.proxy.trips import HopReport, Trip
from launch.watch.asker import cluster_status
from launch.watch.state import NodeStatus
from pd_cache.chunks import Namespace
from pd_cache.cluster import ENGINES, ClusterConfig, NodeRecord
from pd_cache.cluster.machine import own_host
from pd_cache.decoding import UndecodableError, decode_json, one_line
from pd_cache.errors import ConfigError, PdCacheError
from pd_cache.lookup import MooncakeLookupClient
from pd_cache.reasons import MEANINGS, MissReason, RequestReport, reason_text
from transfer.errors import PoolUnavailableError

_ASK_S = 5.0
_POOL_S = 10.0
_AT_A_TIME = 16
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_NOT_THERE = ("missing", "never_stored", "evicted")


class ExplainedRequest(msgspec.Struct, frozen=True):
    """What the cluster knows about a request."""

    request_id: str
    hops: list[HopReport]
    """The reports. A node is given by its name, or by its address if discovery does not know it."""
    unanswered: dict[str, str]
    """The nodes that did not answer, with the reason."""

    @property
    def known(self) -> bool:
        """Whether any node has a report on the request."""
        return any(hop.report is not None for hop in self.hops)


class ExplainedNode(msgspec.Struct):
    """How much of a prompt a node would find."""

    node: str
    role: str
    tokens: int | None = None
    """The prompt's length there; None if the node did not say."""
    found: int | None = None
    """Tokens, in whole chunks; None if the pool could not be asked."""
    reason: MissReason = "error"
    """Why the node would not find more."""
    detail: str = ""


class _Reports(msgspec.Struct, frozen=True):
    reports: list[RequestReport]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[_Token]


# --- a request ----------------------------------------------------------------------------------------------


def explain_request(config: ClusterConfig, request_id: str) -> ExplainedRequest:
    """Asks the proxies and nodes of the cluster for a request of this id: its `X-Request-Id`, or the id of
    its answer.

    Each has a few seconds to answer. A report that a node gave in its answer comes from the proxy; other
    reports come from the nodes themselves.
    """
    nodes = cluster_status(config).nodes
    rows = [row for role in ("proxy", *ENGINES) for row in nodes if row.record.role == role]
    names = {row.record.address: row.name for row in rows}
    unanswered = {row.name: f"down: {row.why}" for row in rows if row.state == "down"}
    records = [row.record for row in rows if row.state != "down"]
    access = proxy_access(config)

    def asked(record: NodeRecord, asked_for: str) -> Sequence[HopReport]:
        by_proxy = record.role == "proxy"
        try:
            answer = fetch(f"{record.address}/requests/{asked_for}", _ASK_S, access if by_proxy else NOBODY)
            if by_proxy:
                return decode_json(answer, Trip).hops
            reports = decode_json(answer, _Reports).reports
            return [HopReport(record.role, record.address, report) for report in reports]
        except (OSError, ValueError) as error:
            if not (isinstance(error, BadStatus) and error.status == 404):
                unanswered[record.name] = f"no answer: {error}"
        return []

    # engines put `cmpl-` or `chatcmpl-` before the id
    within = request_id.removeprefix("chat").removeprefix("cmpl-")
    with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-explain") as threads:
        for name in dict.fromkeys((request_id, within)):
            asked_for = itertools.repeat(urllib.parse.quote(name, safe=""))
            answers = list(zip(records, threads.map(asked, records, asked_for), strict=True))
            trip = next((way for record, way in answers if record.role == "proxy" and way), None)
            own = [hop for record, found in answers if record.role != "proxy" for hop in found]
            if trip or own:
                break
    reports = {hop.node: hop.report for hop in own}
    # without a trip, no proxy knows the request's nodes
    hops = [
        replace(hop, node=names.get(hop.node, hop.node), report=hop.report or reports.get(hop.node))
        for hop in trip or own
    ]
    return ExplainedRequest(request_id, hops, unanswered)


def request_text(explained: ExplainedRequest) -> str:
    """Returns what `explain REQUEST_ID` prints."""
    lines = [hop.text({}) for hop in explained.hops]
    if not explained.hops:
        nodes = "no node that answers" if explained.unanswered else "no proxy or engine"
        lines.append(
            f"{explained.request_id}: {nodes} remembers this request; give the X-Request-Id of its answer, or the answer's own id"
        )
    lines += [f"{name}: {why}" for name, why in sorted(explained.unanswered.items())]
    return "\n".join(lines)


# --- a prompt -----------------------------------------------------------------------------------------------


def read_prompt_file(file: Path) -> list[int] | str:
    """Returns the prompt in a file: token ids if it holds a JSON list, otherwise its text. Raises ConfigError
    if it holds neither."""
    prompt: list[int] | str
    try:
        prompt = file.read_text("utf-8")
        if prompt.lstrip().startswith("["):
            prompt = decode_json(prompt, list[_Token])
    except UndecodableError as error:
        raise ConfigError(
            f"--prompt: {file}: it begins like a JSON list, but is no list of token ids: {error}"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"--prompt: {file}: {getattr(error, 'strerror', None) or error}") from None
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise ConfigError(f"--prompt: {file}: it is empty")
    return prompt


def explain_prompt(
    config: ClusterConfig, prompt: list[int] | str, salt: str | None = None
) -> list[ExplainedNode]:
    """Returns how much of a prompt each prefill and decode node would find in the pool now, and why no more.
    `salt` is the request's `cache_salt`.

    Nothing is stored, loaded or computed.
    """
    status, explained = cluster_status(config), list[ExplainedNode]()
    rows = [row for role in ENGINES for row in status.nodes if row.record.role == role]
    with contextlib.ExitStack() as stack:
        pool = _PoolLookups(config, status.view, salt, stack)
        for row in rows:
            node = ExplainedNode(row.name, row.record.role)
            explained.append(node)
            if row.state == "down":
                node.detail = f"down: {row.why}"
                continue
            try:
                tokens = prompt if isinstance(prompt, list) else _tokenized(row.record, prompt)
            except (OSError, ValueError) as error:
                node.detail = f"it does not return the tokens of a text ({error}); give token ids"
            else:
                pool.look(row.record, tokens, node)
    _compare(rows, explained)
    return explained


def prompt_text(explained: Sequence[ExplainedNode]) -> str:
    """Returns what `explain --prompt` prints."""
    lines = []
    for node in explained:
        if node.found is None:
            lines.append(f"{node.node} ({node.role}): {node.detail or MEANINGS[node.reason]}")
            continue
        lines.append(
            f"{node.node} ({node.role}): would find {node.found} of {node.tokens} tokens in the pool"
        )
        lines.append(f"  {reason_text(node.reason, node.detail)}")
    return "\n".join(lines) or "discovery knows no prefill or decode node"


def _tokenized(record: NodeRecord, prompt: str) -> list[int]:
    """Returns the tokens of a text from the node. Raises OSError or ValueError if it does not answer with
    them."""
    body = {"prompt": prompt, **({"model": record.model} if record.model else {})}
    answer = fetch(f"{record.address}/tokenize", _ASK_S, NOBODY, msgspec.json.encode(body))
    return decode_json(answer, _Tokens).tokens


class _PoolLookups:
    """Lookups in the pool, with a client for each kind of namespaces. For one thread."""

    def __init__(
        self, config: ClusterConfig, view: View, salt: str | None, stack: contextlib.ExitStack
    ) -> None:
        """`stack` closes the clients."""
        self._config = config
        self._stack = stack
        self._salt = salt
        self._master = master_of(config, view)
        self._seeds = hash_seeds(config)
        self._clients: dict[tuple[Namespace, ...], MooncakeLookupClient] = {}

    def look(self, record: NodeRecord, tokens: list[int], node: ExplainedNode) -> None:
        """Notes how much a node would find in the pool."""
        node.tokens = len(tokens)
        spaces = record.cache_namespaces
        if not spaces:
            node.detail = "it does not report the namespace of its chunks"
            return
        if self._master is None:
            node.reason, node.detail = "pool_down", "no master of the pool is known"
            return
        if len(tokens) < spaces[0].chunk_size:
            node.found, node.reason = 0, "too_short"
            return
        try:
            named = PromptNamer(spaces[0], self._seeds).name(tokens, self._salt)
            client = self._client(spaces, self._master)
            client.reset(record.label)
            found = client.find(named.names)
        except PoolUnavailableError:
            node.found, node.reason = 0, "pool_down"
        except (PdCacheError, ValueError) as error:
            node.detail = one_line(str(error))
        else:
            node.found, node.reason = found.chunks * spaces[0].chunk_size, found.reason

    def _client(self, spaces: tuple[Namespace, ...], master: str) -> MooncakeLookupClient:
        if spaces not in self._clients:
            client = open_lookup(self._config, own_host(self._config), Pool(spaces, master))
            self._clients[spaces] = self._stack.enter_context(contextlib.closing(client))
            client.store.wait_open(_POOL_S)
        return self._clients[spaces]


def _compare(rows: Sequence[NodeStatus], explained: Sequence[ExplainedNode]) -> None:
    """Sets the reason `other_namespace` for each node that finds less than a node of another namespace."""
    for row, node in zip(rows, explained, strict=True):
        if node.found is None or node.reason not in _NOT_THERE:
            continue
        better = [
            (other.found, other_row.name, other_row.difference)
            for other_row, other in zip(rows, explained, strict=True)
            if other.found is not None
            and other.found > node.found
            and other_row.record.fingerprint != row.record.fingerprint
        ]
        if better:
            found, name, difference = max(better)
            node.reason = "other_namespace"
            node.detail = f"{name}, which would find {found} tokens, has another namespace"
            if why := row.difference or difference:
                node.detail += f": {why}"
