"""`pd-cache explain`: why the cache did not have more of a request's prompt, and how much of a prompt each node would find now.

Proxies and nodes know of the last requests (`/requests/ID`). A reference node says itself what it would find (`/survey`). For a node of
vLLM, this process looks up in the pool under the node's namespaces.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import msgspec

from launch.discovery import View, open_directory
from launch.http import NOBODY, Answer, ask, fetch, proxy_access
from launch.pool_lookups import hash_seeds, master_of, name_prompt, open_lookup, versions_of
from pd_cache.chunks import Namespace
from pd_cache.cluster import ClusterConfig, NodeRecord, differences, read_about
from pd_cache.decoding import UndecodableError, decode_json, one_line
from pd_cache.errors import ConfigError
from pd_cache.lookup import MooncakeLookupClient
from pd_cache.reasons import MEANINGS, MissReason, RequestReport
from transfer.errors import PoolUnavailableError

_SYNC_S = 5.0
_ASK_S = 5.0
_POOL_S = 10.0
_AT_A_TIME = 16
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_MOST_BYTES = 16 << 20
_MOST_TOKENS = 1 << 20
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_NOT_THERE = ("missing", "never_stored", "evicted")


class ExplainedHop(msgspec.Struct, frozen=True):
    """What one node says of a request."""

    hop: str
    """`prefill` or `decode`."""
    node: str
    """The node's name, or its address if discovery does not know it."""
    report: RequestReport | None
    """None if the node has no report on it any more."""


class ExplainedRequest(msgspec.Struct, frozen=True):
    """What the cluster knows of a request."""

    request_id: str
    hops: list[ExplainedHop]
    unanswered: dict[str, str]
    """The nodes that did not answer, with the reason."""

    @property
    def known(self) -> bool:
        """Whether any node has a report on it."""
        return any(hop.report is not None for hop in self.hops)


class ExplainedNode(msgspec.Struct):
    """How much of a prompt a node would find."""

    node: str
    role: str
    tokens: int | None = None
    """The prompt's length there; None if the node did not say."""
    found: int | None = None
    """Tokens, in whole chunks; None if nothing could be asked."""
    where: str = ""
    """What was asked: `tiers and pool`, or `pool`."""
    reason: MissReason = "error"
    """Why not more."""
    detail: str = ""


class _ToldTrip(msgspec.Struct, frozen=True):
    hops: list[ExplainedHop]


class _Reports(msgspec.Struct, frozen=True):
    reports: list[RequestReport]


class _Tokens(msgspec.Struct, frozen=True):
    tokens: list[_Token]


class _Survey(msgspec.Struct, frozen=True):
    tokens: int
    found: int
    reason: MissReason


# --- a request -------------------------------------------------------------------------------------------------------


def explain_request(config: ClusterConfig, request_id: str) -> ExplainedRequest:
    """Asks the proxies of the cluster, and then its nodes, for a request of this id: its `X-Request-Id`, or the id of its answer.

    Each has a few seconds to answer. Raises ConfigError for a text that cannot be an id.
    """
    if not _REQUEST_ID.fullmatch(request_id):
        raise ConfigError(
            f"REQUEST_ID: expected 1 to 128 letters, digits or . _ : -, got {one_line(request_id)!r}; a request's id is the "
            "X-Request-Id of its answer"
        )
    with _viewing(config) as view:
        engines = [*view.by_role("prefill"), *view.by_role("decode")]
        nodes = [record for record in engines if record.address.startswith("http")]
        proxies = [record for record in view.by_role("proxy") if record.address.startswith("http")]
        unanswered: dict[str, str] = {}
        access, path = proxy_access(config), f"/requests/{request_id}"

        def asked(record: NodeRecord) -> Answer | None:
            try:
                answer = ask(record.address + path, _ASK_S, access if record.role == "proxy" else NOBODY)
            except (OSError, ValueError) as error:
                unanswered[record.name] = f"it does not answer: {error}"
                return None
            if answer.status not in (200, 404):
                unanswered[record.name] = f"it answers {answer.status} {one_line(answer.reason)}"
            return answer if answer.status == 200 else None

        with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-explain") as threads:
            trips = [_read(answer, _ToldTrip) for answer in threads.map(asked, proxies)]
            hops: list[ExplainedHop] = next((trip.hops for trip in trips if trip is not None), [])
            lacking = {hop.node for hop in hops if hop.report is None}
            wanted = [record for record in nodes if not hops or record.address.rstrip("/") in lacking]
            answers = list(threads.map(asked, wanted))
    told: dict[str, list[RequestReport]] = {}
    for record, answer in zip(wanted, answers, strict=True):
        if (read := _read(answer, _Reports)) is not None:
            told[record.name] = read.reports
    by_address = {record.address.rstrip("/"): record for record in nodes}
    if hops:
        hops = [_completed(hop, by_address.get(hop.node), told) for hop in hops]
    else:
        hops = [
            ExplainedHop(record.role, record.name, report) for record in wanted for report in told.get(record.name, ())
        ]
    return ExplainedRequest(request_id, hops, unanswered)


def _completed(hop: ExplainedHop, record: NodeRecord | None, told: dict[str, list[RequestReport]]) -> ExplainedHop:
    """Returns the proxy's view of a hop, with the node's name, and with the node's own report if the proxy has none."""
    if record is None:
        return hop
    own = told.get(record.name, [])
    return ExplainedHop(hop.hop, record.name, hop.report or (own[-1] if own else None))


def request_text(explained: ExplainedRequest) -> str:
    """Returns what `explain REQUEST_ID` prints."""
    lines = []
    for hop in explained.hops:
        if hop.report is None:
            lines.append(f"{hop.hop} at {hop.node}: the node has no report on it (any more)")
            continue
        report = hop.report
        lines += [
            f"{hop.hop} at {hop.node}: {report.asked} tokens",
            f"  in the engine's own cache {report.at_hand}, found behind these {report.found}, loaded {report.loaded} "
            f"(chunks from memory {report.memory}, disk {report.disk}, pool {report.pool}), computed {report.computed}",
            f"  {report.reason}: {MEANINGS[report.reason]}",
        ]
    if not explained.hops:
        lines.append(f"{explained.request_id}: no node knows this request among its last ones")
    lines += [f"{name}: {why}" for name, why in sorted(explained.unanswered.items())]
    return "\n".join(lines)


# --- a prompt --------------------------------------------------------------------------------------------------------


def read_prompt_file(file: Path) -> list[int] | str:
    """Returns the prompt in a file: token ids if it holds a JSON list, otherwise its text.

    Raises ConfigError if the file cannot be read, is empty or too large, or holds a list of anything but token ids.
    """
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MOST_BYTES + 1)
        text = raw.decode()
    except OSError as error:
        raise ConfigError(f"--prompt: {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"--prompt: {file}: expected text in UTF-8, or a JSON list of token ids") from None
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"--prompt: {file}: it is larger than {_MOST_BYTES >> 20} MiB")
    if not text.strip():
        raise ConfigError(f"--prompt: {file}: it is empty")
    if not text.lstrip().startswith("["):
        return text
    try:
        tokens = decode_json(raw, list[_Token])
    except UndecodableError as error:
        raise ConfigError(
            f"--prompt: {file}: it begins like a JSON list, but is no list of token ids: {error}"
        ) from None
    if not 0 < len(tokens) <= _MOST_TOKENS:
        raise ConfigError(f"--prompt: {file}: expected 1 to {_MOST_TOKENS} token ids, got {len(tokens)}")
    return tokens


def explain_prompt(config: ClusterConfig, prompt: list[int] | str, salt: str | None = None) -> list[ExplainedNode]:
    """Returns what each prefill and decode node would find of a prompt now, and why not more. `salt` is the request's `cache_salt`.

    Nothing is stored, loaded or computed.
    """
    with _viewing(config) as view:
        records = [*view.by_role("prefill"), *view.by_role("decode")]
        with ThreadPoolExecutor(_AT_A_TIME, "pd-cache-explain") as threads:
            known = list(threads.map(_told, records))
            explained = list(threads.map(lambda record: _ask_node(record, prompt, salt), known))
        with contextlib.closing(_PoolLookups(config, view, salt)) as pool:
            for record, one in zip(known, explained, strict=True):
                if one.found is None and not one.detail:
                    tokens = prompt if isinstance(prompt, list) else _tokenized(record, prompt, one)
                    if tokens is not None:
                        pool.look(record, tokens, one)
    _compare(known, explained)
    return explained


def prompt_text(explained: Sequence[ExplainedNode]) -> str:
    """Returns what `explain --prompt` prints."""
    lines = []
    for one in explained:
        if one.found is None:
            lines.append(f"{one.node} ({one.role}): {one.detail or MEANINGS[one.reason]}")
            continue
        lines.append(f"{one.node} ({one.role}): would find {one.found} of {one.tokens} tokens in its {one.where}")
        lines.append(f"  {one.reason}: {one.detail or MEANINGS[one.reason]}")
    return "\n".join(lines) or "discovery knows no prefill or decode node"


def _told(record: NodeRecord) -> NodeRecord:
    """Returns the record, with the namespace of the node's `/health` if it registered without one."""
    if record.fingerprint is None:
        with contextlib.suppress(OSError, ValueError):
            return record.telling(read_about(fetch(f"{record.address}/health", _ASK_S)))
    return record


def _ask_node(record: NodeRecord, prompt: list[int] | str, salt: str | None) -> ExplainedNode:
    """Returns the node's own answer; `found` is None if it has no page for that."""
    one = ExplainedNode(record.name, record.role)
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 1, **({"model": record.model} if record.model else {})}
    if salt is not None:
        body["cache_salt"] = salt
    try:
        answer = ask(f"{record.address}/survey", _ASK_S, NOBODY, msgspec.json.encode(body))
    except (OSError, ValueError) as error:
        one.detail = f"it does not answer: {error}"
        return one
    survey = _read(answer, _Survey) if answer.status == 200 else None
    if survey is not None:
        one.tokens, one.found, one.reason, one.where = survey.tokens, survey.found, survey.reason, "tiers and pool"
    elif answer.status not in (404, 405) or b"model" in answer.body:
        one.detail = _refusal(answer)
    return one


def _tokenized(record: NodeRecord, prompt: str, one: ExplainedNode) -> list[int] | None:
    """Returns the tokens of a text from the node; notes why if there are none."""
    body = {"prompt": prompt, **({"model": record.model} if record.model else {})}
    try:
        answer = ask(f"{record.address}/tokenize", _ASK_S, NOBODY, msgspec.json.encode(body))
    except (OSError, ValueError) as error:
        one.detail = f"it does not answer: {error}"
        return None
    tokens: _Tokens | None = _read(answer, _Tokens) if answer.status == 200 else None
    if tokens is None:
        one.detail = f"it does not return the tokens of a text ({_refusal(answer)}); give token ids"
        return None
    return tokens.tokens


class _PoolLookups:
    """Lookups in the pool, with a client for each kind of namespaces. For one thread."""

    def __init__(self, config: ClusterConfig, view: View, salt: str | None) -> None:
        self._config = config
        self._salt = salt
        self._master = master_of(config, view)
        self._versions = versions_of(config, view)
        self._seeds = hash_seeds(config)
        self._clients: dict[tuple[Namespace, ...], MooncakeLookupClient] = {}

    def look(self, record: NodeRecord, tokens: list[int], one: ExplainedNode) -> None:
        """Notes what a node would find in the pool."""
        one.tokens, one.where = len(tokens), "pool"
        spaces = record.cache_namespaces
        if not spaces:
            one.detail = "it does not say in which namespace its chunks are"
            return
        if self._master is None:
            one.reason, one.detail = "pool_down", "no master of the pool is known"
            return
        if len(tokens) < spaces[0].chunk_size:
            one.found, one.reason = 0, "too_short"
            return
        try:
            names = name_prompt(spaces[0], tokens, self._salt, self._seeds)
            surveyed = self._client(spaces, self._master).survey(names)
        except PoolUnavailableError:
            one.found, one.reason = 0, "pool_down"
        except ValueError as error:
            one.detail = one_line(str(error))
        else:
            one.found, one.reason = surveyed.chunks * spaces[0].chunk_size, surveyed.reason

    def _client(self, spaces: tuple[Namespace, ...], master: str) -> MooncakeLookupClient:
        client = self._clients.get(spaces)
        if client is None:
            client = self._clients[spaces] = open_lookup(
                self._config, self._config.nodes[0].host, spaces, master, self._versions
            )
        client.store.wait_open(_POOL_S)
        client.version.wait_known(_POOL_S)
        return client

    def close(self) -> None:
        """Disconnects from the pool."""
        for client in self._clients.values():
            client.close()


def _compare(records: Sequence[NodeRecord], explained: Sequence[ExplainedNode]) -> None:
    """Says of a node that finds less than a node of another namespace that this is why."""
    differing = differences(records)
    for record, one in zip(records, explained, strict=True):
        if one.found is None or one.reason not in _NOT_THERE:
            continue
        better = [
            (other.found, record_.name)
            for record_, other in zip(records, explained, strict=True)
            if other.found is not None and other.found > one.found and record_.fingerprint != record.fingerprint
        ]
        if better:
            found, name = max(better)
            one.reason = "other_namespace"
            one.detail = f"{name}, which would find {found} tokens, has another namespace"
            if why := differing.get(record.name) or differing.get(name):
                one.detail += f": {why}"


# --- asking ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _viewing(config: ClusterConfig) -> Iterator[View]:
    with open_directory(config) as directory:
        directory.wait_synced(_SYNC_S)
        yield directory.view()


def _read(answer: Answer | None, kind: type[Any]) -> Any:
    """Returns what an answer holds; None if there is none, or if it holds anything else."""
    if answer is None:
        return None
    with contextlib.suppress(UndecodableError):
        return decode_json(answer.body, kind)
    return None


def _refusal(answer: Answer) -> str:
    """Returns a node's refusal in a line."""
    told = one_line(answer.body[:200].decode(errors="replace"))
    return f"it answers {answer.status}: {told}"
