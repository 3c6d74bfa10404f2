"""Decoding what others wrote, on many threads."""

import sys

from tests.support.cli import printed

FIRST_USE = """
import sys, threading
from pd_cache.decoding import decode_json
sys.setswitchinterval(1e-6)
SOURCE = '''
from typing import Annotated
import msgspec
class Part(msgspec.Struct, frozen=True):
    name: Annotated[str, msgspec.Meta(max_length=64)] | None = None
    fields: dict[str, str | int] | None = None
class Whole(Part, frozen=True):
    count: int = 0
    parts: list[Part] = []
'''
for _ in range(200):
    module = {"__name__": "__main__"}
    exec(SOURCE, module)
    sys.modules["__main__"].__dict__.update(module)
    together = threading.Barrier(8)
    def decode():
        together.wait()
        assert decode_json(b'{"count": 3, "parts": [{"name": "x"}]}', module["Whole"]).count == 3
    threads = [threading.Thread(target=decode) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print("done")
"""


def test_threads_that_decode_a_type_for_the_first_time_together_do_not_crash_the_process():
    assert printed(sys.executable, "-c", FIRST_USE) == "done\n"
