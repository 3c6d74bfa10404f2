"""What a cache server says about itself, for programs that are not engines."""

from __future__ import annotations

from pd_cache.client.connection import ServerConnection
from pd_cache.wire.channel import CacheServerError
from pd_cache.wire.messages import StatusQuery, StatusReport, Welcome


def server_welcome(url: str, timeout: float) -> Welcome:
    """Returns how the server names and sizes chunks. Raises CacheServerError if it does not answer, ValueError for a bad address."""
    connection = ServerConnection(url, None, "observer", connect_timeout_s=timeout)
    try:
        welcome = connection.welcome
        assert welcome is not None  # the constructor has waited for it
        return welcome
    finally:
        connection.close()


def server_status(url: str, timeout: float) -> StatusReport:
    """Returns what the server is doing. Raises CacheServerError if it does not answer, ValueError for a bad address."""
    connection = ServerConnection(url, None, "observer", connect_timeout_s=timeout)
    try:
        report = connection.ask(StatusQuery(), timeout)
    finally:
        connection.close()
    if not isinstance(report, StatusReport):
        raise CacheServerError(f"a question for its status was answered with {type(report).__name__}")
    return report
