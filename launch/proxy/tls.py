"""The proxy's certificate."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NoReturn

from launch.proxy.watched_files import WatchedFiles
from pd_cache.cluster import ServerTlsConfig
from pd_cache.errors import ConfigError


class ServerTls:
    """Keeps the TLS context for new connections, and replaces it when the files change."""

    def __init__(self, config: ServerTlsConfig, files: WatchedFiles) -> None:
        """Raises ConfigError, which names the file and the reason, if a file cannot be used."""
        self._config = config
        self.context = _fresh()
        files.add("proxy.tls", [config.cert_file, config.key_file], self._load)

    def current(self) -> ssl.SSLContext:
        """Returns the context for a new connection."""
        return self.context

    def _load(self) -> None:
        config, context = (
            self._config,
            _fresh(),
        )  # a new one, because handshakes on other threads use the present one
        try:
            context.load_cert_chain(config.cert_file, config.key_file, password=_no_pass_phrase)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise ConfigError(_why(config, error)) from None
        self.context = context


def _fresh() -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.set_alpn_protocols(["http/1.1"])
    return context


def _no_pass_phrase() -> NoReturn:
    """Raises ValueError. Called if a key is encrypted; otherwise OpenSSL would ask on the terminal."""
    raise ValueError("the key needs a pass phrase")


def _why(config: ServerTlsConfig, error: OSError | ValueError) -> str:
    for field, file, marks in (
        ("cert_file", config.cert_file, ("-----BEGIN CERTIFICATE-----", "-----BEGIN TRUSTED CERTIFICATE-----")),
        ("key_file", config.key_file, ("PRIVATE KEY-----",)),
    ):
        try:
            text = Path(file).read_text(encoding="ascii", errors="replace")
        except OSError as unreadable:
            return f"proxy.tls.{field}: {file}: cannot be read: {unreadable.strerror or unreadable}"
        if not any(mark in text for mark in marks):
            kind = "certificate" if field == "cert_file" else "private key"
            return f"proxy.tls.{field}: {file}: holds no {kind} in PEM format (a line `-----BEGIN …`)"
        if field == "key_file" and "ENCRYPTED" in text:
            return f"proxy.tls.key_file: {file}: the key needs a pass phrase; remove it with: openssl pkey -in FILE"
    if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
        return f"proxy.tls: {config.key_file} is not the key of the first certificate in {config.cert_file}"
    return f"proxy.tls: {config.cert_file} and {config.key_file} cannot be used: {error}"
