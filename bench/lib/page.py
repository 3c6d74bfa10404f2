"""A bench's report as one HTML file: tables and plots, for light and dark screens, wide and narrow. It loads nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from bench.lib.report import Check, Figure, Report, Table, shown
from bench.lib.svg import STYLE

_STYLE = """
:root{color-scheme:light dark;--ink:#1e293b;--quiet:#475569;--line:#cbd5e1;--paper:#fff;--band:#f1f5f9;--good:#047857;--bad:#b91c1c}
@media (prefers-color-scheme:dark){:root{--ink:#e2e8f0;--quiet:#a8b3c4;--line:#3b4659;--paper:#111827;--band:#1b2536;--good:#34d399;--bad:#f87171}}
*{box-sizing:border-box}
body{margin:0 auto;padding:1.5rem 1rem 4rem;max-width:72rem;font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.6rem;line-height:1.25;margin:.2rem 0 .6rem}
h2{font-size:1.1rem;margin:2.2rem 0 .5rem}
p{max-width:48rem;margin:.4rem 0}
.note,figcaption,dt{color:var(--quiet)}
.note,figcaption{font-size:.9rem}
.wide{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .8rem;text-align:left;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--quiet);font-weight:600}
tbody tr:nth-child(even){background:var(--band)}
.n{text-align:right}
.met{color:var(--good)}.missed{color:var(--bad);font-weight:600}
figure{margin:1.2rem 0}
svg.plot{display:block;width:100%;height:auto}
dl{display:grid;grid-template-columns:max-content 1fr;gap:.2rem 1rem;margin:.5rem 0}
dd{margin:0;overflow-wrap:anywhere}
pre{overflow-x:auto;padding:.8rem;background:var(--band);font-size:.8rem}
@media (max-width:40rem){td:first-child{white-space:normal}th,td{padding:.3rem .5rem}dl{grid-template-columns:1fr;gap:0}dd{margin-bottom:.5rem}}
@media print{.wide{overflow:visible}}
"""


def page(report: Report, checks: Sequence[Check], results: Mapping[str, Any]) -> str:
    """Returns the whole document. `results` are shown as JSON at its end, folded away."""
    parts = [_table(part) if isinstance(part, Table) else _figure(part) for part in report.parts]
    title = escape(report.title)
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en">',
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">""",
            f"<title>{title}</title>",
            f"<style>{_STYLE}{STYLE}</style>",
            f"<h1>{title}</h1>",
            f"<p>{escape(report.summary)}</p>" if report.summary else "",
            _checks(checks),
            *parts,
            _about(report.about),
            f"<details><summary>All figures, as JSON</summary><pre>{escape(json.dumps(results, indent=1))}</pre></details>",
            "</html>\n",
        )
    )


def _table(table: Table) -> str:
    numeric = [
        any(_is_number(row[index]) for row in table.rows) and all(_is_number(row[index]) or row[index] is None for row in table.rows)
        for index in range(len(table.columns))
    ]  # fmt: skip
    kinds = [' class="n"' if one else "" for one in numeric]
    head = "".join(f"<th{kind}>{escape(name)}</th>" for kind, name in zip(kinds, table.columns, strict=True))
    body = "\n".join(
        "<tr>" + "".join(f"<td{kind}>{escape(shown(value))}</td>" for kind, value in zip(kinds, row, strict=True)) + "</tr>"
        for row in table.rows
    )  # fmt: skip
    return "\n".join(
        (
            f"<section><h2>{escape(table.title)}</h2>" if table.title else "<section>",
            f'<div class="wide"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>',
            f'<p class="note">{escape(table.note)}</p>' if table.note else "",
            "</section>",
        )
    )


def _figure(figure: Figure) -> str:
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else ""
    return f'<figure><div class="wide">{figure.plot.inline()}</div>{caption}</figure>'


def _checks(checks: Sequence[Check]) -> str:
    if not checks:
        return ""
    rows = "\n".join(
        f'<tr><td>{escape(check.name)}</td><td class="n">{shown(check.value)}</td>'
        f'<td class="n">{"≥" if check.at_least else "≤"} {shown(check.limit)}</td>'
        f'<td class="{verdict}">{verdict}</td></tr>'
        for check in checks
        for verdict in ("met" if check.ok else "missed",)
    )
    head = '<tr><th>target</th><th class="n">value</th><th class="n">limit</th><th></th></tr>'
    return f'<section><h2>Targets</h2><div class="wide"><table><thead>{head}</thead>\n<tbody>\n{rows}\n</tbody></table></div></section>'


def _about(facts: Mapping[str, str]) -> str:
    if not facts:
        return ""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    return f"<section><h2>How it was measured</h2><dl>{listed}</dl></section>"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
