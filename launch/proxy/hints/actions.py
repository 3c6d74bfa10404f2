"""Answers hints, and renews the leases of what is pinned."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec

from launch.discovery import View
from launch.openai import ApiError
from launch.proxy.bodies import Completion, check_fields
from launch.proxy.exchange import Exchange
from launch.proxy.hints.messages import (
    KINDS,
    PROMPTS,
    TARGETS,
    ActionAnswer,
    HintAction,
    HintPayload,
    HintRefusedError,
    HintsAnswer,
    HintsMessage,
    done,
    refused,
)
from launch.proxy.hints.pins import Pin, PinKey, Pins
from launch.proxy.hints.prefetches import PREFETCH_S, Prefetches
from launch.proxy.hops import Hops
from launch.proxy.keys import Client, Keys
from launch.proxy.lookups import PoolLookups
from launch.proxy.metrics import ProxyMetrics
from launch.proxy.routing.prefixes import NamedPrompt
from pd_cache.cluster import HintsConfig
from pd_cache.decoding import UndecodableError, decode_json, one_line

log = logging.getLogger(__name__)

LARGEST_HINTS = 4 << 20
"""The most bytes of a message. The event loop parses such a message in 70 ms."""
HINTS_S = 5.0
"""The longest time for the body of a `POST /hints`, and for a completion's answer to wait for the answer to
its hints."""
_LEASE_MS = 10_000
_LONGEST_RENEWAL_S = 5.0
"""Leases are renewed at least this often, however long they are, so that new chunks in the pool get a lease,
too."""
_RECENT, _RECENT_CHUNKS = 1000, 1 << 17
"""The most requests whose prompts are remembered, and the most names of their chunks (8 MiB)."""

PoolBytes = Callable[[View], int]
"""Returns how many bytes the pool holds. Blocks; raises OSError or ValueError if that is not known."""


class Hints:
    """Answers hints, and renews the leases of what is pinned."""

    def __init__(
        self,
        config: HintsConfig,
        lookups: PoolLookups,
        keys: Keys,
        hops: Hops,
        metrics: ProxyMetrics,
        pool_bytes: PoolBytes = lambda view: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`lookups` renews leases, `hops` names prompts and has nodes load them."""
        self._config = config
        self._lookups = lookups
        self._keys = keys
        self._hops = hops
        self._metrics = metrics
        self._pool_bytes = pool_bytes
        self._clock = clock
        self._view = View(())
        self._pool: int | None = None
        """The pool's size, as far as it is known."""
        self._asked = -math.inf
        """When the pool's size was last asked for."""
        self._asking = asyncio.Lock()
        self.pins = pins = Pins(config.max_pins)
        metrics.pins.set_function(lambda: len(pins))
        metrics.pinned_bytes.set_function(lambda: len(pins.chunks()) * lookups.chunk_bytes)
        self._recent: OrderedDict[tuple[Client, str], NamedPrompt] = OrderedDict()
        self._recent_chunks = 0
        self.prefetches = Prefetches(hops, lookups)

    def begin(self, exchange: Exchange, message: bytes | None) -> None:
        """Takes in a request, which hints may name later, and begins to answer the hints that came with
        it."""
        if (named := exchange.prompt.named) is not None:
            client, known = exchange.client, self._recent
            if self.pins:
                names = frozenset(named.names)
                self.pins.end_where(lambda key, pin: pin.once and key[0] == client and pin.target in names)
            self._recent_chunks -= len(known.pop((client, exchange.id), named._replace(names=())).names)
            known[client, exchange.id] = named._replace(blocks=())
            self._recent_chunks += len(named.names)
            while len(known) > _RECENT or self._recent_chunks > _RECENT_CHUNKS:
                self._recent_chunks -= len(known.popitem(last=False)[1].names)
        if message is not None:
            exchange.hinted = asyncio.create_task(self.taken(message, exchange))

    def update(self, view: View) -> None:
        self._view, self._asked = view, -math.inf

    async def taken(self, message: bytes, exchange: Exchange) -> str:
        """Returns the answer to hints that came with a completion, for a header. Raises nothing."""
        answer: dict[str, Any]
        try:
            async with asyncio.timeout(HINTS_S):
                answer = msgspec.to_builtins(await self.take(message, exchange))
        except TimeoutError:
            answer = {"error": f"The hints were not answered within {HINTS_S:g} s"}
        except ApiError as error:
            answer = {"error": error.message[:500]}
        except Exception:  # a hint never fails its request
            log.exception("hints failed unexpectedly")
            answer = {"error": "Internal error of the proxy"}
        return json.dumps(answer, separators=(",", ":"))

    async def take(self, message: bytes, exchange: Exchange) -> HintsAnswer:
        """Does the actions of a client's message, and returns the outcome of each.

        Raises ApiError 400 if the message is too large, or no envelope.
        """
        if len(message) > LARGEST_HINTS:
            raise ApiError(
                400, f"kv_hints have more than {LARGEST_HINTS} bytes", param="kv_hints", code="bad_hints"
            )
        try:
            hints = decode_json(message, HintsMessage)
        except UndecodableError as error:
            raise ApiError(
                400, f"No kv_hints of version 0.1: {error}", param="kv_hints", code="bad_hints"
            ) from None
        answers = []
        for raw in hints.actions:
            kind, action_id = "other", ""
            try:
                action = decode_json(bytes(raw), HintAction)
                action_id = action.action_id
                kind = KINDS.get(action.action_type, "other")
                answer = await self._do(action, exchange)
            except (ApiError, HintRefusedError, UndecodableError) as error:
                answer = refused(action_id, error)
            self._metrics.hints.labels(kind, answer.status).inc()
            answers.append(answer)
        return HintsAnswer(hints.protocol_version, hints.message_id, answers)

    async def _do(self, action: HintAction, exchange: Exchange) -> ActionAnswer:
        """Raises ApiError, HintRefusedError or UndecodableError with the reason if the action is refused."""
        kind, config, client = action.action_type, self._config, exchange.client
        if kind not in KINDS or action.action_version != "1.0":
            what = one_line(f"{kind[:40]} {action.action_version[:8]}")
            raise HintRefusedError(f"{what} is not supported, only {', '.join(KINDS)} 1.0")
        if not config.max_share:
            raise HintRefusedError("proxy.hints.max_share is 0")
        payload = bytes(action.payload)
        check_fields(payload)
        given, fields = decode_json(payload, HintPayload), decode_json(payload, dict[str, msgspec.Raw])
        self.pins.end_where(self._is_over)
        if kind == "kv.release":
            which = given.action_id or (await self._target(fields, given, exchange))[0].names[-1]
            ended = self.pins.end_where(lambda key, pin: key[0] == client and which in (key[1], pin.target))
            if not ended:
                raise HintRefusedError("this client has no such pin at this proxy")
            return done(action.action_id, (), released=ended)
        if kind == "kv.prefetch":
            if not fields.keys() & set(PROMPTS):
                raise HintRefusedError(f"a node needs the prompt itself: give one of {', '.join(PROMPTS)}")
            named, completion = await self._target(fields, given, exchange)
            assert completion is not None
            node = await self.prefetches.start(exchange, completion, named)
            shown = node if self._keys.may_watch(exchange.headers.get("Authorization")) else None
            tokens = len(named.names) * named.chunk_tokens
            return done(
                action.action_id, (), ttl_s=PREFETCH_S, tokens=tokens, in_pool=named.pool_tokens, node=shown
            )
        if given.ttl_s is None:
            raise HintRefusedError("ttl_s is missing: the seconds for which to keep the prompt")
        named, _ = await self._target(fields, given, exchange)
        room, renewed = await self._room(), await self._lookups.renew(())
        if renewed is None or renewed[0][0] != named.fingerprint or named.pool_tokens is None:
            raise HintRefusedError("the pool does not answer")
        ttl_s, own_room = min(given.ttl_s, config.max_ttl_s), self._tenant_room(client.tenant)
        bound = (
            f"{room * self._lookups.chunk_bytes} bytes together, and each client at most as many as are free"
        )
        if own_room is not None:
            bound = f"{min(room, own_room) * self._lookups.chunk_bytes} bytes for this tenant"
        pin = Pin(named.names, named.names[-1], renewed[0], self._clock() + ttl_s, given.once)
        chunks = self.pins.retain((client, action.action_id), pin, room, own_room)
        if not chunks:
            raise HintRefusedError(f"there is no room for another pin: pins may take {bound}")
        why = [f"max_ttl_s is {config.max_ttl_s:g}"] * (ttl_s < given.ttl_s)
        why += [f"pins may take {bound}"] * (chunks < len(named.names))
        tokens = chunks * named.chunk_tokens
        return done(action.action_id, why, ttl_s=ttl_s, tokens=tokens, in_pool=min(tokens, named.pool_tokens))

    async def _target(
        self, payload: dict[str, msgspec.Raw], known: HintPayload, exchange: Exchange
    ) -> tuple[NamedPrompt, Completion | None]:
        """Returns the prompt that an action is about, which has at least one whole chunk, and the request for
        it, if the payload has the prompt itself."""
        given, completion = [field for field in TARGETS if field in payload], None
        named, why = exchange.prompt.named, exchange.prompt.unnamed
        if len(given) > 1 or not (given or named or why):
            raise HintRefusedError(f"the payload must have exactly one of {', '.join(TARGETS)}")
        lookups = self._lookups
        if lookups.model is not None and given and known.model not in (None, lookups.model):
            raise HintRefusedError(f"only prompts for the model {lookups.model} can be named here")
        if known.block_hashes is not None and self._keys.has_tenants:
            raise HintRefusedError("block_hashes name prompts of any tenant, and this proxy has tenants")
        if known.request_id is not None:
            recent = self._recent.get((exchange.client, known.request_id))
            if recent is None and lookups.blind:
                raise HintRefusedError(f"the prompt cannot be named: {lookups.blind}")
            if recent is None:
                raise HintRefusedError("this proxy knows no such request of this client, or none any more")
            named = await lookups.look_up_again(recent, known.request_id)
        elif known.block_hashes is not None:
            hashes = [*map(bytes.fromhex, known.block_hashes)]
            named, why = await lookups.look_up_blocks(hashes, "hint"), ""
        elif given:
            completion = self._completion(payload, exchange.client)
            prompt = await self._hops.look_up(exchange, completion, completion.prompt(), name=True)
            named, why = prompt.named, prompt.unnamed
        if named is None:
            raise HintRefusedError(f"the prompt cannot be named: {why or lookups.blind}")
        if not named.names:
            raise HintRefusedError(
                f"the prompt has {named.tokens} tokens: no whole chunk of {named.chunk_tokens}"
            )
        return named, completion

    def _completion(self, payload: dict[str, msgspec.Raw], client: Client) -> Completion:
        """Returns the client's request with the prompt in an action's payload. Raises ApiError or
        HintRefusedError if it is no prompt."""
        fields = {"prompt" if field == "tokens" else field: raw for field, raw in payload.items()}
        for field in ("ttl_s", "once", "action_id"):
            fields.pop(field, None)
        if self._lookups.model is not None:
            fields.setdefault("model", msgspec.Raw(msgspec.json.encode(self._lookups.model)))
        body, chat = msgspec.json.encode(fields), "messages" in payload
        completion = Completion(body, chat=chat, tenant=client.tenant)
        if "tokens" in payload and completion.token_ids() is None:
            raise HintRefusedError("tokens must be a list of token ids")
        return completion

    async def _room(self) -> int:
        """Returns how many chunks all pins may have. Raises HintRefusedError if that is not known."""
        async with self._asking:  # a master that hangs takes one thread, however many hints come
            if self._clock() - self._asked >= self.renew_s:
                with suppress(OSError, ValueError):
                    self._pool = await asyncio.to_thread(self._pool_bytes, self._view)
                self._asked = self._clock()
        if self._pool is None:
            raise HintRefusedError("the size of the pool is not known: no master has answered")
        share = self._pool * self._config.max_share / self._proxies
        return min(self._lookups.most_chunks, int(share / self._lookups.chunk_bytes))

    def _tenant_room(self, tenant: str) -> int | None:
        """Returns how many chunks a tenant's pins may have; None for as many as all pins."""
        pins = self._keys.limits(tenant).pins
        return None if pins is None else int(pins) // self._proxies // self._lookups.chunk_bytes

    @property
    def _proxies(self) -> int:
        return max(1, len(self._view.by_role("proxy")))

    # --- leases ---------------------------------------------------------------------------------------------

    @property
    def renew_s(self) -> float:
        """The interval at which leases are renewed: so short that one renewal may fail."""
        leases = [master.lease_ttl_ms for master in self._view.by_role("master") if master.lease_ttl_ms]
        return min(_LONGEST_RENEWAL_S, min(leases, default=_LEASE_MS) / 3000)

    async def renew(self) -> None:
        """Ends the pins whose time is over, and renews the leases of all others."""
        self.pins.end_where(self._is_over)
        objects = 0
        if chunks := self.pins.chunks():
            room, renewed = await self._room(), await self._lookups.renew(chunks)
            self.pins.shrink(room, self._tenant_room)
            if renewed is not None:
                space, objects = renewed
                self.pins.end_where(lambda key, pin: pin.space != space)
        self._metrics.pinned_objects.set(objects)

    def _is_over(self, key: PinKey, pin: Pin) -> bool:
        return pin.until <= self._clock()
