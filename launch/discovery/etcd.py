"""Registers and watches nodes in etcd, each on its own thread, which outlives every outage.

We use the client and the stubs of the package etcd3, but not its `Watcher`: that reconnects for ever, even
after `close()`, and does not report when a stream breaks. Our watch lists the records, follows changes from
the revision of the list on, and begins again after any failure. So it treats a lost stream, a compaction and
an etcd that came back empty alike.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import logging
import random
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc

from launch.discovery.membership import Directory, Membership, View
from pd_cache.cluster import EtcdDiscovery, NodeRecord, RecordError, decode_record
from pd_cache.decoding import one_line
from pd_cache.errors import ConfigError

log = logging.getLogger(__name__)

_PAUSE_S = 0.5
"""The longest pause between two attempts. Each pause is shortened at random, so that nodes do not all come
back at once."""
_CALL_S = 2.0
"""How long a call may take: an etcd in the same network takes milliseconds."""
_LONGEST_TICK_S = 1.0
DISAGREES_S = 30.0
"""How long a master and etcd may disagree. In a normal election they disagree for a second or two, or longer
if the next leader takes over many keys. A restart at that time would lose these keys."""
_ELECTION_POLL_S = 1.0
_OPTIONS = (
    ("grpc.enable_http_proxy", 0),  # etcd is in our own network
    ("grpc.use_local_subchannel_pool", 1),  # a new client connects at once, even if the last client failed
    ("grpc.max_receive_message_length", 256 << 20),  # the records of all nodes; one has less than a KiB
)

# --- the package etcd3 --------------------------------------------------------------------------------------
# etcd3 0.12 contains stubs that protobuf has refused to run since its version 4. The stubs hold their own
# descriptors in serialized form, which every protobuf reads. Message classes made from these descriptors are
# equal to those that a new `protoc` would generate. The stubs' files are read, never run. The descriptors are
# in a pool of their own, so nothing changes for the process, and the order of imports does not matter.

_FILES = ("kv_pb2", "auth_pb2", "rpc_pb2")
"""Each of these files imports the files before it."""
_SERIALIZED = re.compile(r"""serialized_pb=_b\('((?:[^'\\]|\\.)*)'\)""")


def load_etcd3() -> Any:
    """Returns the module `etcd3`. Raises ImportError if it or a package that it needs is not installed."""
    if "etcd3" not in sys.modules:
        _make_stubs()
    return importlib.import_module("etcd3")


def _make_stubs() -> None:
    """Puts modules with the message classes of etcd3's stubs in their place."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
    from google.protobuf.internal import enum_type_wrapper

    spec = importlib.util.find_spec("etcd3")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("the package etcd3 is not installed")
    pool = descriptor_pool.DescriptorPool()
    for name in _FILES:
        file = Path(spec.submodule_search_locations[0]) / "etcdrpc" / f"{name}.py"
        found = _SERIALIZED.search(file.read_text(encoding="utf-8"))
        if found is None:
            raise ImportError(f"{file}: expected a stub of etcd3 0.12, but it holds no serialized descriptor")
        serialized = found[1].encode("latin1").decode("unicode_escape").encode("latin1")
        content = descriptor_pb2.FileDescriptorProto.FromString(serialized)
        pool.Add(content)
        descriptor = pool.FindFileByName(content.name)
        module = types.ModuleType(f"etcd3.etcdrpc.{name}", "Made from the descriptors of etcd3's own stubs.")
        for message in descriptor.message_types_by_name.values():
            setattr(module, message.name, message_factory.GetMessageClass(message))
        for enum in descriptor.enum_types_by_name.values():
            setattr(module, enum.name, enum_type_wrapper.EnumTypeWrapper(enum))
            for value in enum.values:
                setattr(module, value.name, value.number)
        sys.modules[module.__name__] = module


# --- clients ------------------------------------------------------------------------------------------------


class _Lost(Exception):
    """etcd does not answer as it should."""


class _EtcdOpener:
    """Opens clients, at the next endpoint each time."""

    def __init__(self, settings: EtcdDiscovery) -> None:
        """Raises ConfigError if a password cannot be read."""
        self._etcd3 = load_etcd3()
        self._settings = settings
        self._turn = random.randrange(len(settings.endpoints))
        self._password = None
        if settings.password_file is not None:
            try:
                self._password = Path(settings.password_file).read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"discovery.password_file: {settings.password_file}: {error}") from None
        tls = settings.tls
        self._files = (
            {"ca_cert": tls.ca_file, "cert_cert": tls.cert_file, "cert_key": tls.key_file} if tls else {}
        )
        # the interval of keep-alives must leave time for a call that fails
        self.timeout_s = min(_CALL_S, settings.ttl_s / 3)

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """Yields a client, logged in if there is a user. Turns every failure between us and etcd into
        `_Lost`."""
        endpoint = self._settings.endpoints[self._turn % len(self._settings.endpoints)]
        etcd3 = self._etcd3
        try:
            host, _, port = endpoint.rpartition(":")
            login = {"user": self._settings.user, "password": self._password}
            made = etcd3.client(
                host, int(port), timeout=self.timeout_s, grpc_options=_OPTIONS, **login, **self._files
            )
            with contextlib.closing(made) as client:
                # etcd3 sends the token with every call, as metadata and as credentials; without TLS, grpc
                # refuses the credentials
                client.call_credentials = None
                yield client
        except grpc.RpcError as error:
            raise _Lost(f"{endpoint}: {error.code().name}: {error.details()}") from error
        except (
            etcd3.Etcd3Exception,
            OSError,
            ValueError,
        ) as error:  # a certificate that is gone; a channel that was closed under a call
            raise _Lost(f"{endpoint}: {str(error) or type(error).__name__}") from error
        finally:
            self._turn += 1


def _repeat(
    opener: _EtcdOpener, closed: threading.Event, work: Callable[[Any], None], lost: Callable[[str], None]
) -> None:
    """Calls `work` with a client, and again whenever it ends, until `closed`. `lost` gets the reasons of
    failures."""
    while not closed.is_set():
        try:
            with opener.client() as client:
                work(client)
        except _Lost as error:
            lost(str(error))
        except Exception:  # this thread must not end: no view would be fresh again
            log.exception("discovery failed unexpectedly; trying again")
            lost("see above")
        closed.wait(_PAUSE_S * random.uniform(0.4, 1))


def prefix_of(cluster: str) -> str:
    """Returns the prefix in etcd of a cluster's nodes. A node's key is the prefix and the node's name."""
    return f"/pd-cache/{cluster}/nodes/"


class EtcdRegistration:
    """Keeps one node's record in etcd under a lease, until closed. Thread-safe."""

    def __init__(self, settings: EtcdDiscovery, cluster: str) -> None:
        """Sends nothing yet. Raises ConfigError if a password cannot be read."""
        self._opener = _EtcdOpener(settings)
        self._ttl_s = settings.ttl_s
        self._prefix = prefix_of(cluster)
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        self._lease: int | None = None
        self._away = False
        self._others = set[bytes]()
        """Records of other processes that were found under our name."""

    def announce(self, record: NodeRecord) -> None:
        """Registers now, and again whenever the lease is lost. Returns at once. Call it only once."""
        assert self._thread is None, "already announced"
        work = functools.partial(self._stay, record)
        self._thread = threading.Thread(
            target=_repeat,
            args=(self._opener, self._closed, work, self._lost),
            name="discovery-register",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Deregisters. Waits for etcd no longer than two or three calls may take. After that, the lease ends
        by itself."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()

    def _stay(self, record: NodeRecord, client: Any) -> None:
        while not self._closed.is_set():
            self._keep(client, record)
            if self._away:
                log.info("registered in etcd again")
            self._away = False
            self._closed.wait(self._ttl_s / 3)
        if self._lease is not None:
            # removes our record, but not that of another process under the same name
            client.revoke_lease(self._lease)

    def _lost(self, why: str) -> None:
        if not self._away and not self._closed.is_set():
            log.warning("cannot register in etcd: %s; still serving, and trying again", why)
        self._away = True

    def _keep(self, client: Any, record: NodeRecord) -> None:
        """Keeps the lease alive, or gets a new one, and makes sure that the record is there."""
        key, value = self._prefix + record.name, record.encode()
        if self._lease is not None and not any(
            answer.TTL > 0 for answer in client.refresh_lease(self._lease)
        ):
            log.warning("the lease in etcd was lost; registering again")
            self._lease = None
        if self._lease is None:
            self._lease = int(client.lease(self._ttl_s).id)
            client.put(key, value, lease=self._lease)
            return
        found, _ = client.get(key)
        if found is None:
            client.put(key, value, lease=self._lease)
        elif found != value and found not in self._others:
            # the other record stays, because two processes must not overwrite each other
            self._others.add(found)
            log.warning("another process registered as %s; give each node its own name", record.name)


class EtcdWatch(Directory):
    """Follows the records of a cluster. Thread-safe."""

    def __init__(
        self,
        settings: EtcdDiscovery,
        cluster: str,
        *,
        seeds: Iterable[NodeRecord] = (),
        on_change: Callable[[View], None] | None = None,
    ) -> None:
        """Begins to follow. `seeds`: nodes to assume until etcd has been read for the first time.

        The watch's own threads call `on_change` with each new view, one after the other. It must return
        quickly.
        """
        self._prefix = prefix_of(cluster)
        self._tick_s = min(_LONGEST_TICK_S, settings.ttl_s / 4)
        self._on_change = on_change
        # a live node registers again within two pauses and a call, which take less than this
        self._membership = Membership(settings.ttl_s + 2 * _PAUSE_S, seeds)
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._synced = threading.Event()
        self._client: Any = None
        self._stream: Any = None
        work = (_EtcdOpener(settings), self._closed, self._follow, self._lost)
        self._threads = [
            threading.Thread(target=_repeat, args=work, name="discovery-watch", daemon=True),
            threading.Thread(target=self._tick, name="discovery-probe", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def view(self) -> View:
        with self._lock:
            return self._membership.view()

    def wait_synced(self, timeout: float) -> bool:
        return self._synced.wait(timeout)

    def close(self) -> None:
        """Ends the threads, and cuts off calls under way."""
        self._closed.set()
        self._break_off()
        for thread in self._threads:
            thread.join()

    def _follow(self, client: Any) -> None:
        from etcd3 import etcdrpc, utils

        self._client = client
        try:
            answer = client.get_prefix_response(self._prefix)
            records = [record for kv in answer.kvs if (record := _read(kv, self._prefix)) is not None]
            with self._lock:
                away_since = self._membership.view().stale_since
                self._membership.sync(records, time.monotonic())
                if away_since is not None:
                    log.info("etcd answers again after %.1f s", time.monotonic() - away_since)
                self._publish()
            self._synced.set()
            key, since = utils.to_bytes(self._prefix), answer.header.revision + 1
            create = etcdrpc.WatchCreateRequest(
                key=key, range_end=utils.increment_last_byte(key), start_revision=since
            )
            requests = iter([etcdrpc.WatchRequest(create_request=create)])
            self._stream = etcdrpc.WatchStub(client.channel).Watch(requests, metadata=client.metadata)
            for response in () if self._closed.is_set() else self._stream:
                if response.canceled or response.compact_revision:
                    return  # the changes in between are gone: list again
                if response.events:  # the first response says only that the watch was made
                    self._apply(response.events)
        finally:
            stream, self._client, self._stream = self._stream, None, None
            if stream is not None:
                stream.cancel()

    def _tick(self) -> None:
        """Checks etcd and the doubted nodes. A check is needed because a stream of changes is silent when its
        other end is gone."""
        while not self._closed.wait(self._tick_s):
            client = self._client
            if client is not None and self._stream is not None:
                try:
                    client.get(self._prefix)
                except Exception as error:  # noqa: BLE001 - whatever the error is, etcd does not answer
                    if client is self._client and not self._closed.is_set():
                        self._lost(f"{type(error).__name__}: {error}")
                        self._break_off()
            with self._lock:
                if self._membership.expire(time.monotonic()):
                    self._publish()

    def _break_off(self) -> None:
        stream, client = self._stream, self._client
        if stream is not None:
            stream.cancel()
        if client is not None:
            client.close()

    def _apply(self, events: Iterable[Any]) -> None:
        with self._lock:
            for event in events:
                if event.type == event.DELETE:
                    self._membership.delete(_name(event.kv, self._prefix), time.monotonic())
                elif (record := _read(event.kv, self._prefix)) is not None:
                    self._membership.put(record)
            self._publish()

    def _lost(self, why: str) -> None:
        with self._lock:
            if not self._closed.is_set() and self._membership.outage(time.monotonic()):
                count = len(self._membership.view().nodes)
                log.warning("etcd does not answer (%s); keeping the last known view, of %d nodes", why, count)
                self._publish()

    def _publish(self) -> None:
        """Publishes the view. Call with the lock held, so that views arrive in order."""
        if self._on_change is not None:
            self._on_change(self._membership.view())


def _name(kv: Any, prefix: str) -> str:
    return one_line(kv.key.decode(errors="replace").removeprefix(prefix))


def _read(kv: Any, prefix: str) -> NodeRecord | None:
    """Returns the record that an entry holds. If it holds no record, logs this and returns None."""
    name = _name(kv, prefix)
    try:
        record = decode_record(kv.value)
        if record.name == name:
            return record
        why = f"it says that its node is {record.name}"
    except RecordError as error:
        why = str(error)
    log.warning("%s in etcd is left out: %s", name, why)
    return None


# --- the election of masters --------------------------------------------------------------------------------


class ElectionWatch:
    """Finds out whether a master and etcd agree on which master leads.

    Mooncake's masters elect a leader by a key in etcd, which lives as long as the leader renews its lease. An
    etcd that dies and comes back costs an election. An etcd that loses data can leave masters in a state that
    never ends (measured; docs/mooncake.md). A leader whose key is gone still says that it leads, but no
    client finds it. A standby that has followed a lost log of operations takes the key again and again, and
    refuses to serve. In both cases master and etcd disagree for good. A master that is restarted takes part
    in a new election.
    """

    def __init__(
        self,
        settings: EtcdDiscovery,
        cluster: str,
        address: str,
        leads: Callable[[], bool | None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`address`: `host:port` of our master. `leads` returns whether the master says that it leads or
        prepares to lead; None if it does not answer. `clock` returns seconds. Raises ConfigError for the same
        reasons as `EtcdRegistration`."""
        self._connector = _EtcdOpener(settings)
        self._key = f"mooncake-store/{cluster}/master_view"
        self._address = address
        self._leads = leads
        self._clock = clock
        self._next = clock()
        self._at_odds_since: float | None = None
        self._revision = 0
        """The key's revision when it was last read."""

    def lost(self) -> bool:
        """Compares once a second. Returns whether etcd and our master have both answered, and have disagreed
        for `DISAGREES_S` seconds; then begins to count again. Waits no longer than a call to etcd and a call
        to the master may take."""
        if self._clock() < self._next:
            return False
        agree, now = self._agree(), self._clock()
        self._next = now + _ELECTION_POLL_S
        if agree:
            self._at_odds_since = None
            return False
        if self._at_odds_since is None:
            self._at_odds_since = now
        if now - self._at_odds_since < DISAGREES_S:
            return False
        self._at_odds_since = None
        log.warning(
            "for %g s the master %s and etcd have differed on which master leads", DISAGREES_S, self._address
        )
        return True

    def _agree(self) -> bool:
        try:
            with self._connector.client() as client:
                value, about = client.get(self._key)
        except _Lost:
            return True  # without etcd no master can lead, and a restart would not help
        leads = self._leads()
        if leads is None:
            return True
        if value is None:
            return False
        before, self._revision = self._revision, about.mod_revision
        if value.decode(errors="replace") == self._address:
            return leads
        # masters that refuse to lead take turns; the key names each of them for a second
        return not leads and self._revision == before
