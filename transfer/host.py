"""HostClient: the client of a host's shared `mooncake_client`, with the face of a full Mooncake client.

Mooncake calls it a dummy client: a process that has no segment and no transfer engine. `mooncake_client` maps its memory
and does its calls for it. What a dummy client does not do by itself (docs/mooncake.md, "Sharing a host's client"):

1. A `mooncake_client` that was restarted quickly, or that did not hear of this process for ten seconds, has forgotten the
   memory, and each transfer is refused from then on, although pings go on. A probe finds out whether a refusal means that.
2. A call comes back as failed after 30 s, while a `mooncake_client` that was only stopped goes on with it later, and
   writes to memory that may belong to another call by then.

Both end the *connection*: it is abandoned with its memory, which is never handed out again, and the store opens anew.

3. `setup_dummy` and `close` hold the GIL until `mooncake_client` answers, up to 30 s, or for 4 s where there is none:
   nothing of this process would run meanwhile. So neither is called before a check that it is there and not stopped.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)

WAITS_FOR = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""`mooncake_client` waits for these signals on a thread, and unmounts its segment when one comes. It blocks them too late for the
threads that its libraries start before `main`; a signal that reaches one of those kills the process. So it has to be
started with these blocked."""

_GIVES_UP_AFTER_S = 30.0
"""A dummy client's patience with `mooncake_client`; it is not configurable."""
_SURELY_ENDED_S = 0.8 * _GIVES_UP_AFTER_S
"""A call that failed sooner than this failed because its connection broke: `mooncake_client` is gone."""

_CONNECT_S = 1.0
_UNREACHABLE = -900
_REFUSED = -600


def answers(address: str) -> bool:
    """Whether a `mooncake_client` listens at `host:port` and is not stopped."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return runs(address)


def runs(address: str) -> bool:
    """False if the `mooncake_client` of this host at `host:port` is stopped: what calls it would wait for long."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(f"\0@mooncake_client_{address.rpartition(':')[2]}.sock")
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except OSError:  # gone: calls fail at once. Or in another process namespace: nobody can tell
            return True
    return state not in b"Tt"


class _DummyClient:
    """One dummy client, how many calls are inside of it, and the memory that was registered with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.calls = 0
        self.region = 0


class HostClient:
    """Speaks to the `mooncake_client` at `address`. Calls and codes are those of a full client. Thread-safe after `setup`.

    `on_lost` is called, on the thread of the call that noticed, when the registered memory must not be used again;
    `setup` then connects anew.
    """

    def __init__(self, dummy_client: Callable[[], Any], address: str, local_buffer: int, on_lost: Callable[[], None]):
        self._dummy_client = dummy_client
        self._address = address
        self._local_buffer = local_buffer
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._now: _DummyClient | None = None
        self._abandoned: list[_DummyClient] = []

    def setup(self, config: dict[str, str]) -> int:
        """Connect; 0 or a negative code. `config` is for full clients."""
        if not answers(self._address):
            return _UNREACHABLE
        self._close_abandoned()
        client = self._dummy_client()
        code = int(client.setup_dummy(0, self._local_buffer, self._address))
        if code == 0:
            with self._lock:
                if self._now is not None:
                    self._abandoned.append(self._now)
                self._now = _DummyClient(client)
        return code

    def close(self) -> int:
        """Let go of the connection; `mooncake_client` unmaps this process's memory."""
        with self._lock:
            if self._now is not None:
                self._abandoned.append(self._now)
                self._now = None
        if runs(self._address):
            self._close_abandoned()
            return 0
        log.warning("mooncake_client %s is stopped; its client is left to the end of the process", self._address)
        return _UNREACHABLE

    def get_hostname(self) -> str:
        """The name of the host's segment: the store role calls it by the address of its `mooncake_client`."""
        return self._address

    def alloc_from_mem_pool(self, size: int) -> int:
        """The address of `size` bytes that can be shared with `mooncake_client`; 0 if there is no such memory."""
        with self._calling() as connection:
            return int(connection.client.alloc_from_mem_pool(size)) if connection else 0

    def register_buffer(self, address: int, size: int) -> int:
        """Share memory that `alloc_from_mem_pool` returned; a negative code for any other."""
        with self._calling() as connection:
            if connection is None:
                return _UNREACHABLE
            code = int(connection.client.register_buffer(address, size))
            if code == 0:
                connection.region = address
            return code

    def unregister_buffer(self, address: int) -> int:
        """Stop sharing it. Refused while `mooncake_client` is stopped."""
        if not runs(self._address):
            return _UNREACHABLE
        with self._calling() as connection:
            return int(connection.client.unregister_buffer(address)) if connection else _UNREACHABLE

    def is_exist(self, key: str) -> int:
        with self._calling() as connection:
            return int(connection.client.is_exist(key)) if connection else _UNREACHABLE

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        with self._calling() as connection:
            if connection is None:
                return [_UNREACHABLE] * len(keys)
            # a dummy client has only -1 for everything that went wrong
            return [code if code >= 0 else _UNREACHABLE for code in connection.client.batch_is_exist(keys)]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return self._transfer(len(keys), lambda client: client.batch_get_into(keys, addresses, sizes))

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        return self._transfer(len(keys), lambda client: client.batch_put_from(keys, addresses, sizes, config))

    def put(self, key: str, value: bytes, config: Any) -> int:
        with self._calling() as connection:
            return int(connection.client.put(key, value, config)) if connection else _UNREACHABLE

    def get(self, key: str) -> bytes:
        with self._calling() as connection:
            return bytes(connection.client.get(key)) if connection else b""

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        with self._calling() as connection:
            return list(connection.client.batch_remove(keys, force)) if connection else [_UNREACHABLE] * len(keys)

    def get_replica_desc(self, key: str) -> list[Any]:
        """Always empty: a dummy client is not told where bytes lie."""
        return []

    def lose(self, why: str) -> None:
        """End the connection: a transfer of it may still write to the memory that is shared over it."""
        with self._lock:
            connection = self._now
        if connection is not None:
            self._lose(connection, why)

    # --- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self) -> Iterator[_DummyClient | None]:
        """The present connection, which is not closed before the block ends; None if there is none."""
        with self._lock:
            connection = self._now
            if connection is not None:
                connection.calls += 1
        try:
            yield connection
        finally:
            if connection is not None:
                with self._lock:
                    connection.calls -= 1

    def _transfer(self, count: int, call: Callable[[Any], list[int]]) -> list[int]:
        with self._calling() as connection:
            if connection is None:
                return [_UNREACHABLE] * count
            start = time.monotonic()
            codes = list(call(connection.client))
            if codes.count(_UNREACHABLE) == count and time.monotonic() - start > _SURELY_ENDED_S:
                self._lose(connection, "it did not answer in time, and may still do what it was asked to")
            elif codes.count(_REFUSED) == count and self._forgotten(connection):
                self._lose(connection, "it does not know our memory any more")
                return [_UNREACHABLE] * count
            return codes

    def _forgotten(self, connection: _DummyClient) -> bool:
        """Whether `mooncake_client` refuses the memory itself, and not only this call."""
        key = f"pdc1/probe/{uuid.uuid4().hex}"
        refused: bool = connection.client.put_from(key, connection.region, 64) == _REFUSED
        if not refused:
            connection.client.batch_remove([key], True)
        return refused

    def _lose(self, connection: _DummyClient, why: str) -> None:
        with self._lock:
            if self._now is not connection:
                return
            self._now = None
            self._abandoned.append(connection)
        log.warning("mooncake_client %s: %s; connecting anew, with new memory", self._address, why)
        # before any slot of this call is given back
        self._on_lost()

    def _close_abandoned(self) -> None:
        """Close abandoned connections that no call is using any more. Closing one during a call would be use after free."""
        with self._lock:
            idle = [connection for connection in self._abandoned if not connection.calls]
            self._abandoned = [connection for connection in self._abandoned if connection.calls]
        for connection in idle:
            connection.client.close()
