"""A cluster whose nodes find one another in etcd: they join, leave, die and differ; etcd itself goes and
comes."""

import random
import re
import signal
import sys
from contextlib import ExitStack, closing

import msgspec
import pytest

from launch.discovery import Member, find_master
from launch.discovery.etcd import prefix_of
from launch.doctor.report import DoctorReport, Verdict
from pd_cache.cluster import ClusterConfig, MasterNode, MastersConfig, StoreNode
from pd_cache.cluster.checks import consistency_problems
from pd_cache.errors import ConfigError
from tests.support.cli import cli, cli_json
from tests.support.cluster import CHUNK, cluster_file, complete, fetched, free_node, metric_at, started
from tests.support.etcd import Etcd
from tests.support.needs import needs_etcd
from tests.support.pool import Node
from tests.support.waiting import wait_for
from transfer.settings import Timeouts, TransferSettings, mooncake_version

pytestmark = [pytest.mark.slow(seconds=100), needs_etcd]
TTL_S = 4  # a machine is not so busy that a node does not get to renew its lease
QUICK = TransferSettings(timeouts=Timeouts(get_ms=1000, put_ms=1000))


@pytest.fixture(scope="module")
def own_etcd(tmp_path_factory):
    etcd = Etcd(tmp_path_factory.mktemp("etcd"))
    try:
        yield etcd.start()
    finally:
        etcd.stop()


def discovery(etcd):
    return {"kind": "etcd", "endpoints": [etcd.endpoint], "ttl_s": TTL_S}


@pytest.fixture(scope="module")
def cluster(own_etcd, tmp_path_factory):
    """The proxy looks into the pool before it asks a prefill node."""
    folder = tmp_path_factory.mktemp("cluster")
    with started(folder, discovery=discovery(own_etcd), proxy={}) as running:
        wait_for(
            lambda: len(health(running)["decode"]) == len(health(running)["prefill"]) == 1, "the proxy's view"
        )
        yield running


def joined(etcd, folder, name, **changes):
    """One more prefill node, of a file that knows nobody else."""
    options = {"discovery": discovery(etcd), "nodes": [free_node(name)], **changes}
    return Node("prefill", name, cluster_file(folder, **options))


def health(cluster):
    return fetched(f"{cluster.urls['proxy']}/health").body


def elsewhere(etcd, folder):
    """The file of a machine that names nobody of the cluster."""
    (folder / "elsewhere").mkdir(exist_ok=True)
    nodes = [{"name": "here", "role": "store", "segment_size": "16MiB"}]
    return cluster_file(folder / "elsewhere", discovery=discovery(etcd), nodes=nodes)


def handoffs(cluster, result):
    return metric_at(cluster.urls["proxy"], "pd_cache_proxy_handoffs_total", result=result)


def ask(cluster, length=3 * CHUNK + 5, seed=None):
    rng = random.Random(seed)
    return complete(cluster.urls["proxy"], [rng.randrange(512) for _ in range(length)])


def test_a_node_joins_at_once_and_leaves_when_it_is_told_to(cluster, own_etcd, tmp_path):
    with joined(own_etcd, tmp_path, "prefill-1") as node:  # it found the master in etcd
        wait_for(lambda: health(cluster)["prefill"].get(node.address), "the node is routed to")
        handed_over = handoffs(cluster, "handed_over")
        for _ in range(4):
            assert ask(cluster).status == 200
        assert handoffs(cluster, "handed_over") == handed_over + 4
        assert metric_at(node.address, "pd_cache_tokens_total", op="store", outcome="stored") > 0
        assert re.search(r"request [0-9a-f]{32}: 200 in", "".join(node.errors)), (
            "the proxy's id is in the node's log"
        )
        node.send(signal.SIGTERM)
        answers = [ask(cluster)]
        wait_for(
            lambda: answers.append(ask(cluster)) or node.address not in health(cluster)["prefill"], "it left"
        )
        assert {answer.status for answer in answers} == {200}


def test_chunks_are_removed_on_a_machine_whose_file_names_no_master(cluster, own_etcd, tmp_path):
    assert ask(cluster).status == 200
    done = cli("pool", "rm", "tiny", "--yes", "-c", elsewhere(own_etcd, tmp_path))
    assert int(done.stdout.removesuffix(" objects removed\n")) > 0


@pytest.mark.usefixtures("patient")
def test_a_node_that_differs_is_shown_with_what_differs_and_one_that_dies_is_dropped_once_its_ttl_is_over(
    cluster, own_etcd, tmp_path
):
    with joined(own_etcd, tmp_path, "prefill-2", cache={"chunk_size": 2 * CHUNK}) as node:
        wait_for(lambda: node.address in health(cluster)["prefill"], "the node is routed to")
        expected = f"chunk_size {2 * CHUNK} here, {CHUNK} on decode-0: these nodes never share hits"
        wait_for(
            lambda: health(cluster)["differences"] == {"prefill-2": expected}, "the difference is reported"
        )
        told = cli_json("status", "-c", elsewhere(own_etcd, tmp_path), code=1)["nodes"]
        assert {one["name"]: one["difference"] for one in told if one["difference"]} == {
            "prefill-2": expected
        }
        report = msgspec.convert(
            cli_json("doctor", "-c", elsewhere(own_etcd, tmp_path), code=1), DoctorReport
        )
        found = [
            (one.check, one.about, one.found) for one in report.findings if one.verdict is Verdict.BROKEN
        ]
        assert found == [("cluster.fingerprint", "prefill-2", expected)]
        transfer = next(one for one in report.findings if one.check == "transfer.segment")
        assert transfer.verdict is Verdict.OK, "the master was found in etcd"
        node.kill()
        for _ in range(4):
            assert ask(cluster).status == 200
        wait_for(lambda: node.address not in health(cluster)["prefill"], "the dead node is dropped")
        assert health(cluster)["differences"] == {}


VLLM = """#!{python}
import os, pathlib, signal, sys, time
from launch.run.health_server import Response, serving
from launch.run.supervise import stop_on_signals
from pd_cache.chunks import Namespace
from pd_cache.vllm.files import write_about

flags = dict(flag.split("=", 1) for flag in sys.argv[3:])
write_about(pathlib.Path(os.environ["PD_CACHE_NAMESPACE_FILE"]), [Namespace(
    model="some", kv_dtype="float32", layout="l", layers=1, block_size=16, page_bytes=64, chunk_size=32, shards=1, hash_mode="blocks"
)], 4096)
with stop_on_signals() as stop, serving("127.0.0.1", int(flags["--port"]), lambda *_: Response(200, b""), 64):
    stop.wait()
    while not pathlib.Path(__file__).with_name("done").exists():
        time.sleep(0.02)  # what it has begun
"""


@pytest.mark.usefixtures("patient")
def test_a_vllm_node_registers_with_the_namespace_of_its_connector_and_leaves_before_vllm_ends(
    cluster, own_etcd, tmp_path
):
    executable = tmp_path / "vllm"
    executable.write_text(VLLM.format(python=sys.executable))
    executable.chmod(0o755)
    engine = {"kind": "vllm", "model": "some/model", "name": "tiny", "executable": str(executable)}
    with joined(own_etcd, tmp_path, "prefill-3", engine=engine) as node:
        wait_for(lambda: health(cluster)["prefill"].get(node.address), "the node is routed to")
        # it shares no hit with the others
        told = cli_json("status", "-c", elsewhere(own_etcd, tmp_path), code=1)
        found = next(one for one in told["nodes"] if one["name"] == "prefill-3")
        assert (found["model"], found["state"], found["capacity"]["kv_tokens"]) == ("tiny", "up", 4096)
        assert found["mooncake"] == mooncake_version(), "what the connector has written"
        assert "hash_mode blocks here, tokens on decode-0" in health(cluster)["differences"]["prefill-3"]
        node.send(signal.SIGTERM)
        try:
            wait_for(lambda: node.address not in health(cluster)["prefill"], "it left before it ended")
            assert node.process.poll() is None
        finally:
            executable.with_name("done").touch()


def test_status_is_not_well_while_nobody_can_say_who_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.watch.asker.SYNC_S", 0.5)  # for an etcd that nobody answers for
    file = cluster_file(tmp_path, discovery={"kind": "etcd", "endpoints": ["127.0.0.1:1"]})
    found = cli_json("status", "-c", file, code=1)
    assert (
        found["discovery"] == "etcd, which does not answer: no node is known, because the file gives no port"
    )
    assert (found["well"], found["nodes"]) == (False, []), "every port of the file is one that `up` chooses"


def test_what_a_request_stored_is_found_by_queries_for_every_node_that_could_load_it(cluster):
    tokens = [number % 500 for number in range(3 * CHUNK + 10)]

    def there():
        answer = fetched(f"{cluster.urls['proxy']}/query", {"token_ids": tokens})
        hits = answer.body.get("default", {})  # 503 until the nodes have said how they name their chunks
        return int(hits["prefill-0"]["CPU"]) if "prefill-0" in hits else -1

    wait_for(lambda: there() == 0, "nothing is stored")
    assert complete(cluster.urls["proxy"], tokens).status == 200
    wait_for(lambda: there() == 3 * CHUNK, "the pool has it")


def test_a_prompt_that_the_pool_holds_needs_no_prefill_node(cluster):
    first = ask(cluster, seed=1)
    before = handoffs(cluster, "in_pool")
    again = []
    # the proxy's own client may have to find the pool first
    wait_for(lambda: again.append(ask(cluster, seed=1)) or handoffs(cluster, "in_pool") > before, "a hit")
    assert again[-1].tokens == first.tokens
    assert again[-1].cached == (0, 3 * CHUNK), "the decode node took it from the pool by itself"
    assert ask(cluster, length=CHUNK - 1).status == 200
    assert handoffs(cluster, "short") == 1
    text = "The pool holds this text, too. " * 20
    before = handoffs(cluster, "in_pool")
    answers = [complete(cluster.urls["proxy"], text) for _ in range(2)]
    assert handoffs(cluster, "in_pool") == before + 1, "the second time; a node told its tokens"
    assert answers[0].tokens == answers[1].tokens


def test_etcd_hangs_for_longer_than_every_lease_and_serving_does_not_notice(cluster, own_etcd):
    before = health(cluster)
    own_etcd.send(signal.SIGSTOP)
    try:
        wait_for(
            lambda: health(cluster)["discovery_stale_s"] > TTL_S, "the view is stale, and every lease over"
        )
        assert ask(cluster).status == 200
    finally:
        own_etcd.send(signal.SIGCONT)
    seen = [health(cluster)]
    wait_for(lambda: seen.append(health(cluster)) or seen[-1]["discovery_stale_s"] == 0, "fresh again")
    wait_for(lambda: len(_registered(own_etcd)) == 5, "all registered again")
    seen.append(health(cluster))
    for key in ("prefill", "decode"):
        assert all(one[key] == before[key] for one in seen), "nobody was dropped meanwhile"
    assert ask(cluster).status == 200


def test_what_elected_masters_promise_is_found_where_the_file_names_none(make_etcd):
    etcd = make_etcd().start()
    config = ClusterConfig(
        name="test",
        discovery=etcd.settings(),
        masters=MastersConfig(ha=True),
        nodes=(StoreNode(name="s", segment_size="64MiB"),),
    )
    with pytest.raises(
        ConfigError, match=r"no master of the cluster test registered in etcd .* within 0\.1 s"
    ):
        find_master(config, 0.1)
    with ExitStack() as stack:
        for number, lease_ttl_ms in enumerate((20_000, 3_000)):
            master = MasterNode(name=f"m{number}", port=50051 + number, lease_ttl_ms=lease_ttl_ms)
            member = stack.enter_context(Member(config, master))
            member.announce(f"10.0.0.1:{master.port}")
        wait_for(lambda: _registered(etcd) == ["m0", "m1"], "both registered")
        found = find_master(config, 5)
    assert (found.lease_ttl_ms, len(found.by_role("master"))) == (3_000, 2)
    assert found.master_address == config.master_address, "clients still follow the election"
    assert not list(consistency_problems(msgspec.structs.replace(found, transfer=QUICK)))


def _registered(etcd):
    prefix = prefix_of("test")
    with closing(etcd.client()) as client:
        return sorted(kv.key.decode().removeprefix(prefix) for kv in client.get_prefix_response(prefix).kvs)
