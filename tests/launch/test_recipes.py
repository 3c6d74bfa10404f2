"""The files of docs/recipes.md: the largest starts as far as CPUs go, its nodes find one another, and a
prompt that comes again is a hit. Without what only GPUs take, the others are parts of it."""

import contextlib
import re
import subprocess
import sys

import pytest
import yaml

from launch.cli import example_file
from launch.run.up import running
from launch.watch.asker import cluster_status
from pd_cache.cluster import load_config, read_config
from pd_cache.cluster.machine import find_program
from tests.support.cli import cli, cli_json, printed
from tests.support.cluster import CHUNK, ENGINE, cluster_file, complete, free_node, started
from tests.support.pool import ROOT, Node, free_port
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow(seconds=60)

_GPUS = ("args", "env", "events_port", "lease_ttl_ms")
"""What only vLLM takes, and a lease for reads that are shorter than those of a busy machine."""


def on_this_machine(node):
    """The node of a file here, on free ports and with little memory."""
    free = {key: 0 for key in ("port", "metrics_port") if key in node}
    small = {"segment_size": "64MiB"} if "segment_size" in node else {}
    return (
        {key: value for key, value in node.items() if key not in _GPUS} | {"host": "127.0.0.1"} | free | small
    )


def recipe(name):
    """A file of configs/; `one-gpu` is `cluster` with what docs/recipes.md puts in place of its sections."""
    tree = yaml.safe_load(example_file("cluster" if name == "one-gpu" else name).read_text())
    if name == "one-gpu":
        page = (ROOT / "docs" / "recipes.md").read_text()
        page = page.partition("## One GPU a machine")[2].partition("\n## ")[0]
        (sections,) = re.findall(r"^```yaml\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
        tree |= yaml.safe_load(sections)
    return tree


def test_nodes_of_two_tensor_parallel_sizes_cut_chunks_alike_and_a_recipe_of_one_gpu_a_machine_not_at_all(
    tmp_path,
):
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(recipe("one-gpu")))
    assert load_config(tmp_path / "cluster.yaml").shards == 1
    assert load_config(example_file("cluster")).shards == 8


def test_the_nodes_of_the_largest_recipe_share_a_prompt(tmp_path):
    nodes = recipe("cluster")["nodes"]
    with started(tmp_path, nodes=[on_this_machine(node) for node in nodes], engine=ENGINE) as cluster:
        prompt = list(range(4 * CHUNK + 9))
        answers = [complete(cluster.urls["proxy"], prompt) for _ in range(2)]
    assert [answer.cached for answer in answers] == [(0, 4 * CHUNK), (4 * CHUNK, 4 * CHUNK)]


def test_two_engines_of_ones_own_share_a_pool_and_mooncake_says_nothing(tmp_path):
    tree = yaml.safe_load(example_file("pool").read_text())
    tree["nodes"] = [on_this_machine(node) for node in tree["nodes"]]
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump(tree))
    with running(*read_config(tmp_path / "pool.yaml")) as cluster:
        command = f"{sys.executable} {ROOT}/examples/embed_engine.py {cluster.config.master_address} 2>&1"
        assert printed("bash", "-c", command) in (ROOT / "examples" / "README.md").read_text()


def test_an_existing_mooncake_cluster_serves_whose_master_nobody_of_ours_has_started(tmp_path, make_pool):
    """docs/migrate.md: nothing but Mooncake's own ports is asked of the master."""
    port, metrics = free_port(), free_port()
    program = find_program("mooncake_master")
    master = subprocess.Popen(
        [program, f"--rpc_port={port}", f"--metrics_port={metrics}"], stderr=subprocess.DEVNULL
    )
    roles = ("prefill", "decode", "proxy")
    nodes = [
        free_node("master", port=port, metrics_port=metrics),
        *(free_node(role, port=free_port(), segment_size="64MiB") for role in roles[:2]),
        free_node("proxy", port=free_port()),
    ]
    file = cluster_file(tmp_path, nodes=nodes)
    prompt = list(range(4 * CHUNK + 9))
    try:
        with contextlib.ExitStack() as stack:
            running = {role: stack.enter_context(Node(role, role, file)) for role in roles}
            wait_for(
                lambda: all(row.state == "up" for row in cluster_status(load_config(file)).nodes),
                "every node up",
            )
            answers = [complete(running["proxy"].address, prompt) for _ in range(2)]
            assert [answer.cached for answer in answers] == [(0, 4 * CHUNK), (4 * CHUNK, 4 * CHUNK)]
            other = make_pool().start()
            cli("pool", "copy", "-c", file, "--to", other.file)
            cli("pool", "rm", "*", "-c", file, "--yes")
            cli("pool", "copy", "-c", other.file, "--to", file)
            assert complete(running["proxy"].address, prompt).cached == (4 * CHUNK, 4 * CHUNK)
            verified = cli_json("pool", "verify", "-c", file)
            assert (verified["objects"], verified["done"], verified["damaged"]) == (4, 4, {})
            cli("reset", "-c", file, "--all", "--version", "w1")
            assert complete(running["proxy"].address, prompt).cached == (0, 4 * CHUNK)
            (old, new) = sorted(cli_json("pool", "ls", "-c", file)["namespaces"], key=lambda one: one["name"])
            assert (old["current"], new["current"], new["name"]) == (False, True, f"{old['name']}.w1")
            cli("pool", "rm", "-c", file, "--old", "--yes")
            assert [one["name"] for one in cli_json("pool", "ls", "-c", file)["namespaces"]] == [new["name"]]
    finally:
        master.kill()
        master.wait()
