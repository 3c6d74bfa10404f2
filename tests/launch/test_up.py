"""Which nodes run here, on which ports, and how they start."""

import json
import platform
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.run import up
from launch.run.supervise import StopFlag
from pd_cache.cluster import DecodeNode, ProxyNode, StoreNode, read_config
from pd_cache.cluster.machine import local_nodes
from pd_cache.errors import ConfigError
from tests.pd_cache.cluster.test_machine import ELSEWHERE, cluster
from tests.support.cluster import cluster_file, free_node


def test_port_zero_becomes_a_free_port_for_each_local_node_and_others_stay():
    here = [DecodeNode(name="a"), DecodeNode(name="b"), DecodeNode(name="c", port=7)]
    whole = cluster(*here, DecodeNode(name="d", host=ELSEWHERE))
    assert local_nodes(whole) == list(whole.nodes[:4])
    with up.chosen_ports(whole, local_nodes(whole)) as config:
        chosen = [config.master.port, config.master.metrics_port, *(node.port for node in config.nodes[1:3])]
    assert all(chosen)
    assert len(set(chosen)) == 4
    assert [node.port for node in config.nodes[3:]] == [7, 0]


def test_while_up_runs_no_other_program_is_given_the_port_of_a_node_that_does_not_run(tmp_path):
    stop = StopFlag()
    stop.set()  # after the master, no node is started
    file = cluster_file(tmp_path, nodes=[free_node("master"), free_node("decode-0")])
    with up.running(*read_config(file), stop=stop) as cluster:
        address = "127.0.0.1", cluster.config.by_role("decode")[0].port
        with socket.socket() as another, pytest.raises(OSError, match="in use"):
            another.bind(address)
        for _ in ("started", "started again"):
            socket.create_server(address).close()  # as the node does


def test_when_all_nodes_are_ready_up_says_where_to_look_and_what_to_try():
    config = cluster(DecodeNode(name="d"), ProxyNode(name="p"), DecodeNode(name="e", host=ELSEWHERE))
    supervisor = SimpleNamespace(ready_urls={"master": "", "d": "http://h:1", "p": "http://h:2"})
    lines = up.welcome(up.LocalCluster(config, supervisor), Path("c.yaml")).splitlines()
    assert lines[0] == "all 3 nodes of this machine are ready"
    assert lines[1] == "watch http://h:2/ui in a browser, or: pd-cache top -c c.yaml"
    command = ["bash", "-c", lines[-1].replace("curl -s", "printf '%s\n'")]
    body = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1]
    assert json.loads(body) == {"model": "m", "max_tokens": 4, "prompt": list(range(1, 1001))}
    supervisor.ready_urls = {"d": "http://h:1"}
    assert (
        up.welcome(up.LocalCluster(config, supervisor), Path("c.yaml"))
        == "all 1 nodes of this machine are ready"
    )


def test_the_node_to_launch_is_the_named_one_or_the_only_one_here():
    config = cluster(
        DecodeNode(name="a"),
        DecodeNode(name="b", host=ELSEWHERE),
        StoreNode(name="s", segment_size=1),
    )
    assert up.pick_node(config, "decode", None).name == "a"
    assert up.pick_node(config, "decode", "b").name == "b"
    twice = cluster(DecodeNode(name="a"), DecodeNode(name="b"))
    for file, role, name, told in (
        (
            config,
            "decode",
            "s",
            r"expected the name of a decode node \(a, b\), got s",
        ),
        (config, "prefill", None, "expected one prefill node, but the file has none"),
        (
            twice,
            "decode",
            None,
            "one decode node on this machine, got 2; the file has: a, b; say which with --node",
        ),
    ):
        with pytest.raises(ConfigError, match=told):
            up.pick_node(file, role, name)


def test_nodes_log_details_if_up_does(caplog):
    for level, details in (("INFO", 0), ("DEBUG", 1)):
        caplog.set_level(level, "launch.run.up")
        assert up.program_of(ProxyNode(name="p"), Path("c.yaml")).argv.count("-v") == details


@pytest.mark.parametrize(
    "enabled, own, libc, gets",
    [
        ("always [madvise] never", {}, "glibc 2.36", True),
        ("[always] madvise never", {}, "glibc 2.35", True),
        ("always madvise [never]", {}, "glibc 2.36", False),
        (None, {}, "glibc 2.36", False),
        ("always [madvise] never", {"PYTHONMALLOC": "debug"}, "glibc 2.36", False),
        ("always [madvise] never", {"GLIBC_TUNABLES": "glibc.malloc.arena_max=2"}, "glibc 2.36", False),
        ("always [madvise] never", {}, "glibc 2.34", False),
    ],
)
def test_a_proxy_gets_huge_pages_if_there_are_any_and_this_environment_chooses_no_allocator(
    tmp_path, monkeypatch, enabled, own, libc, gets
):
    if enabled is not None:
        (tmp_path / "enabled").write_text(enabled)
    for name in ("PYTHONMALLOC", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(up, "_WHEN_HUGE", tmp_path / "enabled")
    monkeypatch.setattr(platform, "libc_ver", libc.split)
    assert bool(up.program_of(ProxyNode(name="p"), Path("c.yaml")).env) == gets
    assert up.program_of(DecodeNode(name="d"), Path("c.yaml")).env is None


def test_a_role_raises_the_soft_limit_of_open_files_to_the_hard_one():
    program = "import launch.run.roles as r, resource as s; r.raise_limit_of_files(); print(*s.getrlimit(s.RLIMIT_NOFILE))"
    command = f"ulimit -Sn 300 && ulimit -Hn 777 && exec {sys.executable} -c '{program}'"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["777", "777"]
