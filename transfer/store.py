"""MooncakeStore: wraps a client of a Mooncake store. Only this module and `transfer.moves` call the client's
methods, except that `transfer.staging` registers its memory with the client.

A lookup is `batched_contains`. A load is `start_get`, and a store is `start_put`: they queue `Moves.get` and
`Moves.put` (`transfer/moves.py`) for another thread (`transfer/calls.py`), and the caller waits in
`Pending.results`.

A bare client is dangerous (docs/mooncake.md). A call before setup or after close kills the process. A call
blocks for seconds if the master is dead, and for a minute if a peer is stopped. So here:

1. A state (`opening`, `open` or `failed`, `closing`, `closed`) guards every call, and `close()` drains before
   it closes.
2. Calls run on a bounded set of threads, and the caller waits only until its own deadline.
3. Staging memory that an abandoned call may still touch stays quarantined until that call returns. If the
   call returned before its transfers ended, the memory is never used again (`transfer.moves`).
4. While the master is down, a circuit breaker makes calls return at once, and a regular probe checks
   whether it is back. Peers that do not deliver have their own breakers (`transfer.health`).
5. If the master is not there yet, the store opens by itself when it comes.
6. In a forked child, where none of its threads runs and Mooncake would hang or crash, the store counts as
   closed.
"""

from __future__ import annotations

import ctypes
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from transfer.calls import Call, CallThreads
from transfer.deadlines import End, end_or, left
from transfer.direct_reads import DirectReads, idle
from transfer.errors import MissingLibraryError, PoolUnavailableError, Status, TransferError, status_of
from transfer.health import CircuitBreaker
from transfer.lookup_rpc import lookup_rpc, why_silent
from transfer.moves import Batch, Moves, MovesClient
from transfer.settings import MAX_TRANSFERS, Placement, TransferSettings, hushed, prepare, split_master
from transfer.staging import Pin, Slot, StagingPool, prefault_segment

log = logging.getLogger(__name__)

R = TypeVar("R")

SYSTEM_PACKAGES = {
    "libibverbs": "libibverbs1",
    "libnuma": "libnuma1",
    "librdmacm": "librdmacm1",
    "libmlx5": "ibverbs-providers",
    "libcurl": "libcurl4",
}
"""The Debian packages of the libraries that Mooncake's wheels need and do not contain."""

_EXISTS = {1: Status.OK, 0: Status.MISSING}

_LATE_S = 1.0
"""How long after its deadline a lookup's answer is still of use."""
_CONNECT_S = 2.0
_BOUNCE_BYTES = 16 << 20
"""Mooncake's own buffer. Only small control objects are copied through it."""
_HEADROOM = 4
"""1 / `_HEADROOM` of the slots stay free for leases that wait; see `transfer/staging.py`."""

_undrained: list[object] = []
"""Clients and engines that could not be closed, with the memory that they may still write to."""


_stores: weakref.WeakSet[MooncakeStore] = weakref.WeakSet()


def _end_in_child() -> None:
    """Closes the stores in a forked child, and keeps clients and engines from being destroyed there: a
    destructor would wait for threads that do not exist."""
    for store in _stores:
        store._state = "closed"
    for kept in (*idle, *(part for store in _stores for part in (store._client, store._moves))):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


os.register_at_fork(after_in_child=_end_in_child)


class GetResult(NamedTuple):
    """The outcome of reading one key. With `OK`, `size` bytes of the object are in the slot."""

    status: Status
    size: int


def staging_pool(
    settings: TransferSettings, slot_bytes: int, *, reserve: int = 0, pin: Pin | None = None
) -> StagingPool:
    """Returns memory of `staging_size` and `reserve` bytes in slots of `slot_bytes`. Raises ValueError if not
    even one slot fits."""
    size = int(settings.staging_size)
    headroom = size // StagingPool.stride_of(slot_bytes) // _HEADROOM
    return StagingPool(size + reserve, slot_bytes, prefaulted=settings.prefault, pin=pin, headroom=headroom)


class _MooncakeClient(MovesClient, Protocol):
    """The methods that we use of `mooncake.store.MooncakeDistributedStore`. They return negative ints as
    codes, and raise nothing."""

    def setup(self, config: dict[str, str]) -> int: ...
    def close(self) -> int: ...
    def get_hostname(self) -> str: ...
    def is_exist(self, key: str) -> int: ...
    def put(self, key: str, value: bytes, config: Any) -> int: ...
    def get(self, key: str) -> bytes: ...
    def batch_remove(self, keys: list[str], force: bool) -> list[int]: ...
    def create_move_task(self, key: str, source: str, target: str) -> tuple[Any, int]: ...
    def get_replica_desc(self, key: str) -> list[Any]: ...


def load_mooncake() -> Any:
    """Returns the module `mooncake.store`. Raises MissingLibraryError, which names the missing package."""
    if (client := os.environ.get("MOONCAKE_STORE_BACKEND", "cpp")) != "cpp":  # as of 0.3.14
        raise MissingLibraryError(
            f"MOONCAKE_STORE_BACKEND is {client!r} in the environment; pd-cache needs Mooncake's client in C++: unset it, or set it to cpp"
        )
    try:
        import mooncake.store as module
    except ImportError as error:
        text = str(error)
        for library, package in SYSTEM_PACKAGES.items():
            if library in text:
                raise MissingLibraryError(
                    f"Mooncake's wheel needs {library}, which this system lacks ({text}); "
                    f"install it with: apt-get install {package}"
                ) from error
        if "libcuda" in text:
            raise MissingLibraryError(
                f"the installed Mooncake wheel needs CUDA ({text}); on a machine without it: "
                "pip uninstall -y mooncake-transfer-engine mooncake-transfer-engine-cuda13; "
                "pip install mooncake-transfer-engine-non-cuda"
            ) from error
        raise MissingLibraryError(
            f"Mooncake cannot be imported ({text}); install its wheel: pip install "
            "mooncake-transfer-engine-non-cuda, or with a GPU mooncake-transfer-engine (CUDA 12) or -cuda13"
        ) from error
    return module


def _check(batch: Batch) -> None:
    """Raises ValueError if a batch has no keys or too many keys, or if its keys, slots and sizes do not fit
    together."""
    keys, slots, sizes = batch
    if not keys or len(keys) != len(slots) or len(keys) > MAX_TRANSFERS:
        raise ValueError(
            f"got {len(keys)} keys and {len(slots)} slots; expected one slot for each key, 1 to {MAX_TRANSFERS} of them"
        )
    if len(sizes) != len(keys) or any(
        size < 1 or size > slot.size for size, slot in zip(sizes, slots, strict=True)
    ):
        raise ValueError("expected one size for each key, between 1 and the size of its slot")


class Pending(NamedTuple):
    """A batch under way."""

    store: MooncakeStore
    call: Call[list[int]] | None
    keys: int

    def results(self) -> list[GetResult]:
        """Returns one result for each key, in order. Waits at most until the call's deadline."""
        if self.call is None:
            return [GetResult(self.store._refusal(), 0)] * self.keys
        codes = self.call.outcome([])
        if not codes:
            self.store._suspect()
            return [GetResult(Status.TIMEOUT, 0)] * self.keys
        return [GetResult(status_of(code), max(code, 0)) for code in codes]

    def abandon(self) -> None:
        """Gives up the results. A batch that has not begun lets go of its slots at once."""
        if self.call is not None:
            self.call.abandon()


class PendingPut(NamedTuple):
    """A batch of puts under way."""

    pending: Pending

    def results(self) -> list[Status]:
        """Returns one status for each key, in order. Waits at most until the call's deadline."""
        return [result.status for result in self.pending.results()]


class MooncakeStore:
    """A client of one Mooncake pool, with or without a segment of its own.

    Thread-safe. A call ends by its `end`, by default after the configured time-out. Each key has its own
    result, and no call raises because the pool is in trouble.
    """

    def __init__(
        self,
        settings: TransferSettings,
        *,
        master: str,
        host: str = "127.0.0.1",
        segment_size: int | None = None,
        placement: Placement | None = None,
    ) -> None:
        """Starts opening the store in the background.

        `master` is `host:port`, or `etcd://host:port;host:port/NAME` for elected masters. `host` is the
        address at which other nodes reach this one; `host:port` also names its segment. `segment_size`
        overrides that of the settings. `placement` says where its objects go. Raises MissingLibraryError if a
        library is missing, ValueError if `master` is empty.
        """
        if not master:  # with an empty address, setup() ends the process
            raise ValueError(
                "the master has no address; set it to host:port, or etcd://host:port for elected masters"
            )
        self._master, election = split_master(master)
        prepare(settings, election)  # before the import: Mooncake reads its log level when it is loaded
        module = load_mooncake()
        self._settings = settings
        self._timeouts = settings.timeouts
        self._host = host
        self.segment_size = int(settings.segment_size if segment_size is None else segment_size)
        self._client: _MooncakeClient = module.MooncakeDistributedStore()
        self._module = module
        self._placement = placement or Placement()
        self._put_config: Any = None
        """The store's own placement in Mooncake's form, once the store is open."""
        # two copies if there are two segments, so that control objects outlive a store node
        self._pinned = self._config(Placement(replicas=2, pin="hard", preferred_segment="any"))
        self._regions: list[StagingPool] = []
        self._breaker = CircuitBreaker(self._master, settings)
        self._lookup_rpc = lookup_rpc(self._master) if settings.direct_lookups else None
        direct = DirectReads() if settings.protocol == "tcp" and settings.metadata == "P2PHANDSHAKE" else None
        self._moves = Moves(self._client, settings, self._breaker, self._regions, direct=direct)
        self._control = CallThreads("mooncake-control", 2)
        self._late: dict[tuple[str, ...], Call[list[int]]] = {}
        """By keys: the lookups whose deadline passed before their answer came."""
        # separate threads, so that stores do not hold up loads
        self._gets, self._puts = (
            CallThreads(f"mooncake-{name}", settings.threads, spare=settings.threads)
            for name in ("get", "put")
        )
        self._state = "opening"
        self._changed = threading.Condition()
        self._setup_error = ""
        self._mounted = False
        """Whether `setup()` has succeeded. Then the client must be closed."""
        _stores.add(self)
        self._keeper = threading.Thread(target=self._keep, name="mooncake-keeper", daemon=True)
        self._keeper.start()

    # --- life -----------------------------------------------------------------------------------------------

    def wait_open(self, timeout: float) -> None:
        """Waits until the store is open. Raises PoolUnavailableError, with the last error, after `timeout`
        seconds.

        Raises TransferError if the store is closed or cannot open.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._state != "opening", timeout):
                reason = self._setup_error or "no answer yet"
                raise PoolUnavailableError(
                    f"Mooncake master {self._master} is not reachable after {timeout:g} s: {reason}"
                )
            if self._state == "failed":
                raise TransferError(f"the store of master {self._master} failed: {self._setup_error}")
            if self._state != "open":
                raise TransferError(f"the store of master {self._master} is {self._state}")

    @property
    def available(self) -> bool:
        """Whether calls go to the pool now: the store is open and the breaker closed."""
        return self._state == "open" and not self._breaker.down

    @property
    def hostname(self) -> str:
        """The name of this node's segment, as `preferred_segment` and the master know it; empty before it is
        open."""
        return self._client.get_hostname() if self._state == "open" else ""

    def staging(self, slot_bytes: int, *, reserve: int = 0, pin: Pin | None = None) -> StagingPool:
        """Returns memory of `staging_size` and `reserve` bytes in slots of `slot_bytes`, from and to which
        this store can transfer.

        Raises ValueError if not even one slot fits, TransferError as `attach` does.
        """
        pool = staging_pool(self._settings, slot_bytes, reserve=reserve, pin=pin)
        self.attach(pool)
        return pool

    def attach(self, pool: StagingPool) -> None:
        """Registers the memory of `pool` for transfers, now or as soon as the store opens.

        Raises TransferError if Mooncake refuses it now.
        """
        with self._changed:
            self._regions.append(pool)
            if self._state == "open":
                self._register(pool)

    def close(self) -> None:
        """Drains the calls under way, unmounts the segment and forgets the pool. Idempotent; never raises."""
        if self._state == "closed":  # in a forked child, threads that do not exist may hold its locks
            return
        with self._changed:
            if self._state in ("closing", "closed"):
                return
            self._state = "closing"
            self._changed.notify_all()
        if self._lookup_rpc is not None:
            self._lookup_rpc.close()
        end = end_or(None, self._timeouts.close_ms)
        drained = True
        for threads in (self._gets, self._puts, self._control):
            drained &= threads.close(left(end))
        # the keeper may be inside setup() or a probe; closing the client meanwhile would be a use after free
        self._keeper.join(left(end))
        drained &= not self._keeper.is_alive()
        for pool in self._regions:  # another store may still use the pool
            pool.forget(self._client)
        if drained and self._moves.direct is not None:
            self._moves.direct.close()
        if drained and self._mounted:
            self._client.close()
        elif not drained:
            log.warning(
                "a call into Mooncake outlived close(); its client stays open until this process ends"
            )
            _undrained.append((self._client, self._moves, list(self._regions)))
        with self._changed:
            self._state = "closed"
            self._changed.notify_all()

    def __enter__(self) -> MooncakeStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- calls ----------------------------------------------------------------------------------------------

    def batched_contains(self, keys: Sequence[str], end: End = None) -> list[Status]:
        """Returns OK or MISSING for each key, with one request to the master. Any other status says why the
        answer is unknown.

        The master leases every key that it finds, so ask only for keys that will be read. Without `end`, the
        call takes at most `exist_ms`; vLLM's lookups end by `connector.lookup_timeout_ms`.
        """
        if not keys:
            return []
        if not self.available:
            return [self._refusal()] * len(keys)
        begun, rpc = time.monotonic(), self._lookup_rpc
        end = begun + self._timeouts.exist_ms / 1000 if end is None else end
        # asks the master directly only if it has just answered Mooncake's client, so that the breaker judges
        # by the client's own calls alone
        if rpc is None or begun >= self._breaker.well_until:
            return self._ask_client(keys, end)
        try:
            verdicts = rpc.ask(keys, end)
        except TimeoutError:
            if self._breaker.is_fair(end - begun):
                self._breaker.well_until = 0.0
                rpc.drop_idle()  # no idle connection is newer than the silent one
            return [Status.TIMEOUT] * len(keys)
        if verdicts is None:
            return self._ask_client(keys, end)
        return list(map(_EXISTS.__getitem__, verdicts))

    def _ask_client(self, keys: Sequence[str], end: float) -> list[Status]:
        """As `batched_contains`, through Mooncake's client. Afterwards, opens a connection for `LookupRpc` if
        it needs one.

        An answer that comes after `end` is for the next call with the same keys. Without it, a hand-off that
        is looked up again and again would never see the answer of a master that is slower than each lookup.
        """
        asked, oldest = tuple(keys), time.monotonic() - _LATE_S
        self._late = {before: call for before, call in list(self._late.items()) if call.deadline >= oldest}
        late = self._late.pop(asked, None)
        call = late or self._control.submit(self._exist, end, None, list(keys))
        if call is None:
            return [self._refusal()] * len(keys)
        call.deadline = end
        codes = call.outcome([])
        if not codes:
            if late is None:  # a call counts once
                self._breaker.timed_out("batch_is_exist", call.had_s)
            if call.started:
                self._late[asked] = call
            return [Status.TIMEOUT] * len(keys)
        rpc = self._lookup_rpc
        if rpc is not None and rpc.wants_connection:
            self._control.submit(rpc.connect, end_or(None, self._timeouts.exist_ms))
        return [_EXISTS.get(code) or status_of(code) for code in codes]

    def _exist(self, keys: list[str]) -> list[int]:
        codes = self._client.batch_is_exist(keys)
        self._breaker.learn("batch_is_exist", codes)
        return codes

    def start_get(self, keys: Sequence[str], slots: Sequence[Slot], end: End = None) -> Pending:
        """Begins to read each key into its slot, as far as the slot reaches.

        The slots are retained until the call has really ended, however long that takes.
        """
        batch = Batch(list(keys), list(slots), [slot.size for slot in slots])
        end = end_or(end, self._timeouts.get_ms)
        _check(batch)
        call = None
        if self.available:
            batch.retain()
            call = self._gets.submit(self._moves.get, end, batch.release, batch, end)
        return Pending(self, call, len(keys))

    def start_put(
        self,
        keys: Sequence[str],
        slots: Sequence[Slot],
        sizes: Sequence[int],
        end: End = None,
        *,
        placement: Placement | None = None,
    ) -> PendingPut:
        """Begins to write the first `sizes[i]` bytes of slot i under key i.

        `placement`, by default the store's, says where the objects go. If there is no room, Mooncake takes
        another segment, and does not report it.

        OK means that the pool holds the object. It may have been there before; its key names its contents, so
        the bytes are the same. BUSY means that another writer has begun the key and not ended it.

        The slots are retained until the call has really ended. They are settled then, or at once if no call
        begins.
        """
        batch, end = Batch(list(keys), list(slots), list(sizes)), end_or(end, self._timeouts.put_ms)
        _check(batch)
        call = None
        if self.available:
            config = self._put_config if placement is None else self._config(placement)
            batch.retain()
            call = self._puts.submit(self._moves.put, end, batch.settle_and_release, batch, config, end)
        else:  # the slots wait for no peer, and a local tier may keep them for as long as the pool is away
            for slot in slots:
                slot.settle()
        return PendingPut(Pending(self, call, len(keys)))

    def remove(self, keys: Sequence[str], end: End = None, *, force: bool = False) -> list[Status]:
        """Removes keys. The status of a leased key is BUSY, unless `force`."""
        codes = self._call(self._control, end, self._client.batch_remove, list(keys), force)
        return [Status.TIMEOUT] * len(keys) if codes is None else [status_of(code) for code in codes]

    def move(self, key: str, source: str, target: str, end: End = None) -> Status:
        """Asks for a key to be moved from one segment to another, leased or not. OK means that the owner of
        `source` gets the task within seconds."""
        task = self._call(self._control, end, self._client.create_move_task, key, source, target)
        return Status.TIMEOUT if task is None else status_of(task[1])

    def put_small(self, key: str, value: bytes, end: End = None) -> Status:
        """Writes a control object, which is never evicted. Returns OK also if it was there before, INVALID if
        it is empty."""
        code = self._call(self._puts, end, self._client.put, key, value, self._pinned)
        return Status.TIMEOUT if code is None else status_of(code)

    def get_small(self, key: str, end: End = None) -> bytes | None:
        """Returns a control object; None if it is missing or the pool did not answer in time."""
        return self._call(self._gets, end, self._client.get, key) or None

    # --- inside ---------------------------------------------------------------------------------------------

    def _config(self, placement: Placement) -> Any:
        """Returns Mooncake's form of `placement`. For `own` the client must be set up, because only then has
        its segment a name."""
        config = self._module.ReplicateConfig()
        config.replica_num = placement.replicas
        config.with_hard_pin = placement.pin == "hard"
        if placement.pin == "soft":
            config.soft_pin_action = self._module.SoftPinAction.ENABLE
            config.soft_pin_ttl_ms = placement.soft_pin_ttl_s * 1000
        if placement.preferred_segment not in ("own", "any"):
            config.preferred_segment = placement.preferred_segment
        elif placement.preferred_segment == "own" and self.segment_size:
            config.preferred_segment = self._client.get_hostname()
        return config

    def _suspect(self) -> None:
        """Looks for silent peers, in the background. Called when a transfer's deadline has passed."""
        if self.available and self._gets.late:
            end = end_or(None, self._timeouts.exist_ms)
            self._control.submit(self._moves.suspect_slow_peers, end)

    def _call(self, threads: CallThreads, end: End, function: Callable[..., R], *args: Any) -> R | None:
        """Returns the result of a call; None if the pool is not available or did not answer in time.

        Control objects are transferred on other threads than control calls, and their time-outs say nothing
        about the master. So a silent store node holds up no control calls, and does not open the breaker.
        """
        end = end_or(end, self._timeouts.exist_ms)
        call = threads.submit(function, end, None, *args) if self.available else None
        if call is None:
            return None
        answer = call.outcome(None)
        if answer is None and threads is self._control:
            self._breaker.timed_out("control call", call.had_s)
        return answer

    def _refusal(self) -> Status:
        """Returns why a call was not begun."""
        if self._state in ("closing", "closed"):
            return Status.CLOSED
        return Status.OVERLOADED if self.available else Status.POOL_DOWN

    def _register(self, pool: StagingPool) -> None:
        """Registers the pool's memory. Raises TransferError if Mooncake refuses it."""
        if (code := pool.register(self._client)) != 0:
            raise TransferError(
                f"Mooncake refused to register {pool.nbytes} bytes of staging memory ({code}); with rdma, "
                "raise the limit of locked memory (ulimit -l) or lower staging_size"
            )

    def _keep(self) -> None:
        """The keeper thread: opens the store, then probes whenever the breaker is open, until the store
        closes."""
        interval = self._settings.breaker.probe_interval_ms / 1000
        while self._state not in ("closing", "closed", "failed"):
            try:
                if self._state == "opening" and self._open():
                    continue
                if self._state == "open" and self._breaker.down and self._client.is_exist("pdc1/probe") >= 0:
                    self._breaker.succeeded()
            except TransferError as error:  # waiting will not help
                log.error("pool %s: %s", self._master, error)
                with self._changed:
                    self._setup_error = str(error)
                    if self._state == "opening":
                        self._state = "failed"
                    self._changed.notify_all()
            except Exception as error:  # only close() may end this thread
                if self._setup_error != (text := f"{type(error).__name__}: {error}"):
                    log.exception("pool %s: an unexpected error; trying again", self._master)
                self._setup_error = text
            with self._changed:  # until the state changes
                self._changed.wait(interval)

    def _open(self) -> bool:
        settings = self._settings
        # setup() holds the GIL for 4.5 s if the connection is refused, and for 1.1 s if nothing answers (a
        # stopped master, another program); meanwhile no other thread, and no call to another pool, could end
        # at its deadline
        if (why := why_silent(self._master, _CONNECT_S)) is not None:
            if self._setup_error != why:
                log.warning("Mooncake master %s: %s; trying again until it succeeds", self._master, why)
            self._setup_error = why
            return False
        given = {
            "local_hostname": self._host,
            "metadata_server": settings.metadata,
            "global_segment_size": str(self.segment_size),
            "local_buffer_size": str(_BOUNCE_BYTES),
            "protocol": settings.protocol,
            "rdma_devices": ",".join(settings.devices),
            "master_server_addr": self._master,
        }
        # a second attempt logs why the first failed
        with hushed(not self._setup_error.startswith("setup()")):
            code = self._client.setup(given)
        if code != 0:
            if self._setup_error != (error := f"setup() answered {code}; is a master at that address?"):
                log.warning(
                    "Mooncake master %s: setup failed (%d); trying again until it succeeds",
                    self._master,
                    code,
                )
            self._setup_error = error
            return False
        self._mounted = True
        self._setup_error = ""
        self._put_config = self._config(self._placement)
        first = self._probe_segment() if self.segment_size else None
        if first is not None:
            self._moves.own_peer = first.transport_endpoint
        if self.segment_size and settings.prefault:
            prefault_segment(self.segment_size, None if first is None else int(first.buffer_address))
        with self._changed:
            if self._state == "opening":
                for pool in self._regions:
                    self._register(pool)
                self._state = "open"
                self._changed.notify_all()
                log.info(
                    "pool %s: open, segment of %d bytes as %s",
                    self._master,
                    self.segment_size,
                    self._client.get_hostname(),
                )
        return True

    def _probe_segment(self) -> Any | None:
        """Returns the descriptor of a small object that it puts into the new segment; None if that fails. The
        object's address is the segment's.

        Mooncake's client reports neither the segment's address nor that of its transport.
        """
        key = f"pdc1/probe/{os.getpid()}-{uuid.uuid4().hex}"
        if self._client.put(key, bytes(64), self._config(Placement(preferred_segment="own"))) != 0:
            return None
        try:
            replicas = self._client.get_replica_desc(key)
            return replicas[0].get_memory_descriptor().buffer_descriptor if replicas else None
        finally:
            self._client.batch_remove([key], True)
