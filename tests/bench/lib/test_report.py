"""What benches report: in a terminal, as JSON."""

import json

import click
from click.testing import CliRunner

from bench.lib.report import at_least, finish, laid_out, output_options

NASTY = "a <b> & \"c\" [red]d[/] 'e' $f"


@click.command()
@output_options
def bench(**options):
    finish({"results": [{"a": NASTY}]}, [at_least(NASTY, 1.0, 2.0)], **options)


def test_the_terminal_shows_tables_and_targets_and_json_everything():
    done = CliRunner().invoke(bench, ["--check"], catch_exceptions=False)
    assert done.exit_code == 1
    assert "missed" in done.output
    assert "[red]d[/]" in done.output
    done = CliRunner().invoke(bench, ["--json"], catch_exceptions=False)
    check = {"name": NASTY, "value": 1.0, "limit": 2.0, "ok": False}
    everything = json.loads(done.stdout)
    assert set(everything.pop("about")) == {"command", "date", "machine", "versions"}
    assert everything == {"results": [{"a": NASTY}], "checks": [check], "ok": False}


def test_a_few_long_rows_stand_side_by_side():
    row = {"tokens": 512, "a": 1, "b": 2, "c": 3, "d": 4}
    assert laid_out([row, row | {"tokens": 1024}])[0] == list(row)
    assert laid_out([row]) == (["", "tokens 512"], [["a", 1], ["b", 2], ["c", 3], ["d", 4]])
