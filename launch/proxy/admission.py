"""Who may send requests, and how many at a time."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from launch.proxy.answers import ApiError, overloaded
from pd_cache.errors import ConfigError

_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_KEYS = 100_000


def read_keys(file: str) -> dict[str, bytes]:
    """The names of clients, and a digest of each one's key. A line is `NAME KEY`; `#` begins a comment.

    ConfigError says which line cannot be used. The keys themselves are not kept.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"proxy.api_keys_file: {file}: cannot be read: {error}") from None
    keys: dict[str, bytes] = {}
    for number, line in enumerate(lines, start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        where = f"proxy.api_keys_file: {file}:{number}"
        if len(fields) != 2 or not _NAME.fullmatch(fields[0]) or not _KEY.fullmatch(fields[1]):
            raise ConfigError(
                f"{where}: a line is `NAME KEY`, the name of letters, digits, . _ - and the key of 16 to 512 visible "
                "ASCII characters"
            )
        if fields[0] in keys or _digest(fields[1]) in keys.values():
            raise ConfigError(f"{where}: the name {fields[0]} or its key stands there twice")
        keys[fields[0]] = _digest(fields[1])
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise ConfigError(f"proxy.api_keys_file: {file}: holds {len(keys)} keys; 1 to {_MAX_KEYS} are allowed")
    return keys


def read_node_key(file: str) -> str:
    """The one key that a file holds. ConfigError where that is not what it holds."""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"proxy.node_key_file: {file}: cannot be read: {error}") from None
    if not re.fullmatch(r"[\x21-\x7e]{1,512}", key):
        raise ConfigError(f"proxy.node_key_file: {file}: must hold one key of 1 to 512 visible ASCII characters")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Admission:
    """Lets requests in, or refuses them at once."""

    def __init__(self, keys: Mapping[str, bytes] | None, max_requests: int, max_per_key: int | None) -> None:
        """`keys` as of `read_keys`; None lets everybody in."""
        self._names = {digest: name for name, digest in keys.items()} if keys is not None else None
        self._max_requests = max_requests
        self._max_per_key = max_per_key
        self._running: Counter[str] = Counter()
        self.closing = False
        """Set when no more are let in."""

    @property
    def guarded(self) -> bool:
        """Whether clients need a key."""
        return self._names is not None

    def running(self) -> int:
        """Requests that are in."""
        return self._running.total()

    def identify(self, authorization: str | None) -> str:
        """The client's name; the empty one where nobody needs a key. ApiError 401 for none or an unknown one."""
        if self._names is None:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        # found by its digest: how long that takes says nothing about a key that is nearly right
        name = self._names.get(_digest(key.strip()))
        if scheme.lower() != "bearer" or name is None:
            raise ApiError(401, "A valid API key is needed: `Authorization: Bearer KEY`", code="invalid_api_key")
        return name

    @contextmanager
    def admitted(self, client: str) -> Iterator[None]:
        """Hold a place while the block runs. ApiError 503 if the proxy is full or closing, 429 if the client has its share."""
        if self.closing:
            raise overloaded("The proxy is shutting down")
        if self.running() >= self._max_requests:
            raise overloaded(f"{self._max_requests} requests are in flight, the most that this proxy takes")
        if client and self._max_per_key is not None and self._running[client] >= self._max_per_key:
            raise ApiError(
                429,
                f"{self._max_per_key} requests of this key are in flight, the most that one may have",
                code="rate_limit_exceeded",
                retry_after=1,
            )
        self._running[client] += 1
        try:
            yield
        finally:
            self._running[client] -= 1
            if not self._running[client]:
                del self._running[client]
