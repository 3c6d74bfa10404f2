"""Damages objects in the pool until it is killed: `python -m tests.soak.vandal MASTER METRICS HOST SEED`.

A bare Mooncake client takes objects out and puts others back under their keys. It imports little, so that it
begins at once.
"""

import random
import sys
import time
import urllib.request

from transfer.settings import TransferSettings, prepare
from transfer.store import load_mooncake


def damaged(value, other, rng):
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


def main(master, metrics, host, seed):
    """Prints a line for each object."""
    prepare(TransferSettings())
    client = load_mooncake().MooncakeDistributedStore()
    if code := client.setup(host, "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", master):
        sys.exit(f"setup answered {code}")
    rng, keys, read_at = random.Random(int(seed)), [""], float("-inf")
    while True:
        if time.monotonic() - read_at > 2.0:
            with urllib.request.urlopen(f"{metrics}/get_all_keys", timeout=5) as page:
                keys = [key for key in page.read().decode().split() if key.startswith("pdc1/")]
            read_at = time.monotonic()
        key = rng.choice(keys or [""])
        if value := client.get(key) if key else b"":
            how, bad = damaged(value, client.get(rng.choice(keys)) or value, rng)
            client.batch_remove([key], True)
            code = client.put(key, bad)
            print(f"put into the pool, {how if code == 0 else 'in vain'}", flush=True)
        time.sleep(0.05)


if __name__ == "__main__":
    main(*sys.argv[1:])
