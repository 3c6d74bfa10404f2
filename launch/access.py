"""How our own commands reach a proxy that requires keys or TLS: with the files named by the cluster's file that this machine has."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import NamedTuple

from pd_cache.cluster import ClusterConfig


class Access(NamedTuple):
    """What a request to a node needs besides its address."""

    key: str = ""
    context: ssl.SSLContext | None = None
    """Which certificates to trust, if the node speaks TLS."""
    guarded: bool = False
    """Whether the node asks for a key, even if this machine has none."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


_END = "-----END CERTIFICATE-----"
NOBODY = Access()
"""For nodes that need nothing. Keys are sent to proxies only."""


def proxy_access(config: ClusterConfig) -> Access:
    """Returns the first key of `monitor_keys_file`, or else of `api_keys_file`, and trust in the certificate of `tls`.

    A file that does not exist, or that this user may not read, is left out. The proxy then answers as it answers clients without a key,
    and its certificate must be signed by an authority that this machine trusts.
    """
    file = config.proxy.monitor_keys_file or config.proxy.api_keys_file
    context = None if config.proxy.tls is None else trusting(proxy_certificate(config))
    return Access("" if file is None else _first_key(file), context, file is not None)


def client_key(config: ClusterConfig) -> str:
    """Returns the first key of `api_keys_file`; empty if no key can be read."""
    file = config.proxy.api_keys_file
    return "" if file is None else _first_key(file)


def proxy_certificate(config: ClusterConfig) -> str:
    """Returns the proxy's certificate in PEM format; empty if it cannot be read."""
    tls = config.proxy.tls
    try:
        return "" if tls is None else Path(tls.cert_file).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""


def trusting(certificate: str) -> ssl.SSLContext:
    """Returns a context that trusts only the first certificate of this text in PEM format. It checks no names, because nodes are
    addressed by IP.

    If the text is empty or cannot be read, it trusts this machine's authorities, with names checked.
    """
    first = "".join(certificate.partition(_END)[:2])  # those that follow are authorities, which sign for others, too
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=first)
    except (OSError, ValueError):  # ssl.SSLError is an OSError
        return ssl.create_default_context()
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.check_hostname = False
    return context


def _first_key(file: str) -> str:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return ""
    found = (line.partition("#")[0].split() for line in lines)
    return next((fields[1] for fields in found if len(fields) == 2), "")
