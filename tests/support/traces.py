"""Small traces of conversations, made up, in the format of the public ones."""

import gzip
import random

import msgspec

from bench.lib.trace import BLOCK_TOKENS, Request


def conversations(count, turns):
    """Conversations that take turns: each turn repeats all that was said, and says three blocks more."""
    rng, requests = random.Random(0), []
    for turn in range(turns):
        for one in range(count):
            blocks = [one * 1000 + block for block in range(3 * (turn + 1))]
            requests.append(
                Request((turn * count + one) * 100.0 + rng.random(), len(blocks) * BLOCK_TOKENS, blocks)
            )
    return requests


def write_trace(file, requests):
    """The file, gzipped if its name says so."""
    lines = b"\n".join(map(msgspec.json.encode, requests)) + b"\n"
    file.write_bytes(gzip.compress(lines) if file.suffix == ".gz" else lines)
    return file
