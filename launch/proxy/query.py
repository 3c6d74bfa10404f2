"""Serves `/query`: which node has how much of a prompt. For other routers; the form is that of Mooncake Conductor's indexer API.

A request is `{"model": "NAME", "token_ids": [1, 2, 3], "cache_salt": "…", "instance_id": "NODE"}`. The answer is `{"default": {"NODE":
{"longest_matched": 256, "GPU": 128, "CPU": 256, "DISK": 0, "DP": {"0": 256}}}}`, in tokens.
"""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
from aiohttp import web

from launch.proxy.answers import ApiError, overloaded
from launch.proxy.cache_view import CacheView
from launch.proxy.direct import DirectRule
from launch.proxy.keys import Keys
from pd_cache.decoding import UndecodableError, decode_json

_LARGEST = 4 << 20
"""The most bytes of a query: enough for a quarter of a million tokens."""
_MOST_AT_ONCE = 8
_READ_S = 10.0
_TENANT = "default"
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]


class Query(msgspec.Struct, frozen=True):
    """Which nodes have how much of these tokens? What Mooncake Conductor calls an instance is a node here."""

    token_ids: list[_Token]
    model: str | None = None
    lora_name: str | None = None
    lora_id: int | None = None
    tenant_id: str | None = None
    instance_id: str | None = None
    block_size: int | None = None
    cache_salt: str | None = None


def read_query(body: bytes) -> Query:
    """Reads a request's body. Raises ApiError if it is no query."""
    try:
        return decode_json(body, Query)
    except UndecodableError as error:
        raise ApiError(400, f"The body is no query: {error}", code="invalid_json") from None


class CacheQuery:
    """Answers queries from the index."""

    def __init__(self, direct: DirectRule, caches: CacheView, keys: Keys) -> None:
        """`direct` names prompts. A query needs the key of a monitor, as `/metrics` does."""
        self._direct = direct
        self._caches = caches
        self._keys = keys
        self._under_way = 0

    def add_to(self, app: web.Application) -> None:
        app.router.add_post("/query", self._answer)

    async def _answer(self, request: web.Request) -> web.Response:
        self._keys.check_watcher(request.headers.get("Authorization"))
        if self._under_way >= _MOST_AT_ONCE:
            raise overloaded("Too many queries at once")
        self._under_way += 1
        try:
            query = await asyncio.wait_for(_read(request), _READ_S)
            return web.json_response(await self._look(query))
        except TimeoutError:
            raise ApiError(408, f"The query took longer than {_READ_S:g} s to arrive") from None
        finally:
            self._under_way -= 1

    async def _look(self, query: Query) -> dict[str, dict[str, dict[str, object]]]:
        if query.tenant_id not in (None, "", _TENANT):
            return {}
        model = self._direct.model
        if (
            query.lora_name
            or query.lora_id not in (None, -1)
            or (model is not None and query.model not in (None, model))
        ):
            return {_TENANT: {}}
        prompt = await self._direct.name(query.token_ids, query.cache_salt)
        if prompt is None:
            raise overloaded(f"Prompts cannot be named now: {self._direct.blind or 'too many, or too long'}")
        if query.block_size not in (None, 0, prompt.block_tokens, prompt.chunk_tokens):
            sizes = f"{prompt.block_tokens} or {prompt.chunk_tokens}"
            raise ApiError(400, f"`block_size` is {query.block_size}, but here it is {sizes}", param="block_size")
        return {
            _TENANT: {
                name: {"longest_matched": longest, **media, "DP": {"0": longest}}
                for name, media in self._caches.hits(prompt).items()
                if query.instance_id in (None, name)
                for longest in (max(media.values()),)
            }
        }


async def _read(request: web.Request) -> Query:
    if (request.content_length or 0) > _LARGEST:
        raise ApiError(413, f"A query may have {_LARGEST} bytes")
    body = bytearray()
    async for piece in request.content.iter_any():
        body += piece
        if len(body) > _LARGEST:
            raise ApiError(413, f"A query may have {_LARGEST} bytes")
    return read_query(bytes(body))
