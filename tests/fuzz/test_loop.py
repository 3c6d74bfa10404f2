"""No body of up to a mebibyte holds the proxy's event loop for long, whatever its shape.

What counts is the processor time of the longest step, which other programs do not lengthen: a step of the
loop, or one call on another thread into C, which keeps the interpreter from the loop. A control is measured
beside it: what Python's own reader takes for a mebibyte of small objects.
"""

import asyncio
import gc
import json
import math
import os
import subprocess
import sys
import threading
import time
import zlib
from contextlib import asynccontextmanager, contextmanager
from unittest.mock import patch

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.launch.proxy.test_direct import looks_up
from tests.launch.proxy.test_hints import Renewing
from tests.support.cluster import cluster_file
from tests.support.proxy import cluster, message

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
MIB = 1 << 20
MOST = 2.0
"""How many controls the longest step may take; one takes 25 ms where this was written."""
CONTROL = b"[" + b"{}," * (MIB // 3) + b"{}]"
TOKENS = b'{"tokens": [' + b"7," * ((1 << 18) - 1) + b"7]}"


# --- bodies -------------------------------------------------------------------------------------------------

_ATOMS = st.sampled_from(
    [
        b"{}", b"[]", b'""', b"7", b"123456", b"-0", b"1e308", b"null", b"true", b'"x"', b'"\\u00e9"', b'"\xc3\xa9"', b"[1,2]", b'{"a":{}}',
        b'{"role":""}', b'{"role":"","content":[]}', b'{"type":"text"}', b'"' + b"a" * 32 + b'"', b"0." + b"1" * 800, b"[" * 900 + b"]" * 900,
    ]
)  # fmt: skip
_TEXTS = st.sampled_from(
    [b"x", b"\\n", b"\\u00e9", b"\\ud83d\\ude00", b"\xc3\xa9", b" ", b'\\"a\\":', b",", b":"]
)
_SIZES = st.sampled_from([MIB, MIB // 2, MIB // 4 - 200, 5000]).map(lambda size: size - 500)


def _keyed(atom, size):
    return b",".join(b'"%x":' % number + atom for number in range(size // (len(atom) + 9)))


_LAYOUTS = {
    "a list": lambda atom, text, size: b"[" + b",".join([atom] * (size // (len(atom) + 1))) + b"]",
    "keys": lambda atom, text, size: b"{" + _keyed(atom, size) + b"}",
    "one key again and again": lambda atom, text, size: b"{" + b",".join([b'"":' + atom] * (size // (len(atom) + 4))) + b"}",
    "a text": lambda atom, text, size: b'"' + text * (size // len(text)) + b'"',
    "deep lists": lambda atom, text, size: b"[" * (size // 2) + b"]" * (size // 2),
    "deep objects": lambda atom, text, size: b'{"a":' * (size // 6) + b"1" + b"}" * (size // 6),
    "a number": lambda atom, text, size: b"9" * size,
    "a fraction": lambda atom, text, size: b"0." + b"9" * size,
    "spaces": lambda atom, text, size: b" " * size + atom,
    "parts": lambda atom, text, size: b'[{"role":"","content":[' + b",".join([atom] * (size // (len(atom) + 1))) + b"]}]",
    "fields": lambda atom, text, size: b'"x",' + _keyed(atom, size),
}  # fmt: skip
_PLACES = {
    "/v1/completions": ("prompt", "model", "max_tokens", "cache_salt", "logit_bias", "kv_hints", "kv_transfer_params", "documents", "x"),
    "/v1/chat/completions": ("messages", "tools", "reasoning_effort"),
    "/query": ("token_ids", "model"),
    "/hints": ("tokens", "prompt", "messages", "block_hashes", "x", "ttl_s"),
}  # fmt: skip
_PROMPTS = {
    "/v1/completions": b'"prompt"',
    "/v1/chat/completions": b'"messages"',
    "/query": b'"token_ids"',
    "/hints": b'"prompt"',
}


@st.composite
def bodies(draw):
    path, layout = draw(st.sampled_from(sorted(_PLACES))), draw(st.sampled_from(sorted(_LAYOUTS)))
    field = draw(st.sampled_from(_PLACES[path])).encode()
    body = b'{"%b":' % field + _LAYOUTS[layout](draw(_ATOMS), draw(_TEXTS), draw(_SIZES)) + b"}"
    if b'"%b"' % field != _PROMPTS[path]:
        few = (
            b'[{"role":"user","content":"%b"}]' % (b"x" * 5000)
            if path.endswith("chat/completions")
            else b"[7]"
        )
        body = b"{" + _PROMPTS[path] + b":" + few + b"," + body[1:]
    if path == "/hints":
        head, tail = message("kv.retain", {"ttl_s": 9, "here": 0}).split(b'"here": 0')
        body = head + body[1:-1] + tail
    return path, body, "identity"


def compressed():
    """A mebibyte that is a gibibyte of spaces."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return packer.compress(b" " * (1 << 30)) + packer.flush()


# --- how long they hold the loop ----------------------------------------------------------------------------


class Steps:
    """The longest step of the loop, and the longest call into C on the threads that begin in this block."""

    def __init__(self):
        self.longest = 0.0
        self._began = threading.local()

    @contextmanager
    def watched(self):
        run = asyncio.Handle._run

        def timed(handle):
            began = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - began)

        threading.setprofile(self._profile)
        try:
            with patch.object(asyncio.Handle, "_run", timed):
                yield
        finally:
            threading.setprofile(None)

    def _profile(self, frame, event, argument):
        if event == "c_call":
            self._began.at = time.thread_time()
        elif event in ("c_return", "c_exception"):
            now = time.thread_time()
            self.longest = max(self.longest, now - getattr(self._began, "at", now))


def control():
    began = time.thread_time()
    json.loads(CONTROL)
    return time.thread_time() - began


async def _serve(reader, writer):
    """A node that does not look at what it is sent, so that it takes next to no time of the loop."""
    while head := (await reader.readline()).decode().lower():
        length = 0
        while (line := await reader.readline()).strip():
            name, _, value = line.decode().lower().partition(":")
            length = int(value) if name == "content-length" else length
        while length:
            length -= len(await reader.read(min(length, 1 << 16)))
        body = TOKENS if "/tokenize" in head else b"{}"
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
    writer.close()


@asynccontextmanager
async def proxy():
    node = await asyncio.start_server(_serve, "127.0.0.1", 0)
    url = "http://{}:{}".format(*node.sockets[0].getsockname())
    async with node, cluster([url], [url], **looks_up(Renewing(0))) as c:
        c.proxy._hints._pool_bytes = lambda view: 1 << 40
        yield c.url.removeprefix("http://")


async def post(address, body):
    """Returns the answer's first line."""
    reader, writer = await asyncio.open_connection(*address.split(":"))
    path, data, encoding = body
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Encoding: {encoding}\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode())
    for start in range(0, len(data), 1 << 16):
        writer.write(data[start : start + (1 << 16)])
        await writer.drain()
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    return answer.partition(b"\r\n")[0]


def test_no_body_of_a_mebibyte_holds_the_event_loop():
    steps = Steps()
    with asyncio.Runner() as runner, steps.watched():
        entered = proxy()
        address = runner.run(entered.__aenter__())
        gc.collect()
        gc.freeze()  # so that a collection looks only at what a body made

        @settings(
            max_examples=EXAMPLES or 60, derandomize=not EXAMPLES, database=None, deadline=None, suppress_health_check=list(HealthCheck)
        )  # fmt: skip
        @given(bodies())
        @example(("/v1/chat/completions", b'{"messages":[' + b"{}," * (MIB // 3 - 9) + b"{}]}", "identity"))
        @example(("/v1/completions", compressed(), "gzip"))
        def post_some(body):
            # a busy machine lengthens both now and then, so the shortest of each counts
            steps_of, controls = [math.inf], [control(), control()]
            while len(steps_of) < 10 and min(steps_of) > MOST * min(controls):
                steps.longest = 0.0
                answer = runner.run(post(address, body))
                steps_of.append(steps.longest)
                controls.append(control())
                assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4", b"HTTP/1.1 503")), answer
            assert min(steps_of) <= MOST * min(controls), (body[0], len(body[1]), body[1][:80])

        try:
            post_some()
        finally:
            gc.unfreeze()
            runner.run(entered.__aexit__(None, None, None))


STARTED = """
import gc, os, signal, sys
from pathlib import Path
from launch.cli import read_config
from launch.run.roles import run_role

def ready(url):
    print(len(gc.get_objects()), gc.get_freeze_count(), flush=True)
    os.kill(os.getpid(), signal.SIGTERM)

config, _ = read_config(Path(sys.argv[1]))
run_role(config, config.node("proxy"), ready)
"""


def test_a_full_collection_in_a_running_proxy_does_not_look_at_what_it_imported(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", STARTED, cluster_file(tmp_path)], check=True, stdout=subprocess.PIPE
    )
    looked_at, left_alone = map(int, done.stdout.split())
    assert looked_at < left_alone / 5
