"""Registration and watching against a real etcd that is stopped, killed, wiped and compacted."""

import re
import signal
import time
from contextlib import ExitStack, closing, contextmanager

import msgspec
import psutil
import pytest

from launch.discovery.etcd import EtcdRegistration, EtcdWatch, load_etcd3, prefix_of
from pd_cache.cluster import EtcdDiscovery, NodeRecord, TlsConfig
from pd_cache.errors import ConfigError
from tests.support.etcd import PASSWORD, make_certificates
from tests.support.needs import needs_etcd
from tests.support.waiting import wait_for

pytestmark = needs_etcd
CLUSTER = "test"


@pytest.fixture(autouse=True)
def no_file_left_open():
    load_etcd3().client(port=1).close()  # grpc opens some files for the process when it is first used
    before = psutil.Process().num_fds()
    yield
    wait_for(lambda: psutil.Process().num_fds() <= before, "files closed")


def record(name, instance="1"):
    return NodeRecord(name=name, role="prefill", address="http://10.0.0.2:8100", instance=instance)


def watching(etcd, **options):
    return EtcdWatch(etcd.settings(), CLUSTER, **options)


@contextmanager
def registered(etcd, name, instance="1", **changed):
    """`changed`: how this node reaches etcd, if not in the usual way."""
    settings = etcd.settings(**changed)
    with closing(EtcdRegistration(settings, CLUSTER)) as registration, EtcdWatch(settings, CLUSTER) as watch:
        registration.announce(one := record(name, instance))
        wait_for(lambda: one in watch.view().nodes, f"{name} registered")
        yield registration


def names(view):
    return [node.name for node in view.nodes]


def sees(watch, *expected):
    return lambda: names(watch.view()) == list(expected)


def becomes(watch, what):
    """Waits until the view is `stale`, or `fresh` again."""
    wait_for(lambda: (watch.view().stale_since is None) == (what == "fresh"), what)


def test_a_node_is_seen_once_it_registers_and_gone_once_it_leaves(etcd):
    endpoints = ("127.0.0.1:1", etcd.endpoint)  # the other one is tried
    with (
        EtcdWatch(etcd.settings(endpoints=endpoints), CLUSTER) as watch,
        EtcdWatch(etcd.settings(), CLUSTER + "-2") as other,
    ):
        assert watch.wait_synced(60)
        with registered(etcd, "prefill-0", endpoints=endpoints):
            wait_for(sees(watch, "prefill-0"), "the node is seen")
            assert watch.view().nodes[0] == record("prefill-0")
            assert other.wait_synced(60)
            assert names(other.view()) == [], "a cluster of another name"
        wait_for(sees(watch), "the node is gone")


def test_a_node_registers_again_when_its_lease_or_its_record_is_taken_away(etcd):
    seen = []  # it may be gone for a moment only
    with (
        registered(etcd, "a") as registration,
        watching(etcd, on_change=lambda view: seen.append(names(view))) as watch,
    ):
        wait_for(sees(watch, "a"), "seen")
        with closing(etcd.client()) as client:
            seen.clear()
            client.revoke_lease(registration._lease)
            wait_for(lambda: [] in seen, "gone")
            wait_for(sees(watch, "a"), "registered again")
            seen.clear()
            client.delete(prefix_of(CLUSTER) + "a")
            wait_for(lambda: [] in seen, "gone")
            wait_for(sees(watch, "a"), "registered again")


def test_a_name_that_is_used_twice_is_told_and_not_fought_over(etcd, caplog):
    with registered(etcd, "a", "first"), watching(etcd) as watch:
        with registered(etcd, "a", "second"):
            wait_for(lambda: "another process registered as a" in caplog.text, "the first one logs it")
            assert [node.instance for node in watch.view().nodes] == ["second"]
        wait_for(lambda: [node.instance for node in watch.view().nodes] == ["first"], "the first one is back")


# --- outages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wiped", [True, False], ids=["killed and wiped", "stopped for longer than the lease"]
)
def test_an_outage_changes_nothing_but_the_mark_and_is_repaired(wiped, make_etcd):
    etcd = make_etcd().start()
    views = []
    with (
        registered(etcd, "a"),
        registered(etcd, "b") as leaves,
        watching(etcd, on_change=views.append) as watch,
    ):
        wait_for(sees(watch, "a", "b"), "both seen")
        views.clear()
        etcd.send(signal.SIGKILL if wiped else signal.SIGSTOP)
        becomes(watch, "stale")
        assert sees(watch, "a", "b")()
        leaves.close()  # while etcd is away
        if wiped:
            etcd.stop()
            etcd.wipe()
            etcd.start()
        else:
            end = time.monotonic() + 2.5
            wait_for(lambda: time.monotonic() > end, "the leases to run out")
            etcd.send(signal.SIGCONT)
        becomes(watch, "fresh")
        wait_for(lambda: sees(watch, "a")() and not watch.view().doubted, "the view is repaired")
        assert all("a" in names(view) for view in views), "a node that was alive was never dropped"


@pytest.mark.parametrize("after", ["a compaction", "a login that etcd has forgotten"])
def test_a_watch_and_a_registration_go_on_after(after, make_etcd):
    etcd = make_etcd().start()
    if after != "a compaction":
        etcd.enable_users(CLUSTER)
    with watching(etcd) as watch, registered(etcd, "a"):
        wait_for(sees(watch, "a"), "seen")
        etcd.stop()
        becomes(watch, "stale")
        etcd.start()
        if after == "a compaction":
            with closing(etcd.client()) as client:
                for value in "123":
                    client.put("/elsewhere", value)
                client.compact(client.get("/elsewhere")[1].mod_revision)
        becomes(watch, "fresh")
        with registered(etcd, "b"):
            wait_for(sees(watch, "a", "b"), "news arrive")


def test_with_etcd_away_at_the_start_the_nodes_of_the_file_count(make_etcd):
    etcd = make_etcd()
    with watching(etcd, seeds=[record("a")]) as watch, closing(EtcdRegistration(etcd.settings(), CLUSTER)) as late:  # fmt: skip
        late.announce(record("b"))
        becomes(watch, "stale")
        assert names(watch.view()) == ["a"]
        etcd.start()
        wait_for(lambda: "b" in names(watch.view()), "who registers is seen")
        wait_for(sees(watch, "b"), "who does not is dropped after the grace")


def test_closing_with_etcd_away_takes_no_longer_than_a_call(make_etcd):
    etcd = make_etcd().start()
    with watching(etcd), registered(etcd, "a"):
        etcd.send(signal.SIGSTOP)
        started = time.monotonic()
    assert time.monotonic() - started < 60, "a bound, not a measurement"


# --- what others write --------------------------------------------------------------------------------------


UNREADABLE = {
    "absurd": (record("absurd").encode().replace(b'"kv_tokens":0', b'"kv_tokens":1e999'), "out of range"),
    # together more than a message of gRPC
    **{f"large-{n}": (b" " * 1_400_000, "truncated") for n in range(4)},
    "nested": (b'{"namespace": ' + b"[" * 60_000, "nested|object"),
    "other": (record("z").encode(), "it says that its node is z"),
    "path": (b'{"name": "path", "role": "master", "address": "ipc:///etc"}', "host:port"),
    "schema": (b'{"name": "schema", "role": ["prefill"], "address": {}}', "Expected `str`"),
    "text": (b'{"name": "text", "role": "prefill", "address": "http://h:1", "model": "\xff"}', "UTF-8"),
}


def test_unreadable_records_concern_the_nodes_of_their_names_only(etcd, caplog):
    with ExitStack() as stack:
        client = stack.enter_context(closing(etcd.client()))
        stack.enter_context(registered(etcd, "a"))
        follows = stack.enter_context(watching(etcd))
        wait_for(sees(follows, "a"), "seen")
        for name, (value, _) in UNREADABLE.items():
            client.put(prefix_of(CLUSTER) + name, value)
        lists = stack.enter_context(watching(etcd))
        assert lists.wait_synced(60)
        for name, (_, why) in UNREADABLE.items():
            line = re.compile(rf"{name} in etcd is left out: .*({why})")
            wait_for(lambda: len(line.findall(caplog.text)) >= 2, f"both say so of {name}")  # noqa: B023 - called at once
        stack.enter_context(registered(etcd, "b"))  # beside them
        stack.enter_context(registered(etcd, "text"))  # in the place of one
        for watch in (follows, lists):
            wait_for(sees(watch, "a", "b", "text"), "the other two, and the repaired one")
        for name in UNREADABLE:
            client.delete(prefix_of(CLUSTER) + name)
    assert "does not answer" not in caplog.text
    assert "Traceback" not in caplog.text


def test_neither_megabytes_of_junk_nor_thousands_of_records_hide_a_node(make_etcd):
    etcd = make_etcd().start()
    with closing(etcd.client()) as client, registered(etcd, "a"):
        for number in range(84):
            client.put(f"{prefix_of(CLUSTER)}junk-{number}", b"x" * 1_000_000)
        for first in range(0, 4200, 100):
            puts = [
                client.transactions.put(
                    f"{prefix_of(CLUSTER)}n{number}", msgspec.json.encode(record(f"n{number}"))
                )
                for number in range(first, first + 100)
            ]
            client.transaction(compare=[], success=puts, failure=[])
        with watching(etcd) as watch:
            assert watch.wait_synced(60)
            view = watch.view()
            assert len(view.nodes) == 4201
            assert "a" in names(view)


# --- users and TLS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("users, tls", [(True, "plain"), (False, "mutual tls"), (True, "tls")])
def test_every_way_to_reach_etcd(users, tls, make_etcd, certificates):
    own = certificates["client"] if tls == "mutual tls" else (None, None)
    config = (
        None
        if tls == "plain"
        else TlsConfig(ca_file=certificates["ca"][0], cert_file=own[0], key_file=own[1])
    )
    etcd = make_etcd(tls=config, server=certificates["server"]).start()
    if users:
        etcd.enable_users(CLUSTER)
    with watching(etcd) as watch:
        with registered(etcd, "a"):
            wait_for(sees(watch, "a"), "seen")
        wait_for(sees(watch), "gone")


def test_a_wrong_password_is_told_and_nothing_ends(make_etcd, caplog, tmp_path):
    etcd = make_etcd().start()
    etcd.enable_users(CLUSTER)
    (tmp_path / "password").write_text("wrong")
    with watching(etcd, seeds=[record("a")]) as watch:
        wait_for(lambda: "authentication failed" in caplog.text, "the log says so")
        assert names(watch.view()) == ["a"]
    assert PASSWORD not in caplog.text


def test_a_server_that_another_authority_signed_is_not_believed(make_etcd, certificates, tmp_path):
    config = TlsConfig(ca_file=certificates["ca"][0])
    etcd = make_etcd(tls=config, server=certificates["server"]).start()
    stranger = TlsConfig(ca_file=make_certificates(tmp_path)["ca"][0])
    with EtcdWatch(etcd.settings(tls=stranger), CLUSTER) as watch:
        becomes(watch, "stale")
        assert not watch.wait_synced(0)


def test_a_password_file_that_cannot_be_read_is_told_at_once(tmp_path):
    settings = EtcdDiscovery(endpoints=("127.0.0.1:1",), user="a", password_file=str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"discovery\.password_file: .*none"):
        EtcdWatch(settings, CLUSTER)
