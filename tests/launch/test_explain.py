"""`pd-cache explain`: of nodes that only the pool can be asked about, and of wrong input. Of running
clusters: test_cluster.py."""

import json
import uuid
from contextlib import ExitStack

import msgspec
import pytest

from launch.cli import example_file
from launch.discovery import View
from launch.operate.explain import ExplainedNode, _PoolLookups
from launch.proxy.trips import HopReport
from pd_cache.chunks import describe_hashes
from pd_cache.cluster import NodeRecord, load_config
from pd_cache.reasons import RequestReport
from tests.support.cli import cli, cli_json
from tests.support.cluster import cluster_file, free_node
from tests.support.engines import CHUNK as SMALL
from tests.support.engines import host
from tests.support.pages import serving
from tests.support.proxy import NAMESPACE

pytestmark = pytest.mark.slow


# --- nodes that do not say themselves what they would find --------------------------------------------------


def telling(pages):
    """The port of a node that answers with these objects, by path."""
    return serving(lambda path, *_: json.dumps(pages[path]).encode() if path in pages else None)


def test_a_report_that_was_not_in_the_answer_comes_from_the_node_that_answered(tmp_path):
    """vLLM's streams have none."""
    reports = {
        name: msgspec.to_builtins(RequestReport.of(20, 8, reason=name)) for name in ("evicted", "damaged")
    }
    with ExitStack() as stack:
        ports = [
            stack.enter_context(telling({"/requests/abc": {"reports": [one]}})) for one in reports.values()
        ]
        hops = [
            {"hop": "prefill", "node": f"http://127.0.0.1:{ports[0]}", "report": None},
            {"hop": "decode", "node": "http://10.0.0.9:1", "report": reports["damaged"]},
            {"hop": "decode", "node": "http://127.0.0.1:1", "report": reports["damaged"], "direct": "short"},
        ]
        proxy = stack.enter_context(telling({"/requests/abc": {"client": "", "hops": hops}}))
        places = {"master": 2, "prefill-0": ports[0], "decode-0": ports[1], "decode-1": 1, "proxy": proxy}
        nodes = [free_node(name, port=port) for name, port in places.items()]
        file = cluster_file(tmp_path, engine={"kind": "vllm", "model": "m"}, nodes=nodes)
        explained, of_answer = (cli_json("explain", name, "-c", file) for name in ("abc", "chatcmpl-abc"))
    assert of_answer == {**explained, "request_id": "chatcmpl-abc"}, (
        "the id of the answer leads to the same request"
    )
    assert [(hop["node"], hop["report"]["reason"]) for hop in explained["hops"]] == [
        ("prefill-0", "evicted"),
        ("http://10.0.0.9:1", "damaged"),
        ("decode-1", "damaged"),
    ], "one that is dead has a name, too"
    last = msgspec.convert(explained["hops"][-1], HopReport)
    assert last.text({}).startswith("decode at decode-1, without a prefill node (short):\n")
    assert explained["unanswered"] == {"decode-1": "down: 127.0.0.1:1: Connection refused"}


def test_for_nodes_of_vllm_the_pool_is_asked_in_the_namespace_of_each(pool, tmp_path):
    tokens = list(range(3 * SMALL + 1))
    with ExitStack() as stack:
        storer, stranger = (stack.enter_context(host(pool, model=uuid.uuid4().hex)) for _ in range(2))
        storer.compute(tokens, tokens)
        assert storer.store(tokens, tokens) == 3 * SMALL
        namespaces = [storer.engine.database.namespace, stranger.engine.database.namespace, None]
        nodes = [pool.master]
        for place, one in enumerate(namespaces):
            pages = {"/health": {} if one is None else one.described(), "/tokenize": {"tokens": tokens}}
            nodes.append(free_node(f"decode-{place}", port=stack.enter_context(telling(pages))))
        engine = {"kind": "vllm", "model": "m"}
        file = cluster_file(tmp_path, cache={"chunk_size": SMALL}, engine=engine, nodes=nodes)
        (tmp_path / "prompt.txt").write_text("whatever")
        asked = ("explain", "--prompt", tmp_path / "prompt.txt", "-c", file)
        found, other, unknown = cli_json(*asked)["nodes"]
        assert (found["found"], found["reason"]) == (24, "none")
        assert (other["found"], other["reason"]) == (0, "other_namespace")
        assert other["detail"].startswith("decode-0, which would find 24 tokens, has another namespace: ")
        assert unknown["found"] is None
        assert unknown["detail"] == "it does not report the namespace of its chunks"
        (tmp_path / "prompt.txt").write_text(json.dumps([5] * 3 * SMALL))
        reasons = [one["reason"] for one in cli_json(*asked)["nodes"][:2]]
        assert reasons == ["missing"] * 2, "of namespaces that find as little, none is the other"


# --- wrong input --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((), "give either a REQUEST_ID or --prompt FILE"),
        (("abc", "--prompt", "PROMPT"), "give either a REQUEST_ID or --prompt FILE"),
        (("abc", "--cache-salt", "x"), "--cache-salt belongs to --prompt"),
        (("--prompt", "nowhere"), "--prompt: nowhere: No such file or directory"),
    ],
)
def test_a_command_that_cannot_be_meant_is_refused(arguments, told):
    result = cli("explain", *arguments, "-c", example_file("local"), code=2)
    assert told in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    "content, told",
    [
        (b" \n", "it is empty"),
        (b"[]", "it is empty"),
        (b"[1, -2]", "is no list of token ids"),
        (b"[1, 2", "is no list of token ids"),
        (b"\xff\xfe", "'utf-8' codec can't decode"),
    ],
)
def test_a_file_that_is_no_prompt_is_refused(content, told, tmp_path):
    (tmp_path / "prompt").write_bytes(content)
    result = cli("explain", "--prompt", tmp_path / "prompt", "-c", example_file("local"), code=2)
    assert told in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_cluster_that_does_not_run_explains_nothing(tmp_path):
    (tmp_path / "prompt").write_text("[1, 2, 3]")
    asked = ("-c", example_file("local"))
    nodes = cli_json("explain", "--prompt", tmp_path / "prompt", *asked, code=1)["nodes"]
    assert all(one["detail"].startswith("down: ") for one in nodes)
    unanswered = cli_json("explain", "abc", *asked, code=1)["unanswered"]
    assert {"proxy"} < set(unanswered)


def test_of_a_node_whose_block_hashes_cannot_be_computed_here_its_line_says_so():
    space = msgspec.structs.replace(
        NAMESPACE, hash_mode="blocks", hash_seed=describe_hashes("xxhash", "7", "")
    )
    record = NodeRecord(name="d", role="decode", address="http://h:1", **space.described())
    one = ExplainedNode("d", "decode")
    with ExitStack() as stack:
        lookups = _PoolLookups(load_config(example_file("cluster")), View(()), None, stack)
        lookups.look(record, [1] * 1000, one)
    assert (one.found, "by xxhash" in one.detail) == (None, True)
