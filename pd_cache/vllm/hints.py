"""Hints that reach the engine itself, past any proxy of ours: `kv.retain` keeps its request's prompt in the pool, `kv.release` no longer.

vLLM's own servers drop a body's `kv_hints`; programs that call `AsyncLLM` pass them on, and anybody can send the same in `kv_transfer_params`.
Our proxy takes out both, so nothing is done twice.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import msgspec

from pd_cache.decoding import UndecodableError, decode_json
from pd_cache.hints import (
    TARGETS,
    ActionAnswer,
    Client,
    HintAction,
    HintPayload,
    HintRefusedError,
    HintsAnswer,
    HintsMessage,
    Pin,
    Pins,
    done,
    refused,
)
from pd_cache.lookup import LookupClient
from pd_cache.metrics import CacheMetrics
from pd_cache.vllm.settings import PinSettings


class EngineHints:
    """One per engine, on the scheduler's thread. Leases are renewed on another one, which the first pin starts."""

    def __init__(self, settings: PinSettings, metrics: CacheMetrics, clock: Callable[[], float]) -> None:
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._chunk_bytes = 1
        self._open: Callable[[], LookupClient]
        self.pins = Pins(settings.bounds.max_pins)
        self._lock = threading.Lock()
        """Held while `pins` is read or changed."""
        self._closed = threading.Event()
        self._renewing: threading.Thread | None = None

    def open(self, chunk_bytes: int, open_client: Callable[[], LookupClient]) -> None:
        """Takes how many bytes a chunk has in all layer groups, and what opens a client of the pool."""
        self._chunk_bytes, self._open = chunk_bytes, open_client

    def close(self) -> None:
        """Ends all pins. Waits for a renewal under way. Idempotent."""
        self._closed.set()
        if self._renewing is not None:
            self._renewing.join()

    def take(self, hints: object, names: Sequence[bytes], chunk_tokens: int) -> HintsAnswer | None:
        """Does what came with a request whose prompt has chunks of these names, and ends the pins that were for one use. Returns what became of
        each action; None without hints, or if they are no envelope."""
        known, answers = frozenset(names), []
        with self._lock:
            self.pins.end_where(lambda key, pin: pin.until <= self._clock() or (pin.once and pin.target in known))
            if hints is None:
                return None
            try:
                message = decode_json(msgspec.json.encode(hints), HintsMessage)
            except UndecodableError as error:
                self._metrics.trouble("hints", "unreadable", detail=str(error))
                return None
            for raw in message.actions:
                action_id = ""
                try:
                    action = decode_json(bytes(raw), HintAction)
                    action_id = action.action_id
                    answers.append(self._do(action, names, chunk_tokens))
                except (HintRefusedError, UndecodableError) as error:
                    answers.append(refused(action_id, error))
                    self._metrics.trouble("hints", "refused", detail=f"{action_id}: {error}")
        return HintsAnswer(message.protocol_version, message.message_id, answers)

    def _do(self, action: HintAction, names: Sequence[bytes], chunk_tokens: int) -> ActionAnswer:
        """Raises HintRefusedError or UndecodableError with the reason if the action is refused."""
        action.check()
        given = decode_json(bytes(action.payload), HintPayload)
        others = decode_json(bytes(action.payload), dict[str, msgspec.Raw]).keys() & {*TARGETS, "evict"}
        if action.action_type == "kv.prefetch":
            raise HintRefusedError("the request is here: what the pool has of its prompt is loaded for it")
        if others:
            raise HintRefusedError(f"only a proxy takes {', '.join(sorted(others))}; a node, its request's own prompt")
        if not names and not given.action_id:
            raise HintRefusedError("the prompt has no whole chunk, or cannot be named")
        if action.action_type == "kv.release":
            ended = self.pins.end_where(
                lambda key, pin: key[1] == given.action_id if given.action_id else pin.target == names[-1]
            )
            if not ended:
                raise HintRefusedError("this engine has no such pin")
            return done(action.action_id, (), released=ended)
        if given.ttl_s is None:
            raise HintRefusedError("ttl_s is missing: for how many seconds the prompt is to be kept")
        most, longest_s = self._settings.most_bytes, self._settings.bounds.max_ttl_s
        pin = Pin(names, names[-1], ("", ""), self._clock() + min(given.ttl_s, longest_s), given.once)
        chunks = self.pins.retain((Client(), action.action_id), pin, most // self._chunk_bytes)
        bound = f"all pins of this engine may take {most} bytes"
        if not chunks:
            raise HintRefusedError(bound)
        if self._renewing is None:
            self._renewing = threading.Thread(target=self._renew, name="pd-cache-pins", daemon=True)
            self._renewing.start()
        why = [f"max_ttl_s is {longest_s:g}"] * (longest_s < given.ttl_s) + [bound] * (chunks < len(names))
        return done(action.action_id, why, ttl_s=min(given.ttl_s, longest_s), tokens=chunks * chunk_tokens)

    def _renew(self) -> None:
        """Renews leases until this is closed, with a client of its own: that takes 26 MiB, and only who pins needs it."""
        client, version = None, None
        while not self._closed.is_set():
            told = None
            try:
                client = client or self._open()
                with self._lock:
                    self.pins.end_where(lambda key, pin: pin.until <= self._clock())
                    names = self.pins.chunks()
                told = client.renew(names)
            except Exception as error:  # noqa: BLE001 - the next time may succeed
                self._metrics.trouble("hints", f"error_{type(error).__name__}", detail=str(error))
            if told is not None and version not in (None, told[0]):
                with self._lock:  # the names are those of other chunks now
                    self.pins.end_where(lambda key, pin: True)
            version = version if told is None else told[0]
            self._closed.wait(self._settings.renew_s)
        if client is not None:
            client.close()
