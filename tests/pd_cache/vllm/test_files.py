"""The file and the sockets through which the connector says what it knows, and what vLLM's server makes of
them; an ASGI application plays vLLM's part."""

import asyncio
import contextlib
import json
import re
import socket
from types import SimpleNamespace

import msgspec
import pytest

import pd_cache
from pd_cache.cluster import Capacity, NodeRecord, read_about
from pd_cache.reasons import RequestReport
from pd_cache.versions import Naming, WeightsVersion
from pd_cache.vllm.costs import Costs
from pd_cache.vllm.files import (
    NAMESPACE_FILE,
    TellCache,
    about,
    answering,
    reports_on,
    write_about,
)
from pd_cache.vllm.settings import read_settings
from tests.support.names import NAMESPACE
from tests.support.pool import ROOT
from transfer.settings import mooncake_version

WINDOW = msgspec.structs.replace(NAMESPACE, group="1-3", keeps="the last 256 tokens", tail=1)
REPORT = RequestReport.of(20, 8, reason="evicted")


@pytest.fixture
def file(tmp_path, monkeypatch):
    path = tmp_path / "namespace"
    monkeypatch.setenv(NAMESPACE_FILE, str(path))
    return path


def ask(path="/health", method="GET", status=200, *parts, body=b""):
    """Returns status and body, for a vLLM that answers every request with `status` and `parts`."""
    sent = []
    parts = parts or (b"",)

    async def app(scope, receive, send):
        headers = [(b"content-length", b"%d" % sum(map(len, parts)))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        for index, part in enumerate(parts):
            await send({"type": "http.response.body", "body": part, "more_body": index + 1 < len(parts)})

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": body}

    vllm = SimpleNamespace(state=SimpleNamespace(args=SimpleNamespace(enable_scale_out=True)))
    asyncio.run(TellCache(app)({"type": "http", "method": method, "path": path, "app": vllm}, receive, send))
    answer = b"".join(message["body"] for message in sent[1:])
    assert int(dict(sent[0]["headers"])[b"content-length"]) == len(answer)
    return sent[0]["status"], answer


@pytest.mark.parametrize("namespaces, tokens", [((NAMESPACE,), 0), ((NAMESPACE, WINDOW), 4096), ((), 4096)])
def test_a_health_of_200_tells_what_was_written(namespaces, tokens, file):
    write_about(file, namespaces, tokens, max_model_len=8192)
    assert [one.name for one in file.parent.iterdir()] == [file.name]
    status, body = ask()
    assert (status, json.loads(body)) == (200, {**json.loads(about(file)), "renders": True, "weights": []})
    told = read_about(body)
    assert (told.version, told.kv_tokens, told.cache_namespaces) == (pd_cache.__version__, tokens, namespaces)
    assert told.mooncake == mooncake_version() != ""
    record = NodeRecord(name="a", role="decode", address="http://10.0.0.1:4").telling(told)
    assert (record.capacity, record.renders) == (Capacity(kv_tokens=tokens, max_model_len=8192), True)


@pytest.mark.parametrize(
    "asked",
    [
        ("/health", "GET", 503),
        ("/health", "GET", 500, b"dead"),
        ("/health", "GET", 200, b"its own"),
        ("/health", "GET", 200, b"", b"in parts"),
        ("/v1/models", "GET", 299),
        ("/health", "HEAD", 200),
        ("/health/x", "GET", 200),
        ("/requests/abc", "POST", 299, b"vllm's own"),
    ],
)
def test_any_other_answer_is_vllms_own(asked, file):
    write_about(file, [NAMESPACE], 4096)
    assert ask(*asked) == (asked[2], b"".join(asked[3:]))


@pytest.mark.parametrize("content", [None, b""])
def test_without_a_file_health_is_vllms_own(content, file):
    if content is not None:
        file.write_bytes(content)
    assert (ask(), about(file)) == ((200, b""), b"")


@pytest.mark.parametrize("name", ["abc", "cmpl-abc-0-1f2e3d4c"])
def test_reports_are_found_by_vllms_id_and_by_the_id_that_the_client_sent(name):
    others = (
        *("cmpl-abcd-0", "cmpl-abc-0-0", "cmpl-x-abc-0", "chatcmpl-abc-x", "chatcmpl-x-abc", "cmpl-abc-x-0"),
        "a-abc-0",
    )
    reports = [(f"{other}-1f2e3d4c", RequestReport.of(1, 8)) for other in others]
    assert reports_on(name, [("cmpl-abc-0-1f2e3d4c", REPORT), *reports]) == [REPORT]
    assert reports_on("ab", reports) == []


def test_a_request_has_a_report_for_each_of_its_prompts_and_samples():
    names = ("chatcmpl-one", "chatcmpl-one_3", "2_cmpl-one-0", "generate-tokens-one")
    reports = [(f"{name}-00112233", REPORT) for name in names]
    assert reports_on("one", reports) == [REPORT] * 4
    assert len(reports_on("one", reports * 100)) == 16


# --- what a server's engines answer -------------------------------------------------------------------------


@pytest.fixture
def engines(file, monkeypatch):
    """Two engines of one server, each in a process of its own; and what a killed one has left."""
    write_about(file, (), 1)
    versions, costs = [WeightsVersion(), WeightsVersion()], Costs()
    costs.declines = 4096
    with contextlib.ExitStack() as stack, socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(file.with_name(f"{file.name}.1.sock")))
        for pid, version in enumerate(versions, 2):
            monkeypatch.setattr("pd_cache.vllm.files.os.getpid", lambda pid=pid: pid)
            reports = [("cmpl-abc-0-1f2e3d4c", REPORT)] * (pid - 1)
            stack.enter_context(answering(file, version, costs, reports))
        yield versions
    assert not list(file.parent.glob("*.[23].sock"))


@pytest.mark.usefixtures("engines")
def test_the_reports_of_all_engines_are_answered():
    status, body = ask("/requests/abc")
    assert (status, json.loads(body)["reports"]) == (200, [msgspec.to_builtins(REPORT)] * 3)
    for name in ("ab", ""):
        assert ask(f"/requests/{name}") == (404, b'{"reports":[]}')


def test_the_weights_of_each_engine_of_a_server_are_told_and_named(engines):
    first, second = engines
    first.reset()
    states = [first.state, second.state]
    told = [msgspec.structs.replace(state, declines=4096) for state in states]
    assert read_about(ask()[1]).weights == tuple(told)
    naming = Naming(label="w1", ids=(states[0].id,))
    status, body = ask("/weights", "POST", body=msgspec.json.encode(naming))
    assert (status, [one["label"] for one in json.loads(body)]) == (200, ["w1", ""])
    assert (first.label, second.label) == ("w1", "")


@pytest.mark.parametrize(
    "body", [b"", b"[]", b'{"label": "a/b", "ids": []}', b'{"label": "a"}', b"x" * (1 << 18)]
)
def test_a_naming_that_is_none_is_refused(engines, body):
    assert ask("/weights", "POST", body=body)[0] == 400
    assert [one.label for one in engines] == ["", ""]


def test_of_an_engine_that_does_not_answer_nothing_is_told_and_it_counts_as_not_reached(file, monkeypatch):
    monkeypatch.setattr("pd_cache.vllm.files._ANSWER_S", 0.1)
    write_about(file, (), 1)
    with socket.socket(socket.AF_UNIX) as stopped:
        stopped.bind(str(file.with_name(f"{file.name}.1.sock")))
        stopped.listen()
        assert json.loads(ask()[1]) == {**json.loads(about(file)), "renders": True}
        assert ask("/weights", "POST", body=msgspec.json.encode(Naming(label="w1", ids=())))[0] == 503
        assert ask("/requests/abc")[0] == 404


def test_the_file_for_an_existing_mooncake_cluster_names_its_master(tmp_path):
    """That of docs/migrate.md."""
    (example,) = re.findall(
        r"^```yaml\n(.*?)^```$", (ROOT / "docs" / "migrate.md").read_text(), re.DOTALL | re.MULTILINE
    )
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(example)
    extra = {"config_file": str(cluster), "node": "vllm-0"}
    found = read_settings(extra, "kv_both")
    assert found.node.master == "10.0.0.1:50051"
