"""Serves `/v1/models`: the models that decode nodes say they serve, in one list.

The answer says nothing about how a node computes, so it never counts for or against the node. Only a refused connection counts.
"""

from __future__ import annotations

import asyncio
import time

import msgspec
from aiohttp import web

from launch.proxy.answers import overloaded, passed_on
from launch.proxy.completion import read_models
from launch.proxy.exchange import Exchange
from launch.proxy.hops import HopError, Refusal, check_status, read_all, refusal_of
from launch.proxy.nodes import Nodes

LIST_S = 10.0
"""How long the whole list may take."""
_AT_ONE_S = 3.0
_MAX_ANSWER = 4 << 20
_AT_A_TIME = 16
"""How many models nodes are asked for at a time, for all clients together."""
_MOST = 4
"""The most nodes that are asked for one model."""


class ModelList:
    """Serves the list of models."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._pool = nodes.pools["decode"]
        self._places = asyncio.Semaphore(_AT_A_TIME)

    async def serve(self, exchange: Exchange) -> web.Response:
        """Returns one node's answer for each model. Leaves out a model if none of its nodes answers."""
        models: list[str | None] = [*sorted(self._pool.models())] or [None]
        answers = await asyncio.gather(*(self._in_turn(exchange, model) for model in models))
        found = [entry for entries in answers if isinstance(entries, list) for entry in entries]
        if found:
            body = msgspec.json.encode({"object": "list", "data": found})
            return web.Response(body=body, content_type="application/json")
        for refusal in answers:
            if isinstance(refusal, Refusal):
                return passed_on(refusal)
        raise overloaded("No decode node could answer", self._pool.retry_after(time.monotonic()))

    async def _in_turn(self, exchange: Exchange, model: str | None) -> list[msgspec.Raw] | Refusal | None:
        """Does the same as `_of_one`, for a few models at a time, because completions need connections to nodes, too."""
        async with self._places:
            return await self._of_one(exchange, model)

    async def _of_one(self, exchange: Exchange, model: str | None) -> list[msgspec.Raw] | Refusal | None:
        """Returns the list of a node that serves `model`, or its refusal; None if no such node answers."""
        until = time.monotonic() + LIST_S / 2
        tried: set[str] = set()
        said: Refusal | None = None
        while (left := until - time.monotonic()) > 0 and len(tried) < _MOST:
            node = self._pool.out_of_turn(time.monotonic(), model, tried)
            if node is None:
                break
            tried.add(node)
            limit = min(left, _AT_ONE_S)
            try:
                answer = await asyncio.wait_for(self._at(exchange, node), limit)
            except TimeoutError:
                failure = HopError("timeout", f"no list of models within {limit:.3g} s")
            except HopError as error:
                failure = error
            else:
                self._pool.reached(node)
                return answer
            said = failure.refusal or said
            self._nodes.failed(exchange, "decode", node, None, failure)
        return said

    async def _at(self, exchange: Exchange, node: str) -> list[msgspec.Raw] | Refusal:
        answer = await self._nodes.send(exchange, "decode", node, "GET", None)
        try:
            await check_status(answer)
            if answer.status >= 400:
                return await refusal_of(answer)
            try:
                return read_models(await read_all(answer, _MAX_ANSWER))
            except ValueError as error:
                raise HopError("garbage", str(error)) from error
        finally:
            answer.close()
