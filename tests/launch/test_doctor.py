"""`pd-cache doctor` on real clusters: healthy ones, and each with one thing broken."""

import signal
from pathlib import Path

import msgspec
import pytest
import yaml

from launch.doctor.probe import PREFIX, probe_findings
from launch.doctor.report import DoctorReport, Verdict
from launch.masters import Segment, segments_at
from pd_cache.cluster import load_config
from tests.support.cli import cli, cli_json
from tests.support.cluster import broken, examined, nodes_of_every_role, started
from transfer import MooncakeStore
from transfer.store import Pending, load_mooncake

pytestmark = pytest.mark.slow(seconds=70)


def doctor(*arguments, code=1):
    return msgspec.convert(cli_json("doctor", *arguments, code=code), DoctorReport)


def of(report, check):
    """The findings of one check, by what they are about."""
    return {finding.about: finding for finding in report.findings if finding.check == check}


def keys_of_doctors(pool):
    return [key for key in pool.ask("/get_all_keys").split() if key.startswith(PREFIX)]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """The file of a healthy cluster that no test of this module breaks."""
    folder = tmp_path_factory.mktemp("cluster")
    with started(folder, nodes=nodes_of_every_role()):
        yield folder / "cluster.yaml"


def changed(file, folder, section, **keys):
    """A file of the same cluster with other keys in a section."""
    tree = yaml.safe_load(file.read_text())
    tree[section] |= keys
    (folder / "changed.yaml").write_text(yaml.safe_dump(tree))
    return folder / "changed.yaml"


@pytest.mark.usefixtures("patient")
def test_a_healthy_cluster_is_told_to_be_one_by_every_check_in_a_table_that_fits_its_terminal(
    file, monkeypatch
):
    report = doctor("-c", file, code=0)
    assert (report.broken, broken(report), report.file) == (0, set(), str(file))
    assert {"decode-0", "prefill-0", "proxy", "master", "store-0", "cache-0"} == set(
        of(report, "cluster.node")
    )
    (transfer,) = of(report, "transfer.segment").values()
    assert transfer.verdict is Verdict.OK
    assert transfer.found.startswith("56.0 MiB: put "), "what fits below the watermark"
    assert "every byte right" in transfer.found
    monkeypatch.setenv("COLUMNS", "80")
    shown = cli("doctor", "-c", file).stdout
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert "transfer.segment" in shown
    assert shown.splitlines()[-1].startswith("nothing is broken: ")


@pytest.mark.usefixtures("patient")
def test_without_a_file_only_this_machine_is_looked_at():
    report = doctor(code=None)
    subjects = {finding.check.split(".")[0] for finding in report.findings}
    assert subjects == {"libraries", "rdma", "memory", "cluster"}
    assert of(report, "cluster")[""].verdict is Verdict.SKIPPED
    assert report.file is None


def test_of_a_cluster_that_does_not_run_one_finding_says_so_and_nothing_else_is_tried(make_pool):
    pool = make_pool().start()
    pool.kill("master")
    report = doctor("-c", pool.file)
    assert broken(report) == {("cluster.node", "")}
    found = of(report, "cluster.node")[""]
    assert found.found.startswith("no node of this cluster answers:")
    assert found.repair.startswith(f"start it: pd-cache up -c {pool.file};")
    assert not {"cluster.pool", "transfer.segment"} & {one.check for one in report.findings}


def test_a_stopped_store_node_breaks_its_segment_within_the_deadline_and_the_process_ends(make_pool):
    pool = make_pool(client_ttl_s=60, segment="64MiB").start("master", "store-0", "store-1")
    pool.nodes["store-0"].send(signal.SIGSTOP)
    report = examined(pool.file)
    assert broken(report) == {("transfer.segment", pool.segment(0))}
    assert "every byte right" in of(report, "transfer.segment")[pool.segment(1)].found


@pytest.mark.usefixtures("patient")
def test_rdma_without_a_device_is_broken_and_nothing_runs_over_tcp_instead(file, tmp_path):
    if Path("/sys/class/infiniband").is_dir():
        pytest.skip("this machine has RDMA devices")
    report = doctor("-c", changed(file, tmp_path, "transfer", protocol="rdma"))
    assert ("rdma.devices", "") in broken(report)
    assert of(report, "transfer.segment")[""].verdict is Verdict.SKIPPED


@pytest.mark.usefixtures("patient")
def test_a_full_segment_is_a_warning_and_nobodys_chunks_are_evicted_for_it(make_pool):
    pool = make_pool(segment="32MiB").start()
    pinned = load_mooncake().ReplicateConfig()
    pinned.with_hard_pin = True
    with pool.bare_client() as client:
        stored = [
            key for key in (f"k{index}" for index in range(8)) if client.put(key, bytes(4 << 20), pinned) == 0
        ]
    assert len(stored) > 6
    report = doctor("-c", pool.file, code=None)
    finding = of(report, "transfer.segment")[pool.segment(0)]
    assert (finding.verdict, "not measured: it has no room" in finding.found) == (Verdict.WARNING, True)
    assert set(pool.ask("/get_all_keys").split()) == set(stored)


def _probe(pool, segments=None):
    segments = segments or segments_at(pool.metrics)
    return list(probe_findings(load_config(pool.file), segments, pool.address, pool.metrics))


def test_what_a_probe_put_is_removed_when_it_is_interrupted(pool, monkeypatch):
    seen = []

    def stopped(*_, **__):
        seen.extend(keys_of_doctors(pool))
        raise KeyboardInterrupt

    monkeypatch.setattr(MooncakeStore, "start_get", stopped)
    with pytest.raises(KeyboardInterrupt):
        _probe(pool)
    assert len(seen) == 16
    assert keys_of_doctors(pool) == []
    monkeypatch.undo()
    results, interrupts = Pending.results, iter([KeyboardInterrupt])

    def interrupted(pending):
        for error in interrupts:
            raise error
        return results(pending)

    monkeypatch.setattr(Pending, "results", interrupted)
    with pytest.raises(KeyboardInterrupt):
        _probe(pool)
    assert keys_of_doctors(pool) == [], "though the put was under way"


@pytest.mark.usefixtures("patient")
def test_bytes_that_come_back_changed_are_broken(pool, monkeypatch):
    get = MooncakeStore.start_get

    def damaged(store, keys, slots, end):
        pending = get(store, keys, slots, end)
        pending.results()
        slots[3].view[100] ^= 1
        return pending

    monkeypatch.setattr(MooncakeStore, "start_get", damaged)
    (finding,) = _probe(pool)
    assert finding.verdict is Verdict.BROKEN
    assert "other bytes" in finding.found


@pytest.mark.usefixtures("patient")
def test_an_object_that_landed_elsewhere_does_not_count_for_the_segment(pool):
    # Mooncake ignores a segment that it does not know
    nobody = Segment("127.0.0.1:9", 256 << 20, "127.0.0.1:9")
    (finding,) = _probe(pool, [nobody])
    assert finding.verdict is Verdict.WARNING
    assert "16 of 16 objects landed in other segments" in finding.found
