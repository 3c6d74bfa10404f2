"""Decides which client may ask, and how much: keys of clients, monitors and nodes, tenants, the certificate,
and the admission of requests.

Files of keys, tenants and certificates are read again when they change.
"""

from __future__ import annotations

import hashlib
import logging
import re
import ssl
import threading
from asyncio import sslproto
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple, NoReturn

import msgspec
from multidict import CIMultiDictProxy

from launch.openai import ApiError, overloaded
from pd_cache.cluster import LimitsConfig, ProxyConfig, ServerTlsConfig, TenantConfig, read_tenants
from pd_cache.errors import ConfigError
from pd_cache.sparse_log import SparseLog

log = logging.getLogger(__name__)

_TENANT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_LINE = re.compile(rf"([A-Za-z0-9._-]{{1,64}})\s+([\x21-\x7e]{{16,512}})(?:\s+(@?{_TENANT.pattern}))?")


class Client(NamedTuple):
    """The owner of a key."""

    name: str = ""
    """The client's name; empty if clients need no keys."""
    tenant: str = ""
    """The client's tenant; `@HEADER` if that header of each request names the tenant; empty for none."""

    @property
    def holder(self) -> str:
        """The name that limits apply to: the tenant's, or the client's if it has no tenant."""
        return self.tenant or self.name


def read_keys(file: str, field: str = "api_keys_file") -> dict[bytes, Client]:
    """Returns the digest of each key, with the client. A line is `NAME KEY`, or for clients `NAME KEY
    TENANT`; `#` begins a comment.

    The keys themselves are not kept. Raises ConfigError, which names the line, if the file cannot be used.
    """
    keys: dict[bytes, Client] = {}
    names: set[str] = set()
    for number, line in enumerate(_text(file, field).splitlines(), start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        where = f"proxy.{field}: {file}:{number}"
        found = _LINE.fullmatch(words)
        if found is None or (found[3] and field != "api_keys_file"):
            raise ConfigError(
                f"{where}: expected `NAME KEY`: a name of up to 64 letters, digits, . _ - and a key of 16 to 512 visible "
                "ASCII characters; in api_keys_file, a client's tenant may follow: a name, or @HEADER for a gateway"
            )
        name, digest = found[1], _digest(found[2])
        if name in names or digest in keys:
            raise ConfigError(f"{where}: the name {name} or its key is already on another line")
        names.add(name)
        keys[digest] = Client(name, found[3] or "")
    if not keys:
        raise ConfigError(f"proxy.{field}: {file}: holds no keys")
    return keys


def read_node_key(file: str) -> str:
    """Returns the only key in a file. Raises ConfigError if the file holds anything else."""
    key = _text(file, "node_key_file").strip()
    if not re.fullmatch(r"[\x21-\x7e]{1,512}", key):
        raise ConfigError(
            f"proxy.node_key_file: {file}: must hold one key of 1 to 512 visible ASCII characters"
        )
    return key


def _text(file: str, field: str) -> str:
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"proxy.{field}: {file}: cannot be read: {error}") from None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


_ANYTHING, _UNKNOWN = TenantConfig(), TenantConfig(pins=0)
"""The limits of a client without a tenant, and of a tenant that the file does not name."""


class Keys:
    def __init__(self, config: ProxyConfig, files: WatchedFiles) -> None:
        """Reads the files that the configuration names, and reads them again whenever `files` sees a change.

        Raises ConfigError if a file cannot be used.
        """
        self._clients: Mapping[bytes, Client] | None = None
        self._monitors: Mapping[bytes, Client] | None = None
        self.node_key: str | None = None
        """The nodes' own key."""
        self.tenants: Mapping[str, TenantConfig] | None = None
        """The tenants of `tenants_file`; None if there is no such file."""
        self._of_keys: Mapping[str, LimitsConfig] = {}
        for name in ("api_keys_file", "monitor_keys_file", "node_key_file", "tenants_file"):
            if (file := getattr(config, name)) is not None:
                files.add(f"proxy.{name}", [file], partial(self._read, name, file))

    def _read(self, field: str, file: str) -> None:
        if field == "api_keys_file":
            self._clients = read_keys(file, field)
        elif field == "monitor_keys_file":
            self._monitors = read_keys(file, field)
        elif field == "tenants_file":
            read = read_tenants(file)
            self.tenants, self._of_keys = read.tenants, read.keys
        else:
            self.node_key = read_node_key(file)

    @property
    def guarded(self) -> bool:
        """Whether clients need keys. The proxy does not pass these keys on to nodes."""
        return self._clients is not None

    @property
    def has_tenants(self) -> bool:
        return any(client.tenant for client in (self._clients or {}).values())

    def client(self, authorization: str | None) -> Client:
        """Returns the client that the key belongs to. Raises ApiError 401 if the key is missing or
        unknown."""
        if self._clients is None:
            return Client()
        client = _find(self._clients, authorization)
        if client is None:
            raise _refused()
        return client

    def in_tenant(self, client: Client, headers: CIMultiDictProxy[str]) -> Client:
        """Returns the client of a request in the name of its tenant, which a header names if the key's tenant
        is `@HEADER`.

        Raises ApiError 400 if the header does not name one, 403 if the tenant is not known.
        """
        tenant = client.tenant
        if tenant.startswith("@"):
            given = headers.getall(tenant[1:], [])
            # two such headers: the gateway's own, and one from its client
            if len(given) != 1 or not _TENANT.fullmatch(given[0]):
                what = f"The header {tenant[1:]} must name one tenant, in up to 63 letters, digits, . _ -"
                raise ApiError(400, what, code="bad_tenant")
            tenant = given[0]
        if tenant and self.tenants is not None and tenant not in self.tenants:
            raise ApiError(403, f"The tenant {tenant} is not in proxy.tenants_file", code="unknown_tenant")
        return client._replace(tenant=tenant)

    def limits(self, tenant: str) -> TenantConfig:
        """Returns the limits of a tenant. A tenant that the file does not name any more may have no pins."""
        known = self.tenants or {}
        return known.get(tenant, _UNKNOWN if known and tenant else _ANYTHING)

    def times(self, client: Client) -> LimitsConfig | None:
        """Returns how long a client's completions may take; None if only `proxy.limits` says that."""
        return self._of_keys.get(client.name) or self.limits(client.tenant).limits

    def may_watch(self, authorization: str | None) -> bool:
        """Returns whether the client may see answers that name nodes."""
        if self._monitors is not None:
            return _find(self._monitors, authorization) is not None
        return self._clients is None or _find(self._clients, authorization) is not None

    def visible_client(self, authorization: str | None) -> Client | None:
        """Returns the client itself if it may see only its own requests; None if it may see all requests.

        Only monitors' keys may see all, if clients need keys. Raises ApiError 401 if the client may see none.
        """
        if self._monitors is not None and (self._clients is None or self.may_watch(authorization)):
            self.check_watcher(authorization)
            return None
        return client if (client := self.client(authorization)).name else None

    def check_watcher(self, authorization: str | None) -> None:
        """Raises ApiError 401 if the client may not see answers that name nodes."""
        if not self.may_watch(authorization):
            raise _refused()


def _find(keys: Mapping[bytes, Client], authorization: str | None) -> Client | None:
    scheme, _, key = (authorization or "").partition(" ")
    # looked up by digest, so that the time it takes reveals nothing about a nearly right key
    client = keys.get(_digest(key.strip()))
    return client if scheme.lower() == "bearer" else None


def _refused() -> ApiError:
    return ApiError(401, "A valid API key is needed: `Authorization: Bearer KEY`", code="invalid_api_key")


@dataclass
class Admission:
    """Admits requests, or refuses them immediately."""

    max_requests: int
    max_per_key: int | None
    limits: Callable[[str], TenantConfig]
    """Returns the limits of a tenant."""
    closing: bool = False
    """Whether the proxy admits no more requests."""
    _running: Counter[Client] = field(default_factory=Counter)

    def running(self) -> int:
        """Returns how many requests are admitted now."""
        return self._running.total()

    def check(self, client: Client) -> None:
        """Raises ApiError 503 if the proxy is full or closing, 429 if the client or the tenant has its share.
        Takes no place."""
        if self.closing:
            raise overloaded("The proxy is shutting down")
        if self.running() >= self.max_requests:
            raise overloaded(
                f"{self.max_requests} requests are in flight, and this proxy takes no more at a time"
            )
        for place, most in enumerate((self.max_per_key, self.limits(client.tenant).max_requests)):
            name, what = client[place], ("key", "tenant")[place]
            if (
                name
                and most is not None
                and sum(n for who, n in self._running.items() if who[place] == name) >= most
            ):
                raise ApiError(
                    429,
                    f"{most} requests of this {what} are in flight, and a {what} may have no more at a time",
                    code="rate_limit_exceeded",
                )

    @contextmanager
    def admitted(self, client: Client) -> Iterator[None]:
        """Holds a place while the block runs. Raises ApiError as `check` does."""
        self.check(client)
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]


_LOOK_S = 2.0


class _WatchedFile(msgspec.Struct):
    what: str
    files: Sequence[str]
    load: Callable[[], None]
    seen: list[bytes]
    """The digests of the files that were loaded."""
    changed: list[bytes] | None = None
    """The files' digests at the last look, if they differ from `seen`."""
    refused: list[bytes] | None = None
    """The digests of files that could not be used. This is logged once, and they are tried again at each
    look, because the process may only have lacked a file descriptor."""

    def look(self) -> None:
        digests = _digests(self.files)
        if digests == self.seen:
            self.changed = self.refused = None
            return
        if digests != self.changed:
            # half of a file can be valid, so a change is loaded when the next look finds the same
            self.changed = digests
            return
        try:
            self.load()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a file, it must not end its thread
            if digests != self.refused:
                log.error(
                    "%s changed and cannot be used; the previous contents stay in force: %s", self.what, error
                )
            self.refused = digests
        else:
            self.seen = digests
            log.info("%s changed and was read again", self.what)


class WatchedFiles:
    """Loads files, and loads them again when they change. If a file cannot be used, logs that and keeps what
    was loaded before."""

    def __init__(self) -> None:
        self._watched: list[_WatchedFile] = []

    def add(self, what: str, files: Sequence[str], load: Callable[[], None]) -> None:
        """Calls `load` now, and on another thread whenever two looks in a row find the same change of
        `files`.

        `load` must raise ConfigError if a file cannot be used, and then change nothing. `what` names the
        files in the log.
        """
        seen = _digests(files)  # first, so that a file that changes while it is read is read again
        load()
        self._watched.append(_WatchedFile(what, files, load, seen))

    def look(self) -> None:
        for watched in self._watched:
            watched.look()

    def follow(self) -> threading.Event:
        """Looks every two seconds until the returned event is set. Each look has a thread of its own, because
        one may hang: at a file of a server that is gone."""
        stop, sparse = threading.Event(), SparseLog(every_s=60.0)

        def follow() -> None:
            looks: dict[str, threading.Thread] = {}
            while not stop.wait(_LOOK_S):
                for watched in self._watched:
                    what = watched.what
                    if what not in looks or not looks[what].is_alive():
                        looks[what] = threading.Thread(target=watched.look, name="proxy-files", daemon=True)
                        looks[what].start()
                    elif sparse.admit(what) is not None:
                        log.error("reading %s hangs; the previous contents stay in force", what)

        threading.Thread(target=follow, name="proxy-files", daemon=True).start()
        return stop


def _digests(files: Sequence[str]) -> list[bytes]:
    try:
        return [hashlib.sha256(Path(file).read_bytes()).digest() for file in files]
    except (OSError, ValueError):  # ValueError: a name with a NUL in it
        return []


class ServerTls:
    """The TLS context of the proxy's socket. After a change of the files, the next handshake uses the new
    certificate."""

    def __init__(self, config: ServerTlsConfig, files: WatchedFiles) -> None:
        """Raises ConfigError, which names the file and the reason, if a file cannot be used."""
        self._config = config
        self._current = self.context = _fresh()
        # asyncio's buffer for each connection of the process, even if the connection sends nothing: 256 KiB
        # by default, although a TLS record has at most 16 KiB
        sslproto.SSLProtocol.max_size = 16 << 10
        # OpenSSL calls this at the beginning of each handshake, also if the client names no server
        self.context.sni_callback = lambda handshake, name, context: setattr(
            handshake, "context", self._current
        )
        files.add("proxy.tls", [config.cert_file, config.key_file], self._load)

    def _load(self) -> None:
        # a new context, because handshakes on other threads use the present one
        config, context = self._config, _fresh()
        try:
            for file in (config.cert_file, config.key_file):
                Path(file).read_bytes()  # its errors name the file; OpenSSL's errors do not
            context.load_cert_chain(config.cert_file, config.key_file, password=_no_pass_phrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(
                f"proxy.tls: cert_file must be a certificate, and key_file its key, in PEM format and without a pass phrase: {error}"
            ) from None
        self._current = context


def _fresh() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_pass_phrase() -> NoReturn:
    """Raises ValueError. Called if a key is encrypted; otherwise OpenSSL would ask on the terminal."""
    raise ValueError("the key needs a pass phrase")
