"""An engine that misbehaves towards the cache server of its host, over the real sockets, one trick at a time.

    python -m bench.suites.soak.engine_abuse URL TRICK [--seconds N]

`TRICKS` lists them all, and the docstring of each says what it does. A trick goes on until `until()` is true, cleans up its own end, and
returns how often it did its deed. A healthy server gives every other engine what it gave before: no trick may stop it, slow others down
for longer than a turn, keep new engines out, or leave anything behind once it has ended.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import itertools
import os
import resource
import socket
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import zmq

from pd_cache.wire.messages import (
    Answer,
    CpuStorage,
    EndSession,
    FrameError,
    Hello,
    Lookup,
    Message,
    Register,
    StatusQuery,
    Store,
    TensorView,
    Unregister,
    Welcome,
    decode_answer,
    encode,
    join_names,
)

Until = Callable[[], bool]
"""Returns true when a trick has to end."""
FENCE_BYTES = 8192
LENT = 64 << 10
"""Bytes that an engine lends if any memory will do; all of it is one chunk."""
_PAGE = 4096


class StrangePeer:
    """A connection to a cache server that says what it likes, whether or not it makes sense."""

    def __init__(self, url: str, *, high_water: int = 1000) -> None:
        """Connects, and sends nothing. `high_water` is how many messages ZMQ keeps in each direction."""
        self.name = uuid.uuid4().hex
        self._context: zmq.Context[Any] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self._socket.setsockopt(zmq.SNDHWM, high_water)
        self._socket.setsockopt(zmq.RCVHWM, high_water)
        self._socket.connect(url)
        self._numbers = itertools.count(1)
        self._lifeline: socket.socket | None = None
        self.welcome: Welcome | None = None

    def __enter__(self) -> StrangePeer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Hang up."""
        if self._lifeline is not None:
            self._lifeline.close()
        self._context.destroy(0)

    def say(self, message: Message) -> bool:
        """Sends a message, waiting up to a tenth of a second for room; False if there was none."""
        return self.send([encode(next(self._numbers), message)])

    def send(self, frames: Sequence[bytes]) -> bool:
        """Like `say`, for any bytes."""
        if not self._socket.poll(100, zmq.POLLOUT):
            return False
        self._socket.send_multipart(list(frames), zmq.NOBLOCK, copy=False)
        return True

    def hear(self, timeout: float = 5.0) -> Answer | None:
        """Returns the next answer; None if none came in `timeout` seconds."""
        if not self._socket.poll(int(timeout * 1000)):
            return None
        with contextlib.suppress(FrameError):
            return decode_answer(self._socket.recv_multipart()[-1])[1]
        return None

    def ask(self, message: Message, timeout: float = 5.0) -> Answer | None:
        """`say` and `hear`."""
        return self.hear(timeout) if self.say(message) else None

    def hello(
        self,
        kind: Literal["scheduler", "worker", "observer"] = "worker",
        *,
        model: str = "abuse",
        world_size: int = 1,
        block_size: int | None = None,
        lifeline: bool = False,
    ) -> Answer | None:
        """Says hello as an engine whose blocks are one chunk each; with `lifeline`, open that, too."""
        if block_size is None:
            block_size = self._chunk_size() if kind != "observer" else 0
        answer = self.ask(Hello(self.name, kind, "abuse", model, world_size, 0, block_size))
        if isinstance(answer, Welcome):
            self.welcome = answer
            if lifeline:
                self.lifeline()
        return answer

    def lifeline(self) -> socket.socket:
        """Returns the lifeline, opened and named correctly."""
        if self._lifeline is None:
            self._lifeline = open_lifeline(self._path())
            self._lifeline.send(self.name.encode())
        return self._lifeline

    def lend(self, token: str, descriptors: Sequence[int]) -> None:
        """Sends descriptors over the lifeline. Raises OSError once the server has hung up."""
        socket.send_fds(self.lifeline(), [token.encode()], list(descriptors))

    def register(self, descriptor: int, nbytes: int, *, blocks: int = 1, timeout: float = 10.0) -> Answer | None:
        """Lends one tensor of `blocks` blocks in this memory, and a fence with ticket 1 in every slot."""
        token = uuid.uuid4().hex
        fence = sealed(FENCE_BYTES)
        os.pwrite(fence, struct.pack("<Q", 1) * (FENCE_BYTES // 8), 0)
        try:
            self.lend(token, [fence, descriptor])
        finally:
            os.close(fence)
        return self.ask(registration(token, nbytes, self._chunk_size(), blocks), timeout)

    def _chunk_size(self) -> int:
        if self.welcome is None:
            self.hello("observer")
        assert self.welcome is not None, "no answer to hello"
        return self.welcome.chunk_size

    def _path(self) -> str:
        if self.welcome is None:
            self.hello("observer")
        assert self.welcome is not None, "no answer to hello"
        return self.welcome.lifeline


def open_lifeline(path: str) -> socket.socket:
    """Returns a connection to a server's lifeline that has not said whose it is."""
    lifeline = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline.settimeout(2)
    lifeline.connect(path)
    return lifeline


def sealed(nbytes: int) -> int:
    """Returns memory as an engine lends it."""
    descriptor = os.memfd_create("abuse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, nbytes)
    os.pwrite(descriptor, bytes(nbytes), 0)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


def registration(token: str, nbytes: int, block_size: int, blocks: int = 1) -> Register:
    """Returns a registration of one layer with one head, as large as `nbytes` allow."""
    dim = max(1, nbytes // (2 * blocks * block_size))
    shape = (blocks, 1, block_size, dim)
    stride = (block_size * dim, block_size * dim, dim, 1)
    return Register(token, (CpuStorage(nbytes),), (TensorView(0, 0, shape, stride, "bfloat16"),), "")


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Closes a descriptor in the end."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def names(count: int, salt: int = 0) -> bytes:
    """Returns `count` names of chunks that were never stored."""
    return join_names([(salt << 64 | index).to_bytes(16, "little") for index in range(count)])


# --- tricks ----------------------------------------------------------------------------------------------------------


def truncate_lent_memory(url: str, until: Until) -> int:
    """Lends memory, sealed or not, shrinks it to nothing and has it stored: SIGBUS for a server that maps what can shrink."""
    count, nbytes = 0, LENT
    with StrangePeer(url) as one:
        one.hello(lifeline=True)
        while not until():
            seal = count % 2 == 0
            descriptor = sealed(nbytes) if seal else os.memfd_create("abuse", os.MFD_CLOEXEC)
            with closing(descriptor):
                if not seal:
                    os.ftruncate(descriptor, nbytes)
                    os.pwrite(descriptor, bytes(nbytes), 0)
                one.register(descriptor, nbytes)
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, 0)
                one.ask(Store("", names(1, count), (0,), 0, 1, 1000), 2)
                one.ask(Unregister())
            count += 1
    return count


def lend_strange_files(url: str, until: Until) -> int:
    """Lends descriptors that are not memory, or not all allocated: devices, pipes, sockets, files, sparse and read-only memory."""

    def sparse() -> int:
        descriptor = os.memfd_create("abuse", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, 1 << 40)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return descriptor

    def lingering() -> int:
        """Returns a socket that waits for its peer when it is closed."""
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
            client = socket.create_connection(listener.getsockname())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\xff\0\0\0")
        return client.detach()

    def file() -> int:
        descriptor, path = tempfile.mkstemp()
        os.unlink(path)
        os.truncate(descriptor, 1 << 20)
        return descriptor

    kinds: list[tuple[Callable[[], int], int]] = [
        (sparse, 1 << 40),
        (lambda: os.open("/dev/zero", os.O_RDWR), 1 << 20),
        (lambda: os.eventfd(0), 1 << 20),
        (lambda: os.open("/", os.O_RDONLY), 1 << 20),
        (file, 1 << 20),
        (lingering, 1 << 20),
        (lambda: sealed(_PAGE), 1 << 30),
    ]
    count = 0
    with StrangePeer(url) as one:
        one.hello(lifeline=True)
        while not until():
            make, nbytes = kinds[count % len(kinds)]
            with closing(make()) as descriptor:
                one.register(descriptor, nbytes)
            count += 1
    return count


def register_without_descriptors(url: str, until: Until) -> int:
    """Twenty engines register, over and over, and never send what they lend."""
    count = 0
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(StrangePeer(url)) for _ in range(20)]
        for one in engines:
            one.hello(lifeline=True)
        while not until():
            for one in engines:
                one.say(registration(uuid.uuid4().hex, _PAGE, 1))
                one.hear(0)
                count += 1
    return count


def repeat_tokens(url: str, until: Until) -> int:
    """Sends two hundred descriptors under one token again and again."""
    count, token = 0, uuid.uuid4().hex
    with StrangePeer(url) as one, closing(sealed(_PAGE)) as descriptor:
        one.hello(lifeline=True)
        one.lifeline().settimeout(0.1)
        while not until():
            with contextlib.suppress(TimeoutError, BlockingIOError):
                one.lend(token, [descriptor] * 200)
                count += 1
    return count


def hello_without_lifeline(url: str, until: Until) -> int:
    """Hundreds of engines say hello and open no lifeline: the server has to give their places to engines that do."""
    count = 0
    with contextlib.ExitStack() as stack:
        engines = [stack.enter_context(StrangePeer(url)) for _ in range(300)]
        while not until():
            for one in engines:
                one.say(Hello(one.name, "observer", "abuse"))
                one.hear(0)
                count += 1
            time.sleep(0.05)
    return count


def half_lifelines(url: str, until: Until) -> int:
    """Opens lifelines that never say whose they are, say half of it, or say nonsense."""
    count = 0
    with StrangePeer(url) as one:
        one.hello()
        assert one.welcome is not None
        while not until():
            open_ones: list[socket.socket] = []
            for index in range(100):
                with contextlib.suppress(OSError):
                    lifeline = open_lifeline(one.welcome.lifeline)
                    open_ones.append(lifeline)
                    if index % 3:
                        lifeline.send(b"\xff" * (16 if index % 3 == 1 else 64))
                count += 1
            for lifeline in open_ones:
                lifeline.close()
    return count


def many_lifelines(url: str, until: Until) -> int:
    """Opens lifelines in hundreds of names from one process."""
    with contextlib.ExitStack() as stack:
        one = stack.enter_context(StrangePeer(url))
        one.hello()
        assert one.welcome is not None
        lifelines = []
        for _ in range(300):
            with contextlib.suppress(OSError):
                lifelines.append(stack.enter_context(open_lifeline(one.welcome.lifeline)))
                lifelines[-1].send(uuid.uuid4().hex.encode())
        wait(until)
        return len(lifelines)


def wide_lookups(url: str, until: Until) -> int:
    """Looks up the longest prompt there can be for as many ranks as there can be."""
    count = 0
    with StrangePeer(url) as one, closing(sealed(LENT)) as descriptor:
        for world_size in (1024, 512):
            one.hello(world_size=world_size, lifeline=True)
            one.register(descriptor, LENT)
        question = names(1 << 16)
        while not until():
            one.say(Lookup("", question))
            one.hear(0)
            count += 1
    return count


def flood_lookups(url: str, until: Until) -> int:
    """Asks as fast as the socket takes it, each time under another session, and reads none of the answers."""
    count = 0
    with StrangePeer(url, high_water=10) as one, closing(sealed(LENT)) as descriptor:
        one.hello(lifeline=True)
        one.register(descriptor, LENT)
        question = names(64)
        while not until():
            count += one.say(Lookup(str(count), question))
    return count


def flood_status(url: str, until: Until) -> int:
    """Asks for the largest answer there is, and reads none."""
    count = 0
    with StrangePeer(url, high_water=10) as one:
        one.hello("observer")
        while not until():
            count += one.say(StatusQuery())
    return count


def flood_stores(url: str, until: Until) -> int:
    """Stores blocks that do not exist, with almost no patience."""
    count = 0
    with StrangePeer(url, high_water=10) as one, closing(sealed(LENT)) as descriptor:
        one.hello(lifeline=True)
        one.register(descriptor, LENT)
        while not until():
            count += one.say(Store("", names(1, count), (count % 3,), count % 1024, 1, 1))
            one.hear(0)
    return count


def huge_messages(url: str, until: Until) -> int:
    """Sends messages of 100 MiB, which no server reads."""
    body, count = bytes(100 << 20), 0
    while not until():
        with StrangePeer(url, high_water=2) as one:
            one.hello("observer")
            count += one.send([body])
            one.hear(0.2)
    return count


def large_messages(url: str, until: Until) -> int:
    """Sends messages as large as a server reads, valid ones and others."""
    longest = encode(1, Store("", names(1 << 16), (0,) * (1 << 20), 0, 1, 1))
    garbage, count = longest[:16] + b"\xc1" * (len(longest) - 16), 0
    with StrangePeer(url, high_water=2) as one:
        one.hello("observer")
        while not until():
            count += one.send([longest if count % 2 else garbage])
            one.hear(0)
    return count


def garbage(url: str, until: Until) -> int:
    """Sends frames that are no messages, and messages of many frames."""
    count = 0
    with StrangePeer(url) as one:
        while not until():
            count += one.send([os.urandom(count % 64)] if count % 3 else [b"x"] * 100)
            one.hear(0)
    return count


def register_again_and_again(url: str, until: Until) -> int:
    """Lends the same memory thousands of times, and never takes it back."""
    count = 0
    with StrangePeer(url) as one, closing(sealed(LENT)) as descriptor:
        one.hello(lifeline=True)
        while not until():
            one.register(descriptor, LENT)
            count += 1
    return count


def many_sizes(url: str, until: Until) -> int:
    """Runs one engine after the other, each with chunks of another size; each leaves immediately."""
    count = 0
    while not until():
        nbytes = (1 + count % 16) * LENT // 4
        with StrangePeer(url) as one, closing(sealed(nbytes)) as descriptor:
            one.hello(model=uuid.uuid4().hex, lifeline=True)
            one.register(descriptor, nbytes, timeout=30)
        count += 1
    return count


def come_and_go(url: str, until: Until) -> int:
    """Connects, says hello and vanishes, as fast as it can."""
    count = 0
    while not until():
        with StrangePeer(url) as one:
            one.hello(lifeline=True)
            one.say(EndSession("none"))
        count += 1
    return count


def connect_only(url: str, until: Until) -> int:
    """Opens as many connections as this process may, and says nothing on any of them."""
    if not url.startswith("ipc://"):
        return 0
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    with contextlib.ExitStack() as stack:
        count = 0
        while not until():
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.settimeout(0.2)
                connection.connect(url.removeprefix("ipc://"))
            except OSError:  # no more of them here, or there
                connection.close()
                wait(until)
                break
            stack.enter_context(connection)
            count += 1
    return count


def wait(until: Until) -> None:
    """Waits until `until()` is true."""
    while not until():
        time.sleep(0.02)


TRICKS: dict[str, Callable[[str, Until], int]] = {
    trick.__name__: trick
    for trick in (
        truncate_lent_memory,
        lend_strange_files,
        register_without_descriptors,
        repeat_tokens,
        hello_without_lifeline,
        half_lifelines,
        many_lifelines,
        wide_lookups,
        flood_lookups,
        flood_status,
        flood_stores,
        huge_messages,
        large_messages,
        garbage,
        register_again_and_again,
        many_sizes,
        come_and_go,
        connect_only,
    )
}
"""All tricks by name."""


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; prints `begun` when it begins, and at the end how often it did its deed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="the cache server's address, as in the YAML file")
    parser.add_argument("trick", choices=sorted(TRICKS))
    parser.add_argument("--seconds", type=float, default=10.0)
    options = parser.parse_args(arguments)
    print("begun", flush=True)
    end = time.monotonic() + options.seconds
    count = TRICKS[options.trick](options.url, lambda: time.monotonic() >= end)
    print(options.trick, count, flush=True)


if __name__ == "__main__":
    main()
