"""Draws the first-token times of `pd-cache bench ttft --json` as an SVG, for light and dark pages.

    pd-cache bench ttft --json >> runs.jsonl        once for each run and model
    python tools/plot-ttft.py runs.jsonl > docs/images/ttft.svg

Each line of the file is one run. A bar is the median over the runs of its model and length. Needs nothing but
Python.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from pathlib import Path

MODELS = {
    "llama": "Llama",
    "gemma3": "Gemma 3",
    "gptoss": "gpt-oss",
    "qwen3next": "Qwen3-Next",
    "mamba2": "Nemotron-H",
    "mla": "MLA",
    "ernie": "Ernie 4.5",
}
BARS = {
    "warm_ms": "vLLM's own cache, warm",
    "ours_b_ms": "pool, pd-cache",
    "theirs_b_ms": "pool, MooncakeStoreConnector",
}
LEFT, RIGHT, BAR, GAP = 172, 690, 17, 18
STYLE = """
    svg { --ink: #1f2328; --dim: #59636e; --warm: #afb8c1; --ours: #0969da; --theirs: #bc4c00 }
    @media (prefers-color-scheme: dark) { svg { --ink: #f0f6fc; --dim: #b1bac4; --warm: #6e7681; --ours: #58a6ff; --theirs: #db8c5a } }
    text { font: 19px system-ui, -apple-system, "Segoe UI", sans-serif; fill: var(--ink) }
    .model { text-anchor: end } .ms { font-size: 16px; fill: var(--dim) } rect { rx: 2 }
    .warm_ms { fill: var(--warm) } .ours_b_ms { fill: var(--ours) } .theirs_b_ms { fill: var(--theirs) }
"""


def plot(lines: list[str]) -> str:
    """Returns the SVG of runs, each a JSON object of the bench. Raises KeyError if one lacks a figure."""
    runs: dict[tuple[str, int], dict[str, list[float]]] = defaultdict(lambda: {bar: [] for bar in BARS})
    for run in map(json.loads, lines):
        for row in run["results"]:
            for bar, values in runs[run["model"], row["tokens"]].items():
                values.append(row[bar])
    medians = {
        key: {bar: statistics.median(values) for bar, values in bars.items()} for key, bars in runs.items()
    }
    scale = (RIGHT - LEFT) / max(max(bars.values()) for bars in medians.values())
    y, parts = 24, []
    for bar, says in BARS.items():
        parts.append(
            f'<rect class="{bar}" x="{LEFT}" y="{y - 14}" width="26" height="15"/><text x="{LEFT + 36}" y="{y}">{says}</text>'
        )
        y += 28
    for (model, tokens), bars in medians.items():
        y += GAP - 6
        parts.append(f'<text class="model" x="{LEFT - 14}" y="{y + 24}">{MODELS[model]}</text>')
        parts.append(f'<text class="model ms" x="{LEFT - 14}" y="{y + 45}">{tokens:,} tokens</text>')
        for bar, ms in bars.items():
            width = ms * scale
            parts.append(
                f'<rect class="{bar}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR - 2}"/>'
                f'<text class="ms" x="{LEFT + width + 8:.1f}" y="{y + BAR - 4}">{ms:.0f}</text>'
            )
            y += BAR
        y += 6
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 760 {y + 8}" role="img" aria-label="Time to first token in milliseconds">\n'
        f"  <style>{STYLE}  </style>\n  " + "\n  ".join(parts) + "\n</svg>"
    )


if __name__ == "__main__":
    print(
        plot([line for file in sys.argv[1:] for line in Path(file).read_text().splitlines() if line.strip()])
    )
