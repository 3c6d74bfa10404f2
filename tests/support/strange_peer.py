"""A client of a cache server that says what it likes, whether or not it makes sense."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Sequence
from typing import Any

import zmq

from pd_cache.server.protocol import Answer, FrameError, Hello, Message, decode_answer, encode


class StrangePeer:
    """A connection for the messages of a cache server, without a Unix socket beside it."""

    def __init__(self, url: str) -> None:
        self.name = uuid.uuid4().hex
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self._socket.connect(url)
        self._numbers = itertools.count(1)

    def __enter__(self) -> StrangePeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(0)

    def send(self, frames: Sequence[bytes]) -> None:
        self._socket.send_multipart(list(frames))

    def say(self, message: Message) -> None:
        self.send([encode(next(self._numbers), message)])

    def hear(self, timeout: float = 60.0) -> Answer | None:
        """Returns the next answer; None if none came in `timeout` seconds."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        with contextlib.suppress(FrameError):
            return decode_answer(self._socket.recv_multipart()[-1])[1]
        return None

    def ask(self, message: Message, timeout: float = 60.0) -> Answer | None:
        self.say(message)
        return self.hear(timeout)

    def hello(self) -> Answer | None:
        return self.ask(Hello(self.name, "observer", "strange"))
