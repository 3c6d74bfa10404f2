"""`pd-cache reset` names the weights of the engines that are out, and says what every engine has in the end.
Small servers play the nodes."""

import json
import time
from functools import partial
from threading import Barrier

import msgspec
import pytest

from launch.operate.reset import reset_engines
from pd_cache.cluster import load_config
from pd_cache.decoding import decode_json
from pd_cache.versions import Naming, WeightsVersion
from tests.support.cli import cli
from tests.support.cluster import cluster_file, free_node
from tests.support.pages import serving
from tests.support.pool import free_port
from tests.support.waiting import together


class Node:
    """A node with engines, over HTTP. Tests replace what it does before and after it names their weights."""

    def __init__(self, engines=1):
        self.engines = [WeightsVersion() for _ in range(engines)]
        self.before = self.after = lambda: None
        self._server = serving(self._answer)
        self.port = self._server.__enter__()

    def _answer(self, path, body=b""):
        if not body:
            states = [one.state for one in self.engines]
            return msgspec.json.encode({"weights": states} if path == "/health" else {})
        naming = decode_json(body, Naming)
        self.before()
        answer = [one.name(naming) for one in self.engines]
        self.after()
        return msgspec.json.encode(answer)

    @property
    def labels(self):
        return [one.label for one in self.engines]

    def change(self):
        """Its engines hear that their weights have changed."""
        for one in self.engines:
            one.reset()

    def close(self):
        self._server.__exit__(None, None, None)


class Cluster:
    def __init__(self, folder, **sections):
        self.a, self.b = Node(), Node(engines=2)
        nodes = [
            free_node("master", port=free_port(), metrics_port=free_port()),
            free_node("prefill-a", port=self.a.port),
            free_node("decode-b", port=self.b.port),
        ]
        self.file = cluster_file(folder, nodes=nodes, **sections)

    def close(self):
        self.a.close()
        self.b.close()

    def reset(self, version=None, *, everywhere=False):
        return reset_engines(load_config(self.file), version, everywhere=everywhere)

    def run(self, *arguments, code=0):
        return cli("reset", "-c", self.file, *arguments, code=code)


@pytest.fixture
def c(tmp_path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_all_engines_that_are_out_get_one_label_which_is_made_if_none_is_given(c):
    for node in (c.a, c.b):
        node.change()
    shown = c.run().stdout
    (label,) = {*c.a.labels, *c.b.labels}
    assert label
    assert sorted(shown.splitlines()) == [f"decode-b: version {label}", f"prefill-a: version {label}"]
    assert c.run("--version", label).stdout == shown, "a second time changes nothing"
    told = dict.fromkeys(("prefill-a", "decode-b"), f"version {label}")
    assert json.loads(c.run("--version", label, "--json").stdout) == {"nodes": told, "well": True}
    for node in (c.a, c.b):
        node.change()
    c.run()
    assert {*c.a.labels, *c.b.labels}.isdisjoint({label, None})


def test_engines_that_are_not_out_keep_what_they_have_unless_all_are_meant(c):
    c.a.change()
    c.b.engines[0].reset()
    shown = c.run("--version", "w1").stdout
    assert sorted(shown.splitlines()) == [
        "decode-b: weights of its files: it has not reported a change",
        "prefill-a: version w1",
    ]
    assert (c.a.labels, c.b.labels) == (["w1"], ["w1", ""])
    c.run("--version", "w2", "--all")
    assert (c.a.labels, c.b.labels) == (["w2"], ["w2", "w2"])
    c.a.change()
    c.run("--version", "")
    assert c.a.labels == [""], "the weights of its files"


def test_if_no_engine_is_out_none_is_named_and_the_exit_code_says_so(c):
    assert "none has reported a change of weights (--all: for all engines)" in c.run(code=1).stderr
    assert (c.a.labels, c.b.labels) == ([""], ["", ""])
    assert "expected up to 64 letters" in c.run("--version", "a/b", code=2).stderr


def test_a_node_that_is_not_reached_is_named_and_the_exit_code_is_1(c):
    c.a.change()
    c.b.close()
    done = c.run("--version", "w1", code=1)
    assert "decode-b: not reached, and keeps its label: 127.0.0.1:" in done.stdout
    assert c.a.labels == ["w1"]


def test_an_engine_that_does_not_take_the_label_is_said_to_have_its_own(c):
    def fail():
        raise ConnectionError

    c.a.before = fail
    assert "prefill-a: weights of its files: it has not taken the label" in c.run("--all", code=1).stdout


def test_without_an_answer_of_discovery_the_exit_code_says_that_engines_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setattr("launch.watch.asker.SYNC_S", 0.5)  # for an etcd that nobody answers for
    cluster = Cluster(tmp_path, discovery={"kind": "etcd", "endpoints": ["127.0.0.1:1"]})
    try:
        for node in (cluster.a, cluster.b):
            node.change()
        shown = cluster.run("--version", "w1", code=1).stdout
        assert "prefill-a: version w1" in shown
        assert (
            "discovery: etcd, which does not answer: these are the nodes of the file; others may not" in shown
        )
    finally:
        cluster.close()


def test_a_node_that_does_not_say_which_weights_it_has_counts_as_not_reached(c):
    c.a.change()
    c.b.engines.clear()
    assert "decode-b: not reached, and keeps its label: it does not report" in c.run(code=1).stdout


def test_an_engine_that_starts_while_a_reset_is_under_way_has_the_weights_of_its_files(c):
    c.a.change()
    c.b.change()
    c.b.before = lambda: c.b.engines.__setitem__(0, WeightsVersion())
    shown = c.run("--version", "w1").stdout
    assert (c.a.labels, c.b.labels) == (["w1"], ["", "w1"])
    assert "decode-b: weights of its files" in shown
    c.b.before = lambda: None
    c.b.change()
    c.run("--version", "w1")
    assert c.b.labels == ["w1", "w1"], "once it has heard of a change, it may be named"


@pytest.mark.parametrize("place", ["before", "after"])
def test_a_change_that_comes_with_the_command_leaves_the_engine_out(c, place):
    c.a.change()
    setattr(c.a, place, c.a.change)
    assert (
        "prefill-a: out: it was not reached, or its weights have changed again"
        in c.run("--version", "w1", code=1).stdout
    )
    assert c.a.labels == [None]


def test_of_two_commands_at_once_at_least_one_says_that_not_all_is_as_it_was_told(c):
    """Both have asked every engine for its state before one of them names any."""
    done = {}

    def run(label, everywhere):
        done[label] = c.reset(label, everywhere=everywhere)

    for everywhere in (False, True) * 3:
        for node in (c.a, c.b):
            node.change()
        meet = Barrier(4)
        for node in (c.a, c.b):
            node.before = partial(meet.wait, 60)
        together(*(partial(run, label, everywhere) for label in ("w1", "w2")))
        assert None not in {*c.a.labels, *c.b.labels}
        for label, reset in done.items():
            assert reset.well == ({*c.a.labels, *c.b.labels} == {label})
            assert reset.nodes["prefill-a"].startswith(f"version {c.a.labels[0]}")


def test_status_names_engines_that_have_been_out_for_a_minute_and_what_to_do(c):
    def lines(out_s):
        c.a.engines[0] = WeightsVersion(None, clock=lambda: time.time() - out_s)
        return json.loads(cli("status", "-c", c.file, "--json", code=1).stdout)["weights"]

    assert lines(30) == []
    (out, others) = sorted(lines(90), key=lambda line: "decode" in line)
    assert out.startswith("prefill-a: the weights have changed and have no label")
    assert "run `pd-cache reset` when all nodes have the new weights" in out
    assert others == "decode-b: weights of its files"
    c.a.engines[0].reset("w1")
    shown = cli("status", "-c", c.file, code=1).stdout
    assert "prefill-a: version w1" in shown
