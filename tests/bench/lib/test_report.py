"""What benches tell: in a terminal, as JSON, as a page; and the plots on it."""

from __future__ import annotations

import html.parser
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from bench.lib.about import about
from bench.lib.report import Check, Figure, Report, Table, finish, report_options
from bench.lib.svg import SERIES, Bars, Plot, bar_plot, line_plot, matrix_plot
from pd_cache.cluster import ClusterConfig, MasterNode
from pd_cache.config import CacheConfig
from transfer.settings import TransferSettings

NASTY = "a <b> & \"c\" [red]d[/] 'e'"
PLOTS = (
    bar_plot(NASTY, "GB/s", (NASTY,), [Bars(NASTY, (1.0,))]),
    line_plot(NASTY, NASTY, NASTY, {NASTY: [(10.0, 1.0), (1000.0, 2.0)]}),
    matrix_plot(NASTY, "GB/s", (NASTY, "x"), ("y", NASTY), ((1.0, None), (0.5, 2.0))),
)


@click.command()
@report_options
def bench(**options: object) -> None:
    report = Report(
        NASTY,
        summary=NASTY,
        parts=[Table(NASTY, (NASTY, "n"), ((NASTY, 1.5), ("x", None))), *(Figure(plot, NASTY) for plot in PLOTS)],
        about={NASTY: NASTY},
    )
    finish({"results": [{"a": NASTY}]}, [Check(NASTY, 1.0, 2.0, at_least=True)], report=report, **options)  # type: ignore[arg-type]


class _Page(html.parser.HTMLParser):
    """What a browser would find in a document."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "rect", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_is_whole_loads_nothing_and_shows_text_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    done = CliRunner().invoke(bench, ["--html", str(file)], catch_exceptions=False)
    assert done.exit_code == 0
    text = file.read_text()
    found = _Page(text)
    assert found.open == [], "every element is closed"
    assert not {"script", "link", "img", "iframe", "b"} & {tag for tag, _ in found.tags}
    assert not [attributes for _, attributes in found.tags if {"src", "href"} & attributes.keys()]
    assert not re.search(r"url\(|@import|https?://", text)
    assert sum(tag == "svg" for tag, _ in found.tags) == len(PLOTS)
    assert found.texts.count(NASTY) >= 8
    assert "missed" in found.texts
    assert "prefers-color-scheme:dark" in text


def test_the_terminal_shows_tables_and_targets(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, [], catch_exceptions=False, env={"COLUMNS": "200"})
    assert NASTY in done.output
    assert "1.500" in done.output
    assert "missed" in done.output
    assert CliRunner().invoke(bench, ["--check"]).exit_code == 1


def test_json_has_everything_and_nothing_beside_it() -> None:
    done = CliRunner().invoke(bench, ["--json"], catch_exceptions=False)
    report = json.loads(done.output)
    assert report["results"] == [{"a": NASTY}]
    assert report["ok"] is False
    assert report["checks"][0]["name"] == NASTY


def test_a_page_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    done = CliRunner().invoke(bench, ["--html", str(tmp_path / "nowhere" / "report.html")])
    assert done.exit_code == 2
    assert "is no folder" in done.output


@pytest.mark.parametrize("plot", PLOTS, ids=("bars", "lines", "matrix"))
def test_plots_are_svg_and_escape_what_they_are_given(plot: Plot) -> None:
    texts = [element.text for element in ET.fromstring(plot.svg()).iter()]
    assert any(text is not None and text.startswith(NASTY) for text in texts)
    ET.fromstring(plot.inline())


def test_a_plot_with_more_series_than_colours_is_refused() -> None:
    lines = {str(index): [(1.0, 1.0)] for index in range(SERIES + 1)}
    with pytest.raises(ValueError, match="9 series"):
        line_plot("t", "x", "y", lines)


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(1.0, 5.0), (1.0, 7.0)], [(x, x**2) for x in range(1, 100)]])
@pytest.mark.parametrize("log_x", [True, False])
def test_lines_stay_inside_of_the_plot(points: list[tuple[float, float]], log_x: bool) -> None:
    plot = line_plot("t", "x", "y", {"a": points}, log_x=log_x)
    root = ET.fromstring(plot.inline())
    line = next(element for element in root.iter() if element.tag == "polyline")
    for pair in line.attrib["points"].split():
        x, y = map(float, pair.split(","))
        assert 0 <= x <= plot.width
        assert 0 <= y <= plot.height


@pytest.mark.parametrize(
    ("program", "told"),
    [("/somewhere/bench/suites/lookup.py", "pd-cache bench lookup --rounds 5"), ("/usr/bin/mine", "mine --rounds 5")],
)
def test_the_command_is_told_as_it_can_be_typed_again(program: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [program, "--rounds", "5"])
    assert about()["command"] == told


def test_what_is_told_about_a_run_names_the_settings_that_are_not_the_defaults() -> None:
    config = ClusterConfig(
        nodes=(MasterNode(name="m"),), transfer=TransferSettings(threads=3), cache=CacheConfig(chunk_size=64)
    )
    facts = about(config, more="x")
    assert facts["transfer"] == "threads: 3"
    assert facts["cache"] == "chunk_size: 64"
    assert facts["more"] == "x"
    assert "pd-cache 0" in facts["versions"]
    assert "mooncake" in facts["versions"]
