"""The thread that receives requests and answers those that need no waiting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from pd_cache.metrics import CacheMetrics
from pd_cache.wire.channel import Incoming, ServerChannel
from pd_cache.wire.messages import Answer, RefusalError, Refused

log = logging.getLogger(__name__)

_TICK_S = 0.5


class Receiver:
    """Receives from a channel, from `start` until `stop`. An error of one request does not stop the others."""

    def __init__(
        self, channel: ServerChannel, handle: Callable[[Incoming], Answer | None], metrics: CacheMetrics, op: str
    ) -> None:
        """`handle` returns the answer, or None if another thread will call `answer`. It may raise RefusalError. Troubles count under `op`."""
        self._channel = channel
        self._handle = handle
        self._metrics = metrics
        self._op = op
        self._stopping = False
        self._thread = threading.Thread(target=self._receive, name=f"pd-cache-{op}-receive", daemon=True)

    def start(self) -> None:
        """Begins to receive."""
        self._thread.start()

    def answer(self, incoming: Incoming, answer: Answer) -> None:
        """Answers a request. Thread-safe."""
        if isinstance(answer, Refused) and answer.reason != "busy":
            self._metrics.trouble(self._op, f"refused_{answer.reason}", detail=answer.message)
        self._channel.answer(incoming, answer)

    def stop(self, timeout: float | None = None) -> None:
        """Stops receiving, and waits up to `timeout` seconds for the request that is being handled."""
        self._stopping = True
        self._channel.wake()
        self._thread.join(timeout)

    def _receive(self) -> None:
        while not self._stopping:
            for incoming in self._channel.receive(_TICK_S, self._bad_frame):
                try:
                    answer = self._handle(incoming)
                except RefusalError as refusal:
                    answer = refusal.refused
                except Exception as error:  # an error of one request must not stop the others
                    log.exception("a request failed")
                    answer = failed(error)
                if answer is not None:
                    self.answer(incoming, answer)

    def _bad_frame(self, reason: str) -> None:
        self._metrics.trouble(self._op, f"{reason}_frame")


def failed(error: Exception) -> Refused:
    """Returns the answer to a request that raised an unexpected error."""
    return Refused("failed", f"{type(error).__name__}: {error}")
