"""README.md and the pages of docs/ that a newcomer reads: examples run, commands are there, links lead
somewhere."""

import json
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from itertools import chain

import click
import pytest
import yaml

import pd_cache
from launch.cli import example_file, main
from launch.demo import comments
from pd_cache import CacheEngineBuilder
from pd_cache.cluster import parse_config
from tests.support.cli import printed
from tests.support.cluster import started
from tests.support.engines import BLOCK, CHUNK
from tests.support.kv import make_cache
from tests.support.server import LATE_S, Engine, served, store_surely
from tests.support.waiting import wait_for
from tests.test_architecture import ROOT

README = (ROOT / "README.md").read_text()
EMBED, RUN, RECIPES = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("embed", "run", "recipes"))
_MODELS = {
    "llama": "Llama",
    "gemma3": "Gemma 3",
    "gptoss": "gpt-oss",
    "qwen3next": "Qwen3-Next",
    "mamba2": "Nemotron-H",
}
PAGES = sorted(chain(ROOT.glob("*.md"), ROOT.glob("docs/*.md"), ROOT.glob("examples/*.md")))


def blocks(language, page):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    return [block for of, block in found if of == language]


def example(using, replacements):
    """The one block of Python that has `using` in it, with what this machine lacks replaced."""
    (code,) = [block for block in blocks("python", EMBED) if using in block]
    for written, wanted in replacements.items():
        assert written in code
        code = code.replace(written, wanted)
    return code


def run(code, given):
    names = dict(given)
    exec(compile(code, "docs/embed.md", "exec"), names)  # noqa: S102 - our own page
    return names


def test_the_engine_of_the_example_finds_what_it_has_stored(pool):
    code = example("CacheEngineBuilder", {"10.0.0.1:50051": pool.address, "my-model@3f2a": "readme"})
    try:
        assert run(code, {})["found"] == 0
        names = run(code, {})
        assert (names["found"], names["loaded"], int(names["mask"].sum())) == (3, 3, 768)
    finally:
        CacheEngineBuilder.destroy("engine-0")


def test_the_adapters_of_the_example_find_and_load_what_an_engine_stored(pool, tmp_path):
    tokens, blocks_of = list(range(8 * CHUNK)), 8 * CHUNK // BLOCK
    with served(pool, tmp_path) as server, Engine(server.url, "readme") as engine:
        store_surely(engine, tokens)
        code = example(
            "SchedulerAdapter",
            {
                "ipc:///run/pd-cache.sock": server.url,
                "my-model@3f2a": "readme",
                "block_size=16)": f"block_size={BLOCK})",
                "None, identity)\nscheduler": f"None, identity, lookup_timeout_s={LATE_S})\nscheduler",
            },
        )
        given = {
            "tokens": tokens,
            "kv_caches": {
                str(layer): tensor for layer, tensor in enumerate(make_cache(blocks=64, block_size=BLOCK))
            },
            "block_ids": list(range(blocks_of)),
            "finished_requests": set(),
        }
        names = run(code, given)
        try:
            assert names["found"] == len(tokens)
            wait_for(lambda: names["worker"].get_finished(set())[1] == {"r1"} or names["loaded"], "loaded")
            assert not names["worker"].get_block_ids_with_load_errors()
        finally:
            names["worker"].shutdown()
            names["scheduler"].shutdown()


@pytest.mark.slow(seconds=30)
@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl")
def test_the_second_of_two_requests_is_explained_as_it_says(tmp_path):
    (script,) = [block for block in blocks("sh", README) if "PROXY=" in block]
    (said,) = [block for block in blocks("", README) if block.startswith("prefill at")]
    tree = yaml.safe_load(example_file("local").read_text())
    tree["transfer"]["timeouts"]["exist_ms"], tree["handoff"]["wait_ms"] = 10_000, 60_000  # on a busy machine
    tree["transfer"]["staging_size"], tree["engine"]["threads"] = (
        "16MiB",
        1,
    )  # what costs processors, and shows nothing here
    for node in tree["nodes"]:
        if node.get("segment_size"):
            node["segment_size"] = "64MiB"
    with started(tmp_path, **tree) as cluster:
        for written, wanted in (
            ("http://127.0.0.1:PORT", cluster.urls["proxy"]),
            ("pd-cache", f"{sys.executable} -m launch"),
            ("local.yaml", str(tmp_path / "cluster.yaml")),
        ):
            assert written in script
            script = script.replace(written, wanted)

        def is_said():
            return (
                said
                in subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False).stdout
            )

        wait_for(is_said, "a hit: the pool may have just started")


def test_commands_are_there():
    for line in re.findall(r"^pd-cache (.*)$", "".join(blocks("sh", README + RUN + RECIPES)), re.MULTILINE):
        command = main
        for word in line.split():
            if not isinstance(command, click.Group):
                break
            assert word in command.commands, line
            command = command.commands[word]


def test_the_wheel_to_install_is_the_one_that_is_built():
    assert f"'dist/pd_cache-{pd_cache.__version__}-py3-none-any.whl[cpu]'" in README


def test_every_bench_and_every_file_to_start_from_is_listed():
    (bench,) = [parameter for parameter in main.commands["bench"].params if parameter.name == "name"]
    assert [
        name for name in bench.type.choices if f"`{name}`" not in README and f"bench {name}" not in README
    ] == []
    assert set(re.findall(r"\(\.\./configs/(.*?)\.yaml\)", RECIPES)) == {
        file.stem for file in (ROOT / "configs").iterdir()
    }


def test_the_demo_says_of_its_prompts_what_the_page_says():
    said = [f"prompt {number}: {comment}" for number, comment in enumerate(comments(2304), start=1)]
    assert "\n".join(said) in README


def test_the_file_of_a_second_model_is_a_whole_file():
    file = ROOT / "docs" / "howto.md"
    (text,) = [block for block in blocks("yaml", file.read_text()) if block.startswith("name:")]
    assert {node.role for node in parse_config(text, file)[0].nodes} == {
        "master",
        "prefill",
        "decode",
        "proxy",
    }


def test_the_first_screen_has_the_two_commands_that_do_all_the_set_up_and_the_flags_for_vllm():
    screen = "\n".join(README.splitlines()[:40])
    for command in ("make demo", "make test"):
        assert command in screen
        assert f"\n{command.removeprefix('make ')}: install\n" in (ROOT / "Makefile").read_text()
    assert '"kv_connector_module_path": "pd_cache.vllm.connector"' in screen
    assert "docs/migrate.md" in screen


def test_it_is_short():
    assert len(README.splitlines()) <= 200


def test_the_plot_is_what_its_command_draws():
    images = ROOT / "docs" / "images"
    drawn = printed(sys.executable, ROOT / "tools" / "plot-ttft.py", images / "ttft.jsonl")
    assert drawn == (images / "ttft.svg").read_text()


def test_the_plot_has_the_figures_of_the_table():
    runs = [json.loads(line) for line in (ROOT / "docs" / "images" / "ttft.jsonl").read_text().splitlines()]
    taken = defaultdict(list)
    for run_ in runs:
        for row in run_["results"]:
            for figure in ("warm_ms", "ours_b_ms", "theirs_b_ms"):
                taken[_MODELS[run_["model"]], row["tokens"], figure].append(row[figure])
    lines = (ROOT / "docs" / "performance.md").read_text().splitlines()
    for (model, tokens, _), figures in taken.items():
        (line,) = [
            line for line in lines if line.startswith(f"| {model} | {tokens} |") and line.count("|") == 11
        ]
        shown = "\N{EN DASH}".join(map(str, sorted({min(figures), max(figures)})))
        assert f"| {shown} |" in line


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: str(page.relative_to(ROOT)))
def test_settings_and_metrics_that_a_page_names_exist(page):
    """All pages but the changelog, which also names what went."""
    golden = ROOT / "tests" / "golden"
    settings = re.sub(r"<\w+>|\[\]", "", (golden / "yaml_keys.txt").read_text())
    metrics = re.sub(r"\{.*\}", "", (golden / "metric_names.txt").read_text()).split()
    for name in re.findall(
        r"`((?:cache|connector|handoff|proxy|supervisor|transfer)\.[\w.]*)", page.read_text()
    ):
        assert name.endswith(".py") or re.search(rf"^\.{re.escape(name)}\b", settings, re.MULTILINE), name
    for name in re.findall(r"\b(?:vllm:)?pd_cache_\w+[a-z]\b(?!_)", page.read_text()):
        assert re.sub("^vllm:|_(total|bucket|sum|count)$", "", name) in metrics, name


def test_the_site_has_every_page():
    site = (ROOT / "zensical.toml").read_text()
    assert [page for page in PAGES if f'"{page.relative_to(ROOT)}"' not in site] == []
