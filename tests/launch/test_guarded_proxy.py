"""A proxy with keys and TLS, in a process of its own, and the commands that must still be able to ask it."""

import contextlib
import ssl
from pathlib import Path
from typing import NamedTuple

import pytest

from launch.http import NOBODY, BadStatus, client_key, fetch, proxy_access, trusting
from launch.watch.asker import cluster_status
from pd_cache.cluster import ClusterConfig, read_config
from tests.support.etcd import make_certificates
from tests.support.pool import free_port
from tests.support.proxy import files_of, proxy_process

NO_DECODE_NODE = (("up", ""), ("degraded", "/health answers 503: no decode node can be reached"))
"""Before and after the proxy found out that the only one of its file does not run."""
KEY, WATCHING = "sk-0123456789abcdef", "watch-0123456789abcdef"


class Guarded(NamedTuple):
    config: ClusterConfig
    url: str
    folder: Path


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("guarded")
    cert, key = make_certificates(folder)["server"]
    files = files_of(folder, api_keys=f"# clients\nalice {KEY}\n", monitor_keys=f"prometheus {WATCHING}\n")
    decode = {"name": "decode", "role": "decode", "port": free_port()}
    tls = {"cert_file": cert, "key_file": key}
    with proxy_process(folder, decode, port=free_port(), direct_tokens=0, tls=tls, **files) as (url, _):
        yield Guarded(read_config(folder / "cluster.yaml")[0], url, folder)


def proxy_row(guarded):
    (row,) = [row for row in cluster_status(guarded.config).nodes if row.record.role == "proxy"]
    return row


def test_status_asks_with_the_key_and_the_certificate_of_the_file(guarded):
    assert guarded.url.startswith("https://127.0.0.1:")
    row = proxy_row(guarded)
    assert row.record.address == guarded.url
    assert (row.state, row.why.partition(";")[0]) in NO_DECODE_NODE
    assert row.in_flight == 0
    assert row.reading.started is not None


def test_without_key_or_certificate_they_learn_that_the_proxy_is_up_and_no_more(guarded):
    file = guarded.folder / "monitor_keys"
    hidden = file.rename(f"{file}.hidden")
    try:
        assert proxy_access(guarded.config).key == ""
        row = proxy_row(guarded)
        assert (row.state, row.why.partition(";")[0]) in NO_DECODE_NODE
        assert row.in_flight is None
        with pytest.raises(BadStatus, match="401"):
            fetch(f"{guarded.url}/metrics", access=proxy_access(guarded.config))
    finally:
        hidden.rename(file)
    with pytest.raises(ssl.SSLCertVerificationError, match="CERTIFICATE_VERIFY_FAILED"):
        fetch(f"{guarded.url}/health", access=NOBODY)


def test_commands_that_send_requests_are_a_client_of_the_file(guarded):
    access = proxy_access(guarded.config)._replace(key=client_key(guarded.config))
    assert access.key == KEY
    with pytest.raises(BadStatus, match="503"):  # a client of ours, but the proxy has no node
        fetch(f"{guarded.url}/v1/models", access=access)


@pytest.mark.parametrize("served, accepted", [("server", True), ("client", False)])
def test_our_commands_trust_the_proxys_certificate_and_none_that_its_authority_signed_for_others(
    tmp_path, served, accepted
):
    pairs = make_certificates(tmp_path)
    chain = Path(pairs["server"][0]).read_text() + Path(pairs["ca"][0]).read_text()
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*pairs[served])
    there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
    client_end = trusting(chain).wrap_bio(back, there)
    server_end = server.wrap_bio(there, back, server_side=True)

    def shake():
        for side in (client_end, server_end, client_end):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()

    if accepted:
        shake()
        assert client_end.getpeercert()
    else:
        with pytest.raises(ssl.SSLCertVerificationError, match="unable to get local issuer"):
            shake()
