"""The command line: what it does, and how it refuses."""

import re
import shutil
import signal
import subprocess
import sys

import psutil
import pytest

from bench.suites import lookup
from launch.cli import _under_way as under_way
from launch.run.up import running_config
from tests.support.cli import cli, cli_json, program, run_program
from tests.support.cluster import CHUNK, cluster_file, complete, free_node
from tests.support.leaks import alive
from tests.support.pool import ROOT, Process
from tests.support.waiting import wait_for

pytestmark = pytest.mark.slow


def refused(*arguments):
    """Run a command that must exit with 2 and one line on stderr; returns that line."""
    result = cli(*arguments, code=2)
    assert result.stdout == ""
    return result.stderr


def checked(file, **options):
    """The output of `config check` for a file alone."""
    return cli("config", "check", "--file-only", "-c", file, **options)


MASTER = {"name": "m", "role": "master", "port": 1}


def test_config_example_prints_a_file_that_config_check_takes(tmp_path):
    (tmp_path / "cluster.yaml").write_text(cli("config", "example", "two-machines").output)
    shown = checked(tmp_path / "cluster.yaml").output
    assert "ok: two-machines: 1 master, 1 prefill, 1 decode, 1 proxy" in shown
    assert "'nothing' is not one of 'cluster', 'local', 'pool'" in refused("config", "example", "nothing")


@pytest.mark.parametrize(
    "command",
    [["launch", "decode", "-c"], ["up", "-c"], ["config", "check", "-c"], ["demo", "-c"], ["doctor", "-c"]],
)
def test_every_command_refuses_a_bad_file_in_the_same_words(command, tmp_path):
    file = cluster_file(tmp_path, cashe={})
    message = refused(*command, file)
    assert message.startswith(f"pd-cache: {file}:3: cashe: unknown key; did you mean cache?")
    assert len(message.splitlines()) == 1


def test_launch_refuses_a_role_that_is_none_and_a_port_that_nobody_could_know(tmp_path):
    file = cluster_file(tmp_path)
    assert "nodes[0].port: 0: a decode node has to know this port" in refused("launch", "decode", "-c", file)
    assert "Missing option '-c'" in refused("launch", "decode")
    for command in (["up"], ["launch", "decode"], ["doctor"], ["pool", "ls"]):
        assert " The file goes after -c: main " in refused(*command, file), command
    assert "'decoder' is not one of" in refused("launch", "decoder", "-c", file)


def test_a_variable_names_the_file_in_place_of_c_but_not_for_demo(tmp_path):
    named = {"env": {"PD_CACHE_CONFIG": str(tmp_path / "missing.yaml")}}
    for command in (
        ["up"],
        ["launch", "decode"],
        ["status"],
        ["config", "check"],
        ["doctor"],
        ["pool", "ls"],
    ):
        assert "missing.yaml: cannot be read" in cli(*command, code=2, **named).stderr, command
    assert "ok: test: " in checked(cluster_file(tmp_path), **named).stdout
    shown = cli("demo", "--help", **named).output
    assert "PD_CACHE_CONFIG" not in shown


def test_the_shell_can_complete_commands():
    done = run_program(_PD_CACHE_COMPLETE="bash_complete", COMP_WORDS="pd-cache con", COMP_CWORD="1")
    assert done.stdout == "plain,config\n"


def test_up_refuses_a_file_whose_nodes_all_live_elsewhere(tmp_path):
    nodes = [{"name": "m", "role": "master", "host": "192.0.2.1"}]
    assert "its hosts are 192.0.2.1" in refused("up", "-c", cluster_file(tmp_path, nodes=nodes))


def test_a_model_or_a_vllm_that_is_not_there_is_refused_before_anything_starts(tmp_path):
    nodes = [MASTER, {"name": "d", "role": "decode"}]
    for model, executable, told in (
        (str(tmp_path / "nowhere"), sys.executable, "nowhere': is not a Hugging Face model folder"),
        ("m", "no-such-vllm", "engine.executable: 'no-such-vllm': is not installed"),
    ):
        engine = {"kind": "vllm", "model": model, "executable": executable}
        file = cluster_file(tmp_path, engine=engine, nodes=nodes)
        for command in (["launch", "decode", "-c"], ["config", "check", "-c"], ["up", "-c"]):
            assert told in refused(*command, file)
        checked(file)


def test_staging_memory_that_holds_no_chunk_of_the_model_is_refused(tmp_path):
    nodes = [MASTER, {"name": "d", "role": "decode", "port": 0}]
    file = cluster_file(tmp_path, nodes=nodes, transfer={"staging_size": "4KiB"})
    done = run_program("launch", "decode", "-c", file, code=2)
    assert "transfer.staging_size: 4KiB: the staging memory holds no slot of" in done.stderr


def test_a_store_node_that_waits_for_its_master_stops_on_sigterm(tmp_path):
    nodes = [
        MASTER,
        {"name": "s", "role": "store", "segment_size": "16MiB"},
    ]
    file = cluster_file(tmp_path, nodes=nodes)
    with Process("store", program("launch", "store", "-c", file)) as store:
        store.wait_for(lambda: "trying again" in "".join(store.errors), "it waits")
        assert store.stop() == 0


def test_up_serves_and_restarts_a_dead_node_and_if_it_is_killed_nothing_outlives_it_and_its_note_is_not_believed(
    tmp_path,
):
    nodes = [free_node("master"), free_node("decode-0", segment_size="32MiB"), free_node("proxy")]
    file = cluster_file(tmp_path, nodes=nodes)
    with Process("up", program("up", "-c", file)) as up:
        up.wait_for(lambda: len(up.lines) >= len(nodes), "all nodes ready")
        urls = dict(line.split()[1:3] for line in up.lines[: len(nodes)])
        assert set(urls) == {"master", "decode-0", "proxy"}
        assert complete(urls["proxy"], [1, 2, 3]).status == 200
        family = psutil.Process(up.process.pid).children(recursive=True)
        victim = next(one for one in family if "decode-0" in one.cmdline() and "launch" in one.cmdline())
        victim.kill()
        wait_for(
            lambda: complete(urls["proxy"], [1, 2, 3]).status == 200, "the decode node being started again"
        )
        family += psutil.Process(up.process.pid).children(recursive=True)
        assert refused("up", "-c", file).startswith(
            f"pd-cache: {file}: it runs here already, pid {up.process.pid}; "
        )
        assert f"http://127.0.0.1:{running_config(file).by_role('proxy')[0].port}" == urls["proxy"]
    assert running_config(file) is None
    shown = cli_json("status", "-c", file, code=1)
    said = "down", "its port is 0 in this file: `up` chooses it, but this user runs no `up`"
    assert {said} == {(node["state"], node["why"]) for node in shown["nodes"]}
    wait_for(lambda: not any(alive(one.pid) for one in family), "every process being gone")


def test_ctrl_c_while_up_starts_says_so_and_is_exit_code_130(tmp_path):
    nobody = {"kind": "etcd", "endpoints": ["127.0.0.1:1"]}
    file = cluster_file(tmp_path, discovery=nobody, nodes=[free_node("store-0")])
    with Process("up", program("up", "-c", file)) as up:
        up.wait_for(lambda: "starting store-0" in "".join(up.errors), "it starts")
        assert up.stop(signal.SIGINT) == 130
    assert up.lines == []
    assert "stopping store-0" in "".join(up.errors)


def test_demo_prints_its_json_and_nothing_else_and_all_tokens_are_equal(tmp_path, capfd):
    outcome = cli_json("demo", "-c", cluster_file(tmp_path))
    assert capfd.readouterr().out == "", "nor do its nodes"
    assert set(outcome) == {"all_equal", "requests"}
    assert outcome["all_equal"] is True
    first, second, third, whole, short = outcome["requests"]
    for one in outcome["requests"]:
        assert set(one) == {"prompt_tokens", "prefill", "decode", "recompute", "tokens_equal"}
        for node in (one["prefill"], one["decode"]):
            assert node["cached_tokens"] + node["computed_tokens"] == one["prompt_tokens"]
        assert one["decode"]["ttft_ms"] > 0
        assert one["recompute"]["ttft_ms"] > 0
    assert first["prefill"]["cached_tokens"] == 0
    assert first["decode"]["cached_tokens"] == first["prompt_tokens"] // 64 * 64
    assert second["prefill"]["cached_tokens"] == whole["prompt_tokens"], "producer reuse of the shared prefix"
    assert third["prefill"]["cached_tokens"] == third["prompt_tokens"] // 64 * 64
    assert whole["decode"]["computed_tokens"] == 1, "a full hit leaves one token"
    assert short["decode"]["cached_tokens"] == 0


@pytest.mark.parametrize("command", [["config", "example", "local"], ["status", "-c"], ["top", "--once", "-c"], ["size", "--help"]])  # fmt: skip
def test_an_output_that_is_full_is_one_line_and_the_exit_code_1(command, tmp_path):
    file = [cluster_file(tmp_path)] if command[-1] == "-c" else []
    with open("/dev/full", "w") as full:
        done = subprocess.run(program(*command, *file), cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "pd-cache: standard output: No space left on device\n")


def test_names_of_nodes_and_of_files_may_be_no_utf_8_and_a_prompt_may_not(tmp_path):
    file, odd = cluster_file(tmp_path), "\udcff"
    assert "got \\udcff" in refused("drain", odd, "-c", file)
    assert "'utf-8' codec can't decode" in refused("explain", "--prompt", sys.executable, "-c", file)
    checked(file.rename(tmp_path / odd))


def test_bench_passes_its_arguments_on_and_says_what_each_bench_measures():
    done = run_program("bench", "lookup", "-h")
    assert done.stdout.startswith("Usage: pd-cache bench lookup ")
    assert "--clients" in done.stdout
    assert refused("bench", "nothing")
    assert "No such option '--client-s'" in refused("bench", "lookup", "--client-s")
    shown = cli("bench", "--help").output
    assert re.search(r"^  ttft +time to first token", shown, re.MULTILINE)


def test_ctrl_c_ends_a_bench_as_every_command(monkeypatch):
    def interrupted(**options):
        raise KeyboardInterrupt

    monkeypatch.setattr(lookup.main, "callback", interrupted)
    assert cli("bench", "lookup", code=130).output == ""


def test_config_check_does_not_promise_a_download_that_it_refuses(tmp_path):
    for offline, code, said in (("1", 2, "HF_HUB_OFFLINE forbids to"), ("0", None, "vLLM will")):
        engine = {
            "kind": "vllm",
            "model": "no/model",
            "executable": "true",
            "env": {"HF_HUB_OFFLINE": offline},
        }
        file = cluster_file(tmp_path, engine=engine)
        shown = cli("config", "check", "-c", file, code=code).stderr
        assert shown.count("download it") == 1
        assert said in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_renewed_on_a_terminal_and_a_line_elsewhere(terminal, monkeypatch, capsys):
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    with under_way("scan") as (_, show):
        show("1 of 2")
    assert (capsys.readouterr().err == "1 of 2\n") == (not terminal)


def test_a_table_in_a_pipe_is_not_wrapped(tmp_path):
    file = cluster_file(tmp_path, nodes=[free_node("master")])
    for command, line in (
        ("status", "but this user runs no `up`"),
        ("doctor", f"pd-cache up -c {file}; to see each node's state"),
    ):
        assert line in run_program(command, "-c", file, code=1).stdout, command


def test_a_terminal_that_shows_ascii_only_gets_a_table(tmp_path):
    done = run_program("status", "-c", cluster_file(tmp_path), code=1, PYTHONIOENCODING="ascii", COLUMNS="60")
    assert done.stderr == ""
    assert "prefill-0" in done.stdout


def test_config_check_says_which_nodes_are_this_machine_s_and_needs_no_vllm_for_those_of_others(tmp_path):
    nodes = [
        {"name": "m", "role": "master", "host": "198.51.100.1", "port": 50051},
        {"name": "d", "role": "decode", "host": "198.51.100.2", "port": 8200},
    ]
    elsewhere = cluster_file(
        tmp_path, engine={"kind": "vllm", "model": "m", "executable": "no-vllm"}, nodes=nodes
    )
    shown = cli("config", "check", "-c", elsewhere).stdout
    assert shown.endswith(
        "on this machine: no node\non others, to be checked there: m (198.51.100.1), d (198.51.100.2)\n"
    )
    here = cluster_file(tmp_path, nodes=[free_node("master")])
    assert cli("config", "check", "-c", here).stdout.endswith("on this machine: master\n")


def test_config_check_asks_vllm_itself_about_its_flags(tmp_path, monkeypatch):
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    (package / "serve.py").write_text(VLLM_SERVE)
    script = tmp_path / "bin-vllm"
    script.write_text(f"#!{sys.executable}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    engine = {"kind": "vllm", "model": "m", "executable": str(script)}
    mistyped = cluster_file(tmp_path, engine=engine | {"args": {"max-model-lne": 5}})
    message = refused("config", "check", "-c", mistyped)
    assert "asking vLLM about its flags" in message.splitlines()[0]
    for name in ("prefill-0", "decode-0"):
        why = "it refuses its flags: unrecognized arguments: --max-model-lne=5"
        assert f"engine: vLLM cannot run {name}: {why}" in message
    good = cluster_file(tmp_path, engine=engine | {"args": {"max-model-len": 5, "api-key": "secret"}})
    told = cli("config", "check", "-c", good).stderr
    assert "warning: engine.model: m is neither a folder nor at " in told
    assert "secret" not in told
    package.rename(package.with_name("moved"))
    assert "warning: vLLM's flags are not checked: " in cli("config", "check", "-c", good).stderr


def test_config_check_says_all_that_this_machine_cannot_do_for_its_nodes(tmp_path, monkeypatch):
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text("raise ImportError('libibverbs.so.1: cannot open')")
    (tmp_path / "file").touch()
    part = shutil.disk_usage(tmp_path).total * 2 // 3
    tiers = [
        {"kind": "disk", "path": str(tmp_path / "file" / "tier"), "capacity": "1GiB"},
        {"kind": "disk", "path": str(tmp_path / "tier"), "capacity": part},
        {"kind": "disk", "path": str(tmp_path / "second"), "capacity": part},
        {"kind": "mooncake"},
    ]
    nodes = [free_node("master"), free_node("prefill-0"), free_node("decode-0", host="no-such-host.invalid")]
    file = cluster_file(tmp_path, nodes=nodes, cache={"chunk_size": CHUNK, "tiers": tiers})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    told = refused("config", "check", "-c", file)
    assert "nodes[2].host: 'no-such-host.invalid': this machine finds no IPv4 address for it" in told
    assert (
        f"cache.tiers[0].path: '{tmp_path}/file/tier': {tmp_path}/file is no folder on this machine" in told
    )
    assert re.search(
        rf"cache\.tiers\[2\]\.capacity: .*: the disk of {tmp_path} has .*, too little for the .* of tiers at prefill-0;",
        told,
    )
    assert "nodes[0]: mooncake.store cannot be imported: " in told
    assert len(told.splitlines()) == 4
    assert all(line.startswith(f"pd-cache: {file}:") for line in told.splitlines())
    old = cli("config", "check", "--file-only", file)
    assert "`config check FILE` ends with the next version" in old.stderr


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    assert run_program("up", code=130, PYTHONPATH=str(tmp_path)).stderr == ""


VLLM_SERVE = """
import argparse

FlexibleArgumentParser = argparse.ArgumentParser


class Serve:
    def subparser_init(self, commands):
        parser = commands.add_parser("serve")
        parser.add_argument("model")
        parser.add_argument("--max-model-len", type=int)


def cmd_init():
    return [Serve()]
"""


def test_a_bench_that_lacks_a_package_says_how_to_get_it():
    without = (
        "import sys; sys.modules['transformers'] = None; from launch.cli import main; main(['bench', 'ttft'])"
    )
    done = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "transformers" in done.stderr
    assert "with the extra `bench`" in done.stderr
    assert "Traceback" not in done.stderr
