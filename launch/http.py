"""HTTP requests of our own commands to nodes, with the key and the certificates that a proxy requires."""

from __future__ import annotations

import contextlib
import http.client
import ssl
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pd_cache.cluster import ClusterConfig
from pd_cache.decoding import one_line

ANSWER_S = 2.0
_PIECE = 1 << 16
_END = "-----END CERTIFICATE-----"


class Access(NamedTuple):
    """The key and the certificates that a request to a node needs."""

    key: str = ""
    context: ssl.SSLContext | None = None
    """Which certificates to trust, if the node speaks TLS."""
    guarded: bool = False
    """Whether the node asks for a key, even if this machine has none."""

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}


NOBODY = Access()
"""For nodes that need no key. Keys are sent only to proxies."""


def proxy_access(config: ClusterConfig) -> Access:
    """Returns the first key of `monitor_keys_file` or, without that file, of `api_keys_file`; and a context
    that trusts the certificate of `tls`.

    A file that does not exist, or that this user may not read, is ignored. Without a key, the proxy answers
    as it answers clients without a key. Without a certificate, the proxy's certificate must be signed by an
    authority that this machine trusts.
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
    """Returns a context that trusts only the first certificate of this text in PEM format. It checks no
    names, because nodes are addressed by IP.

    If the text is empty or cannot be read, it trusts this machine's authorities, with names checked.
    """
    # later certificates belong to authorities, which sign for others, too
    first = "".join(certificate.partition(_END)[:2])
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
    return next((fields[1] for fields in found if len(fields) in (2, 3)), "")


class BadStatus(OSError):
    """An answer with another status than 2xx, and its body. The message has the status, and the beginning of
    the body."""

    def __init__(self, status: int, body: bytes = b"") -> None:
        why = one_line(body[:300].decode(errors="replace"))
        super().__init__(f"it answers {status}{why and ': ' + why}")
        self.status = status
        self.body = body


def fetch(url: str, timeout: float = ANSWER_S, access: Access = NOBODY, body: bytes | None = None) -> bytes:
    """Returns the body of the answer to a GET, or with a `body`, which is JSON, to a POST.

    `access`: key and certificates for the node.

    `timeout` bounds connecting, then each wait for the head of the answer, and then the whole body. Redirects
    are not followed and `http_proxy` is ignored, so that a key goes only to the node.

    Raises BadStatus for another status than 2xx; OSError, which names the address, if there is no answer;
    ValueError if the answer is not HTTP.
    """
    answered = bytearray()
    with _asked(url, timeout, access, body) as answer:
        end = time.monotonic() + timeout
        while part := answer.read1(_PIECE):
            answered += part
            if time.monotonic() > end:
                raise TimeoutError
    if 200 <= answer.status < 300:
        return bytes(answered)
    raise BadStatus(answer.status, bytes(answered))


def healthy(host: str, port: int) -> bool:
    """Returns whether the node at that address answers that it is well."""
    try:
        fetch(f"http://{host}:{port}/health")
    except (OSError, ValueError):
        return False
    return True


def fetch_lines(url: str, timeout: float) -> Iterator[bytes]:
    """Yields the lines of a body as they arrive, and keeps none. For lists that are too long for `fetch`.

    `timeout` bounds connecting, and then each wait for more of the answer. Raises as `fetch`.
    """
    with _asked(url, timeout, NOBODY, None) as answer:
        if answer.status != 200:
            raise BadStatus(answer.status)
        for line in answer:
            yield line.removesuffix(b"\n")


@contextlib.contextmanager
def _asked(
    url: str, timeout: float, access: Access, body: bytes | None
) -> Iterator[http.client.HTTPResponse]:
    """Yields the answer, to be read inside the block; see `fetch`."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme == "https":
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.netloc, timeout=timeout, context=access.context
        )
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=timeout)
    with contextlib.closing(connection):
        try:
            connection.connect()
        except OSError as error:
            raise type(error)(f"{parts.netloc}: {error.strerror or error}") from None
        path = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        headers = {**access.headers, "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.request("GET" if body is None else "POST", path, body, headers)
            with connection.getresponse() as answer:
                yield answer
                # http.client raises only if the whole body is read at once, and for lines not between chunks
                if answer.length or (answer.chunked and answer.chunk_left is not None):
                    raise http.client.IncompleteRead(b"", answer.length)
        except TimeoutError:
            raise TimeoutError(f"{parts.netloc}: no whole answer within {timeout:g} s") from None
        except http.client.RemoteDisconnected:
            raise ConnectionResetError(
                f"{parts.netloc}: it closed the connection without an answer"
            ) from None
        except http.client.IncompleteRead as error:
            lacks = f"{error.expected} bytes " if error.expected else ""  # unknown if it came in chunks
            raise ConnectionResetError(f"its answer ended {lacks}early") from None
        except http.client.HTTPException as error:
            raise ValueError(f"it does not speak HTTP ({type(error).__name__})") from None
