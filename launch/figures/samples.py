"""Reads Prometheus' text format, as far as our nodes' metrics need it.

prometheus_client's parser takes ten times as long, which a proxy does not have to spare beside its requests.
"""

from __future__ import annotations

import re

from pd_cache.decoding import one_line

Samples = dict[str, list[tuple[dict[str, str], float]]]
"""The labels and the value of each sample, by the sample's name without vLLM's prefix."""

_OURS = ("pd_cache_", "vllm:", "process_start_time_seconds", "master_", "segment_")
_VLLM = "vllm:"
"""The prefix of all metrics, ours included, that vLLM exports."""
_MOST_SAMPLES = 20_000
_LONGEST_LINE = 8192
_MOST = 2.0**62
"""More than any node can have counted; seconds and bytes are below it, too."""
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*\s*=\s*"(?:[^"\\\n]|\\.)*"'
# each part begins with a character with which the one before cannot go on, so that no line takes more than linear time
_LINE = re.compile(
    r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:[ \t]*\{[ \t]*((?:" + _LABEL + r"[ \t]*(?:,[ \t]*)?)*)\}[ \t]*|[ \t]+)([^ \t{}]+)"
    r"(?:[ \t]+-?[0-9]+)?[ \t]*"
)
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\\n]|\\.)*)"')
_ESCAPE = re.compile(r"\\(.)")
_ESCAPED = {"n": "\n", '"': '"', "\\": "\\"}


def read_samples(text: str) -> Samples:
    """Returns the samples of the families that pd-cache, vLLM and Mooncake's master export.

    Leaves out values that are not numbers, negative or infinite: they are none of our counts. Raises ValueError for text that Prometheus
    could not read, or with more than 20,000 such samples.
    """
    found: Samples = {}
    count, first = 0, True
    for line in text.split("\n"):
        ours = line.startswith(_OURS)
        if not ours and (not first or not line.strip() or line.startswith("#")):
            continue
        first = False  # one line of others is read, too: a page of another kind has none like it
        read = _LINE.fullmatch(line.rstrip("\r")) if len(line) <= _LONGEST_LINE else None
        if read is None:
            raise ValueError(f"not a line of Prometheus' metrics: {one_line(line[:80])}")
        name, labels, shown = read.groups()
        try:
            value = float(shown)
        except ValueError:
            raise ValueError(f"not a number: {one_line(shown[:80])}") from None
        if not ours or not 0 <= value < _MOST:
            continue
        count += 1
        if count > _MOST_SAMPLES:
            raise ValueError(f"more than {_MOST_SAMPLES} samples")
        pairs = {key: _plain(raw) for key, raw in _PAIR.findall(labels)} if labels else {}
        found.setdefault(name.removeprefix(_VLLM), []).append((pairs, value))
    return found


def total(samples: Samples, name: str) -> float:
    """Returns the sum of all samples of a name; 0 if there are none."""
    return sum(value for _, value in samples.get(name, ()))


def _plain(raw: str) -> str:
    return _ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[0]), raw) if "\\" in raw else raw
