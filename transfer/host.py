"""HostClient: the client of a host's shared `mooncake_client`, with the methods of a full Mooncake client.

Mooncake calls it a dummy client: a process without a segment and a transfer engine. `mooncake_client` maps its memory and does
its calls for it. A dummy client does not handle these cases by itself (docs/mooncake.md, "Sharing a host's client"):

1. A `mooncake_client` that was restarted quickly, or that did not hear from this process for ten seconds, has forgotten the
   memory. It refuses each transfer from then on, although pings succeed. A probe finds out whether a refusal means that.
2. A call fails after 30 s. If the `mooncake_client` was only stopped, it goes on with the call later, and writes to memory that
   may by then belong to another call.

Both end the *connection*: it is abandoned with its memory, which is never handed out again, and the store opens anew.

3. `setup_dummy` and `close` hold the GIL until `mooncake_client` answers, for up to 30 s, or for 4 s if there is none. No other
   thread of this process would run meanwhile. So both are called only after a check that it is there and not stopped.
4. A dummy client that loses sight of its `mooncake_client`, or whose `mooncake_client` loses sight of the master, registers all memory
   of the process again, that of other dummy clients too. With a second local buffer of Mooncake's among it, that is refused and tried
   again for ever. So no dummy client has one: small objects go through slots of our own.
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

from transfer.staging import SharedStagingPool, Slot

log = logging.getLogger(__name__)

WAITS_FOR = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""`mooncake_client` waits for these signals on a thread, and unmounts its segment when one comes. It blocks them too late for the
threads that its libraries start before `main`, and a signal that reaches one of those kills the process. So it must be
started with these signals blocked."""

_GIVES_UP_AFTER_S = 30.0
"""How long a dummy client waits for `mooncake_client`. Mooncake has no setting for it."""
_SURELY_ENDED_S = 0.8 * _GIVES_UP_AFTER_S
"""A call that failed sooner than this has ended, because its connection broke: `mooncake_client` is gone."""

MOST_SMALL = 64 << 10
"""The most bytes that `HostClient.put` writes and `HostClient.get` reads."""
_SMALL_SLOTS = 4

_CONNECT_S = 1.0
_UNREACHABLE = -900
_REFUSED = -600


def answers(address: str) -> bool:
    """Returns whether a `mooncake_client` listens at `host:port` and is not stopped."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CONNECT_S).close()
    except (OSError, ValueError):
        return False
    return runs(address)


def runs(address: str) -> bool:
    """Returns False if the `mooncake_client` of this host at `host:port` is stopped, so that calls to it would wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(f"\0@mooncake_client_{address.rpartition(':')[2]}.sock")
            pid, _, _ = struct.unpack("3i", probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            state = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0]
        except (
            OSError
        ):  # gone, so that calls fail at once; or in another process namespace, so that its state is unknown
            return True
    return state not in b"Tt"


class _DummyClient:
    """A dummy client, how many calls are inside it, and the address of the memory that was registered with it."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.calls = 0
        self.region = 0


class HostClient:
    """Speaks to the `mooncake_client` at `address`. Calls and codes are those of a full client. Thread-safe after `setup`.

    If the registered memory must not be used again, the thread that notices it calls `on_lost`. `setup` then connects anew.
    """

    def __init__(self, dummy_client: Callable[[], Any], address: str, on_lost: Callable[[], None]):
        self._dummy_client = dummy_client
        self._address = address
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._now: _DummyClient | None = None
        self._abandoned: list[_DummyClient] = []
        self._small = SharedStagingPool(_SMALL_SLOTS * MOST_SMALL, MOST_SMALL)
        """What `put` writes from and `get` reads into."""

    def setup(self, config: dict[str, str]) -> int:
        """Connects. Returns 0 or a negative code. Ignores `config`, which is for full clients."""
        if not answers(self._address):
            return _UNREACHABLE
        self._close_abandoned()
        client = self._dummy_client()
        code = int(client.setup_dummy(0, 0, self._address))  # no bounce buffer: see 4. above
        if code == 0:
            with self._lock:
                self._small.retire()
                if self._now is not None:
                    self._abandoned.append(self._now)
                self._now = _DummyClient(client)
            if not self.lingers:
                self._small.let_go()
            code = self._small.register_with(self)
            if code != 0:
                with self._lock:
                    self._abandoned.append(self._now)
                    self._now = None
                self._close_abandoned()
        return code

    @property
    def lingers(self) -> bool:
        """Whether an earlier connection is still open, because a call is inside it: its `mooncake_client` may use retired memory."""
        return bool(self._abandoned)

    def close(self) -> int:
        """Closes the connection, so that `mooncake_client` unmaps this process's memory. Returns 0 or a negative code."""
        self._small.unregister_from(self)
        with self._lock:
            if self._now is not None:
                self._abandoned.append(self._now)
                self._now = None
        if runs(self._address):
            self._close_abandoned()
            self._small.close()
            return 0
        log.warning("mooncake_client %s is stopped; the connection stays open until this process ends", self._address)
        return _UNREACHABLE

    def get_hostname(self) -> str:
        """Returns the name of the host's segment: the store role names it after the address of its `mooncake_client`."""
        return self._address

    def alloc_from_mem_pool(self, size: int) -> int:
        """Returns the address of `size` bytes that can be shared with `mooncake_client`; 0 if there is no such memory."""
        with self._calling() as connection:
            return int(connection.client.alloc_from_mem_pool(size)) if connection else 0

    def register_buffer(self, address: int, size: int) -> int:
        """Shares memory that `alloc_from_mem_pool` returned. Returns 0, or a negative code, for example for any other memory."""
        with self._calling() as connection:
            if connection is None:
                return _UNREACHABLE
            code = int(connection.client.register_buffer(address, size))
            if code == 0:
                connection.region = address
            return code

    def unregister_buffer(self, address: int) -> int:
        """Stops sharing memory. Returns 0 or a negative code. Fails at once while `mooncake_client` is stopped."""
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
            # a dummy client returns -1 for every error
            return [code if code >= 0 else _UNREACHABLE for code in connection.client.batch_is_exist(keys)]

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return self._transfer(len(keys), lambda client: client.batch_get_into(keys, addresses, sizes))

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int], config: Any) -> list[int]:
        return self._transfer(len(keys), lambda client: client.batch_put_from(keys, addresses, sizes, config))

    def put(self, key: str, value: bytes, config: Any) -> int:
        """Writes an object of at most `MOST_SMALL` bytes. Returns 0 or a negative code."""
        with self._small_slot() as slot:
            if slot is None:
                return _UNREACHABLE
            slot.view[: len(value)] = value
            return self.batch_put_from([key], [slot.address], [len(value)], config)[0]

    def get(self, key: str) -> bytes:
        """Returns an object of at most `MOST_SMALL` bytes; no bytes if it is missing, larger or out of reach."""
        with self._small_slot() as slot:
            if slot is None:
                return b""
            size = self.batch_get_into([key], [slot.address], [MOST_SMALL])[0]
            return bytes(slot.view[: max(0, size)])

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        with self._calling() as connection:
            return list(connection.client.batch_remove(keys, force)) if connection else [_UNREACHABLE] * len(keys)

    def remove_by_regex(self, pattern: str, force: bool) -> int:
        with self._calling() as connection:
            return int(connection.client.remove_by_regex(pattern, force)) if connection else _UNREACHABLE

    def get_replica_desc(self, key: str) -> list[Any]:
        """Returns an empty list: a dummy client does not know where bytes lie."""
        return []

    def lose(self, why: str) -> None:
        """Ends the connection, because one of its transfers may still write to the shared memory."""
        with self._lock:
            connection = self._now
        if connection is not None:
            self._lose(connection, why)

    # --- inside --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _calling(self) -> Iterator[_DummyClient | None]:
        """Yields the present connection, which is not closed before the block ends; None if there is none."""
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

    @contextlib.contextmanager
    def _small_slot(self) -> Iterator[Slot | None]:
        slot = self._small.try_lease()
        try:
            yield slot
        finally:
            if slot is not None:
                slot.release()

    def _transfer(self, count: int, call: Callable[[Any], list[int]]) -> list[int]:
        with self._calling() as connection:
            if connection is None:
                return [_UNREACHABLE] * count
            start = time.monotonic()
            codes = list(call(connection.client))
            if codes.count(_UNREACHABLE) == count and time.monotonic() - start > _SURELY_ENDED_S:
                self._lose(connection, "it did not answer in time, and may still do the transfer")
            elif codes.count(_REFUSED) == count and self._forgotten(connection):
                self._lose(connection, "it has forgotten our memory")
                return [_UNREACHABLE] * count
            return codes

    def _forgotten(self, connection: _DummyClient) -> bool:
        """Returns whether `mooncake_client` refuses the memory itself, and not only one call."""
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
            self._small.retire()  # within the lock: after it, this may be the memory of the next connection
        log.warning("mooncake_client %s: %s; connecting anew, with new memory", self._address, why)
        # before this call gives back any slot
        self._on_lost()

    def _close_abandoned(self) -> None:
        """Closes abandoned connections that no call uses any more. To close one during a call would be a use after free."""
        with self._lock:
            idle = [connection for connection in self._abandoned if not connection.calls]
            self._abandoned = [connection for connection in self._abandoned if connection.calls]
        for connection in idle:
            connection.client.close()
