"""Damages objects in the pool behind the cache's back, until it is killed: `python -m bench.suites.soak.vandal MASTER METRICS HOST SEED`.

A bare Mooncake client takes chunks out and puts others back under the same key: with bytes flipped, cut short, made longer, or those
of another chunk. Prints a line of JSON for each.
"""

from __future__ import annotations

import json
import random
import sys
import time
import urllib.request

from bench.lib.pool import raw_client

_KEYS_S = 5.0
_PAUSE_S = 0.05


def damaged(value: bytes, other: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Returns in a word what was done to `value`, and the damaged bytes; `other` is another object."""
    how = rng.choice(("flipped", "truncated", "longer", "foreign"))
    if how == "truncated":
        return how, value[: rng.randrange(1, len(value))]
    if how == "longer":
        return how, value + rng.randbytes(100)
    if how == "foreign" and other != value:
        return how, other
    place = rng.randrange(len(value))
    return "flipped", value[:place] + bytes([value[place] ^ (1 << rng.randrange(8))]) + value[place + 1 :]


def main(master: str, metrics: str, host: str, seed: str) -> None:
    rng = random.Random(int(seed))
    keys: list[str] = []
    read_at = 0.0
    with raw_client(master, host) as client:
        while True:
            if not keys or time.monotonic() - read_at > _KEYS_S:
                with urllib.request.urlopen(f"{metrics}/get_all_keys", timeout=5) as page:
                    keys = [key for key in page.read().decode().split() if key.startswith("pdc1/") and key.count("/") == 3]  # fmt: skip
                read_at = time.monotonic()
            if len(keys) > 1:
                key, other = rng.sample(keys, 2)
                value = client.get(key)
                if value:
                    how, bad = damaged(value, client.get(other), rng)
                    client.batch_remove([key], True)
                    code = client.put(key, bad)
                    print(json.dumps({"e": "damaged", "how": how, "code": code}), flush=True)
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
