"""A node that computes nothing. It streams as many tokens as requested, at a steady pace. Benches of the
proxy use it.

python -m bench.lib.streaming_node NAME       prints `ready NAME URL` and serves until SIGTERM
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import time

from aiohttp import web

_EVENT = b'data: {"id": "cmpl-0", "object": "text_completion", "choices": [{"index": 0, "text": " token", "token_ids": [%d]}]}\n\n'


async def _completions(request: web.Request) -> web.StreamResponse:
    body = json.loads(await request.read())
    if body.get("kv_transfer_params", {}).get("do_remote_decode"):
        return web.json_response({"choices": [], "kv_transfer_params": {"do_remote_prefill": True}})
    pause = body["pause_ms"] / 1000
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    due = time.monotonic()
    for token in range(body["max_tokens"]):
        await response.write(_EVENT % token)
        due += pause
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    await response.write(b"data: [DONE]\n\n")
    return response


async def _health(request: web.Request) -> web.Response:
    return web.json_response({"status": "ok"})


def main() -> None:
    """Serves until the process gets a signal."""
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/v1/completions", _completions)
    app.router.add_get("/health", _health)
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as listener:
        print(f"ready {sys.argv[1]} http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        web.run_app(app, sock=listener, backlog=1024, print=None, access_log=None)


if __name__ == "__main__":
    main()
