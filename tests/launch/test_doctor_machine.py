"""What the doctor makes of a machine: fabricated `/sys`, `/proc` and `/dev` trees, one thing wrong in
each."""

import socket

import msgspec
import pytest

import pd_cache
from launch.doctor.checks import library_findings, memory_finding, rdma_findings
from launch.doctor.probe import advertised_findings, cluster_findings, metadata_finding
from launch.doctor.report import Verdict
from launch.masters import LEADER, Segment
from launch.operate.status import status_table
from launch.watch.state import ClusterStatus, NodeStatus
from pd_cache.cluster import Capacity, ClusterConfig, NodeRecord
from pd_cache.cluster.machine import machine_memory
from tests.pd_cache.cluster.test_machine import GIB, write
from tests.support.cli import drawn
from transfer.settings import TransferSettings, decode_custom

RDMA = TransferSettings(protocol="rdma")
ROCE = "0000:0000:0000:0000:0000:ffff:0a00:0001"
LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
NOTHING = "fe80:0000:0000:0000:0000:0000:0000:0000"


def device(root, name="mlx5_0", *, state="4: ACTIVE", layer="Ethernet", gids):
    """An RDMA device with one port. `gids`: kind by GID, in their order."""
    port = f"sys/class/infiniband/{name}/ports/1"
    for key, value in {
        "state": state,
        "phys_state": "5: LinkUp",
        "link_layer": layer,
        "rate": "100 Gb/sec",
    }.items():
        write(root, f"{port}/{key}", value)
    for index, (gid, kind) in enumerate(gids.items()):
        write(root, f"{port}/gids/{index}", gid)
        write(root, f"{port}/gid_attrs/types/{index}", kind)
    write(root, "dev/infiniband/uverbs0", "")


def by_check(findings):
    """The worst of each check."""
    order = list(Verdict)
    return {
        finding.check: finding
        for finding in sorted(
            findings, key=lambda one: (one.verdict is Verdict.BROKEN, order.index(one.verdict))
        )
    }


def node(name, role="prefill", state="up", why="", difference="", **fields):
    record = NodeRecord(name=name, role=role, **{"address": "http://10.0.0.1:8100", **fields})
    return NodeStatus(record=record, state=state, why=why, difference=difference)


# --- libraries ----------------------------------------------------------------------------------------------


def test_the_wheel_of_this_environment_is_found_whole():
    found = list(library_findings())
    assert [finding for finding in found if finding.verdict is not Verdict.OK] == []
    assert {finding.check for finding in found} == {"libraries.wheel", "libraries.import"}


# --- rdma ---------------------------------------------------------------------------------------------------


def test_without_a_device_rdma_is_broken_where_the_file_wants_it_and_skipped_elsewhere(tmp_path):
    assert [one.verdict for one in rdma_findings(RDMA, tmp_path)] == [Verdict.BROKEN]
    assert [one.verdict for one in rdma_findings(TransferSettings(), tmp_path)] == [Verdict.SKIPPED]
    assert [one.verdict for one in rdma_findings(None, tmp_path)] == [Verdict.SKIPPED]


def test_a_roce_port_that_is_active_and_routable_is_well_if_a_container_has_the_verbs_devices(tmp_path):
    device(tmp_path, gids={LINK_LOCAL: "IB/RoCE v1", ROCE: "RoCE v2"})
    found = by_check(rdma_findings(RDMA, tmp_path))
    assert {finding.verdict for finding in found.values()} == {Verdict.OK}
    assert found["rdma.link"].found == "ACTIVE (LinkUp), Ethernet, 100 Gb/sec"
    assert "at index 1 (10.0.0.1)" in found["rdma.gids"].found
    (tmp_path / "dev/infiniband/uverbs0").unlink()
    finding = by_check(rdma_findings(RDMA, tmp_path))["rdma.verbs"]
    assert (finding.verdict, "--device=/dev/infiniband" in finding.repair) == (Verdict.BROKEN, True)


@pytest.mark.parametrize(
    "settings, port, check, verdict",
    [
        (RDMA, {"state": "1: DOWN"}, "rdma.link", Verdict.BROKEN),
        (None, {"state": "2: INIT"}, "rdma.link", Verdict.WARNING),
        (RDMA, {"gids": {}}, "rdma.gids", Verdict.BROKEN),
        (RDMA, {"gids": {NOTHING: "RoCE v2"}}, "rdma.gids", Verdict.BROKEN),
        (RDMA, {"gids": {ROCE: "IB/RoCE v1"}}, "rdma.gids", Verdict.BROKEN),
        (RDMA, {"layer": "InfiniBand", "gids": {LINK_LOCAL: "IB/RoCE v1"}}, "rdma.gids", Verdict.OK),
        (RDMA, {"layer": "InfiniBand", "gids": {}}, "rdma.gids", Verdict.BROKEN),
        (TransferSettings(protocol="rdma", devices=("mlx5_7",)), {}, "rdma.devices", Verdict.BROKEN),
    ],
)
def test_what_is_wrong_with_a_port_is_broken_with_rdma_and_a_warning_with_tcp(
    tmp_path, settings, port, check, verdict
):
    device(tmp_path, **{"gids": {ROCE: "RoCE v2"}, **port})
    assert by_check(rdma_findings(settings, tmp_path))[check].verdict is verdict


# --- memory -------------------------------------------------------------------------------------------------


def machine(root):
    sizes = {"MemTotal": 64 * GIB >> 10, "MemAvailable": 32 * GIB >> 10, "Hugepagesize": 2048}
    write(root, "proc/meminfo", "\n".join(f"{name}: {size} kB" for name, size in sizes.items()))
    return root


def stores(size):
    nodes = [{"name": "m", "role": "master"}, {"name": "s0", "role": "store", "segment_size": size}]
    return msgspec.convert({"nodes": nodes}, ClusterConfig, dec_hook=decode_custom)


def free(cluster, root, running=()):
    return memory_finding(cluster, cluster.nodes, set(running), root)


def test_what_others_use_of_the_memory_counts_until_the_node_runs(tmp_path):
    cluster, root = stores("40GiB"), machine(tmp_path)
    assert free(cluster, root).verdict is Verdict.BROKEN
    assert free(stores("30GiB"), root).verdict is Verdict.WARNING
    assert free(stores("8GiB"), root).verdict is Verdict.OK
    assert free(cluster, root, {"s0"}).verdict is Verdict.OK, "it has its memory already"


def test_a_cgroup_that_allows_less_than_the_machine_has_decides(tmp_path):
    root = machine(tmp_path)
    write(root, "proc/self/cgroup", "0::/pod/container")
    files = {"memory.max": 8 * GIB, "memory.current": 5 * GIB, "memory.stat": f"inactive_file {GIB}"}
    for name, value in files.items():
        write(root, f"sys/fs/cgroup/pod/{name}", str(value))  # of the parent
    assert machine_memory(root) == (8 * GIB, 4 * GIB, "its cgroup")
    assert free(stores("6GiB"), root).verdict is Verdict.BROKEN


# --- network ------------------------------------------------------------------------------------------------


def test_segments_given_out_as_loopback_are_broken_in_a_cluster_of_several_hosts():
    segments = [
        Segment("127.0.0.1:50052", GIB, "127.0.0.1:15001"),
        Segment("10.0.0.1:50052", GIB, "10.0.0.1:15001"),
    ]
    found = list(advertised_findings({"10.0.0.1", "10.0.0.2"}, segments))
    assert [one.about for one in found] == ["127.0.0.1:50052"]
    assert list(advertised_findings({"127.0.0.1"}, segments)) == []


def test_a_server_of_metadata_that_cannot_be_reached_is_broken():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        there = f"127.0.0.1:{listening.getsockname()[1]}"
        assert metadata_finding(f"etcd://{there}").verdict is Verdict.OK
        assert metadata_finding(f"http://{there}/metadata").verdict is Verdict.OK
    gone = metadata_finding(f"http://{there}/metadata")
    assert (gone.verdict, gone.about) == (Verdict.BROKEN, f"http://{there}/metadata")
    assert "Connection refused" in gone.found


# --- cluster ------------------------------------------------------------------------------------------------


def of_cluster(check, rows, **more):
    status = ClusterStatus("static", True, rows, **more)
    return [one for one in cluster_findings(status) if one.check == f"cluster.{check}"]


def test_nodes_of_another_version_are_a_warning():
    rows = [node("a", version="0.0.9"), node("b", version=pd_cache.__version__), node("c")]
    found = {one.about: one.verdict for one in of_cluster("version", rows)}
    assert found == {"a": Verdict.WARNING, "": Verdict.OK}


@pytest.mark.parametrize(
    "versions, verdict, found",
    [
        (("",), Verdict.SKIPPED, "no node reports its version of Mooncake"),
        (("0.3.13.post1", "", "0.3.14"), Verdict.OK, "0.3.13.post1, 0.3.14"),
        (("0.4.0", "0.4.0.post2"), Verdict.OK, "0.4.0, 0.4.0.post2"),
        (("0.3.13", "0.3.12.post1", "0.3.13"), Verdict.BROKEN, "Mooncake 0.3.12.post1 (b) beside 0.3.13 (a, c)"),
        (("0.3.14", "0.3.9", "0.4.0"), Verdict.BROKEN, "Mooncake 0.3.9 (b) beside 0.3.14 (a) beside 0.4.0 (c)"),
        (("0.3.14", "0.4.0") + ("0.4.0",) * 4, Verdict.WARNING, "Mooncake 0.3.14 (a) beside 0.4.0 (b, c, d, e and 1 more)"),
        (("0.3.11", "0.3.12"), Verdict.WARNING, "Mooncake 0.3.11 (a) beside 0.3.12 (b)"),
        (("0.3.13", "unknown"), Verdict.OK, "0.3.13, unknown"),
    ],
)  # fmt: skip
def test_versions_of_mooncake_that_fail_together_are_broken_and_untried_ones_a_warning(
    versions, verdict, found
):
    rows = [node("abcdefgh"[index], mooncake=version) for index, version in enumerate(versions)]
    status = ClusterStatus("static", True, rows)
    (finding,) = of_cluster("mooncake", rows)
    assert (finding.verdict, finding.found) == (verdict, found)
    assert status.problems == ([f"{found}: {finding.why}"] if verdict is Verdict.BROKEN else [])
    shown = " ".join(drawn(status_table(status)).split())
    assert (f"{found}: {finding.why}" in shown) is (verdict in (Verdict.BROKEN, Verdict.WARNING))
    assert status.well is (verdict is not Verdict.BROKEN)


@pytest.mark.parametrize("model, verdict", [("m", Verdict.BROKEN), ("other", Verdict.WARNING)])
def test_a_node_that_never_shares_a_hit_is_broken_unless_it_serves_another_model(model, verdict):
    rows = [
        node("a", model="m", fingerprint="1"),
        node("b", model="m", fingerprint="1"),
        node(
            "c",
            model=model,
            fingerprint="2",
            difference="chunk_size 64 here, 256 on a: these nodes never share hits",
        ),
    ]
    assert [(one.about, one.verdict) for one in of_cluster("fingerprint", rows)] == [("c", verdict)]


def test_a_node_that_is_down_is_to_be_started_and_one_that_is_not_well_is_not():
    rows = [
        node("a", state="down", why="refused"),
        node("b"),
        node("c", state="degraded", why="/health answers 503"),
        node("s", state="not asked", why="it has no metrics_port"),
    ]
    found = {one.about: (one.verdict, one.repair) for one in of_cluster("node", rows)}
    assert set(found) == {"a", "b", "c"}
    assert found["a"][0] is Verdict.BROKEN
    assert "pd-cache launch" in found["a"][1]
    assert found["b"] == (Verdict.OK, "")
    assert found["c"] == (Verdict.BROKEN, "look at its log, and at the other findings about it"), (
        "what answers is not to be ended"
    )


def test_memory_that_nodes_promise_and_the_pool_lacks_is_broken():
    store = node("s", "store", address="10.0.0.1:0", capacity=Capacity(segment_bytes=GIB))
    master = node("m", "master", address="10.0.0.1:50051")
    master.leads = LEADER
    given = (Segment("10.0.0.1:9", GIB, ""),)
    assert [one.verdict for one in of_cluster("pool", [master, store], segments=given)] == [Verdict.OK]
    (found,) = of_cluster("pool", [master, store], segments=())
    assert found.found == "m has 0 B of the 1.0 GiB that nodes give"
    assert found.repair.startswith("start the nodes that do not run")
