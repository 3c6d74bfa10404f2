"""The keys of clients, of monitors of the cluster, and of the nodes."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from launch.proxy.answers import ApiError
from launch.proxy.nodes import Credentials
from launch.proxy.watched_files import WatchedFiles
from pd_cache.cluster import ProxyConfig
from pd_cache.errors import ConfigError

_KEY = re.compile(r"[\x21-\x7e]{16,512}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_KEYS = 100_000


def read_keys(file: str, field: str = "api_keys_file") -> dict[str, bytes]:
    """Returns the names of clients, each with a digest of its key. A line is `NAME KEY`; `#` begins a comment.

    The keys themselves are not kept. Raises ConfigError, which names the line, if the file cannot be used.
    """
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"proxy.{field}: {file}: cannot be read: {error}") from None
    keys: dict[str, bytes] = {}
    digests: set[bytes] = set()
    for number, line in enumerate(lines, start=1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        where = f"proxy.{field}: {file}:{number}"
        if len(fields) != 2 or not _NAME.fullmatch(fields[0]) or not _KEY.fullmatch(fields[1]):
            raise ConfigError(
                f"{where}: expected `NAME KEY`: a name of up to 64 letters, digits, . _ - and a key of 16 to 512 visible "
                "ASCII characters"
            )
        if fields[0] in keys or _digest(fields[1]) in digests:
            raise ConfigError(f"{where}: the name {fields[0]} or its key is already on another line")
        keys[fields[0]] = _digest(fields[1])
        digests.add(keys[fields[0]])
    if not 1 <= len(keys) <= _MAX_KEYS:
        raise ConfigError(f"proxy.{field}: {file}: holds {len(keys)} keys; 1 to {_MAX_KEYS} are allowed")
    return keys


def read_node_key(file: str) -> str:
    """Returns the only key in a file. Raises ConfigError if the file holds anything else."""
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(f"proxy.node_key_file: {file}: cannot be read: {error}") from None
    if not re.fullmatch(r"[\x21-\x7e]{1,512}", key):
        raise ConfigError(f"proxy.node_key_file: {file}: must hold one key of 1 to 512 visible ASCII characters")
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class Keys:
    """The keys in force."""

    def __init__(self, config: ProxyConfig, files: WatchedFiles) -> None:
        """Reads the files that the configuration names, and reads them again whenever `files` sees a change.

        Raises ConfigError if a file cannot be used.
        """
        self._config = config
        self._clients: Mapping[bytes, str] | None = None
        self._monitors: Mapping[bytes, str] | None = None
        self._node_key: str | None = None
        for field, load in (
            ("api_keys_file", self._read_clients),
            ("monitor_keys_file", self._read_monitors),
            ("node_key_file", self._read_node_key),
        ):
            file = getattr(config, field)
            if file is not None:
                files.add(f"proxy.{field}", [file], load)

    def _read_clients(self) -> None:
        self._clients = _by_digest(self._config.api_keys_file, "api_keys_file")

    def _read_monitors(self) -> None:
        self._monitors = _by_digest(self._config.monitor_keys_file, "monitor_keys_file")

    def _read_node_key(self) -> None:
        assert self._config.node_key_file is not None
        self._node_key = read_node_key(self._config.node_key_file)

    @property
    def credentials(self) -> Credentials:
        """What nodes learn about the client's key, and their own key."""
        return Credentials(self._clients is not None, self._node_key)

    def client(self, authorization: str | None) -> str:
        """Returns the client's name, empty if clients need no keys. Raises ApiError 401 if the key is missing or unknown."""
        if self._clients is None:
            return ""
        name = _find(self._clients, authorization)
        if name is None:
            raise _refused()
        return name

    def may_watch(self, authorization: str | None) -> bool:
        """Returns whether the client may see answers that name nodes."""
        if self._monitors is not None:
            return _find(self._monitors, authorization) is not None
        return self._clients is None or _find(self._clients, authorization) is not None

    def visible_client(self, authorization: str | None) -> str | None:
        """Returns the name of the only client whose requests this one may see: its own; None if it may see all.

        Only monitors' keys may see all, if clients need keys. Raises ApiError 401 if the client may see none.
        """
        if self._monitors is None:
            return self.client(authorization) or None
        self.check_watcher(authorization)
        return None

    def check_watcher(self, authorization: str | None) -> None:
        """Raises ApiError 401 if the client may not see answers that name nodes."""
        if not self.may_watch(authorization):
            raise _refused()


def _by_digest(file: str | None, field: str) -> dict[bytes, str]:
    assert file is not None
    return {digest: name for name, digest in read_keys(file, field).items()}


def _find(keys: Mapping[bytes, str], authorization: str | None) -> str | None:
    scheme, _, key = (authorization or "").partition(" ")
    # looked up by digest, so that the time it takes reveals nothing about a nearly right key
    name = keys.get(_digest(key.strip()))
    return name if scheme.lower() == "bearer" else None


def _refused() -> ApiError:
    return ApiError(401, "A valid API key is needed: `Authorization: Bearer KEY`", code="invalid_api_key")
