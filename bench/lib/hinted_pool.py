"""A pool of agents' prompts, in simulation: LRU, and in it what the agents' hints keep, by the proxy's own bookkeeping (`launch/proxy/hints.py`)."""

from __future__ import annotations

from collections.abc import Sequence

from bench.lib.reuse import SimulatedLru
from bench.lib.trace import BLOCK_TOKENS, Request
from launch.proxy.hints import Pin, Pins
from launch.proxy.keys import Client
from pd_cache.cluster import HintsConfig

WAIT_S = 120.0
"""The least pause that is a wait. An agent knows which of its tools take so long."""
_TTL_S = 600.0
_RENEW_S = 3.0


class HintedPool:
    def __init__(self, requests: Sequence[Request], system_blocks: int, tokens: int, share: float) -> None:
        """Holds `tokens` tokens, of which pins take at most `share`: agents say `kv.retain` before each wait, and `kv.release` with the next
        call. Requests that agree in the first block after the system prompt are one session's."""
        self._system = system_blocks
        self._room = int(tokens // BLOCK_TOKENS * share)
        self._lru = SimulatedLru[bytes](tokens // BLOCK_TOKENS)
        self._pins = Pins(HintsConfig().max_pins)
        self._renewed = 0.0
        self._pauses: dict[tuple[int, float], float] = {}
        """Seconds until the session's next call."""
        self.waited: set[tuple[int, float]] = set()
        """The calls after a wait."""
        last: dict[int, float] = {}
        for request in requests:
            session, at = self.call(request)
            if session in last:
                pause = self._pauses[session, last[session]] = (at - last[session]) / 1000
                if pause >= WAIT_S:
                    self.waited.add((session, at))
            last[session] = at

    def call(self, request: Request) -> tuple[int, float]:
        return request.hash_ids[self._system], request.timestamp

    def use(self, request: Request, now: float) -> int:
        """Returns how many blocks of the prompt there are. Afterwards all are there, and are kept as the agent wants it."""
        names = [block.to_bytes(8, "big") for block in request.whole_blocks]
        self._pins.end_where(lambda key, pin: pin.until <= now)
        if now >= self._renewed + _RENEW_S:
            self._renewed = now
            self._lru.touch(self._pins.chunks())
        found = self._lru.use(names)
        key, pause = (Client(), str(request.hash_ids[self._system])), self._pauses.get(self.call(request))
        if pause is not None and pause >= WAIT_S:
            self._pins.retain(key, Pin(names, names[-1], ("", ""), now + _TTL_S), self._room)
        else:
            self._pins.end_where(lambda other, pin: other == key)
        return found
