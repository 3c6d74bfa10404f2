"""Picks decode nodes for gateways: an endpoint picker over Envoy's external processing. The proxy does all
that comes before the decode node, and the gateway sends the request to that node.

A request is one gRPC stream. The gateway sends the request's headers and body. The picker returns the node
and the body for it. Then the gateway sends the head of the answer, and the stream ends. So the answer's bytes
do not pass through the picker, unless the gateway sends them, too (as Istio and kgateway do).
"""

from __future__ import annotations

import asyncio
import socket
import time
import urllib.parse
import uuid
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import grpc
from multidict import CIMultiDict, CIMultiDictProxy

from launch.openai import ID_HEADER, ApiError, check_encoding, given_id
from launch.proxy.bodies import ClientGone, read_body
from launch.proxy.exchange import Exchange
from launch.proxy.gateway.ext_proc import (
    FULL_DUPLEX_STREAMED,
    OVERWRITE_IF_EXISTS_OR_ADD,
    ProcessingRequest,
    ProcessingResponse,
)
from launch.proxy.hops import free_frames, no_answer
from launch.proxy.nodes import HopError
from launch.proxy.requests import CHAT, COMPLETIONS, Requests
from launch.proxy.routing.node_pool import Attempts, NodePool, Reason
from pd_cache.cluster import LARGEST_BODY, ServerTlsConfig

ENDPOINT = "x-gateway-destination-endpoint"
_SUBSET = f"{ENDPOINT}-subset"
_DEADLINE = "x-envoy-upstream-rq-timeout-ms"
_PIECE = 60_000
"""The most bytes of a body in a message: gateways may refuse more than 64 KiB."""


async def serve(requests: Requests, address: str, tls: ServerTlsConfig | None) -> grpc.aio.Server:
    """Starts a server for gateways at `host:port` or `unix:path`, and returns it. Raises OSError if the
    address cannot be bound."""
    # more streams than requests, so that a refused request gets its answer too
    most = 2 * requests.config.max_requests
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)], maximum_concurrent_rpcs=most)
    process = grpc.stream_stream_rpc_method_handler(
        _Picker(requests).process, ProcessingRequest.FromString, ProcessingResponse.SerializeToString
    )
    service = "envoy.service.ext_proc.v3.ExternalProcessor"
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, {"Process": process})])
    try:
        if tls is None:
            server.add_insecure_port(address)
        else:
            server.add_secure_port(address, _credentials(tls))
    except RuntimeError as error:
        raise OSError(f"{address}: {error}") from error
    await server.start()
    return server


def _credentials(tls: ServerTlsConfig) -> grpc.ServerCredentials:
    """Returns credentials that read the files at each handshake."""

    def read() -> Any:
        pair = Path(tls.key_file).read_bytes(), Path(tls.cert_file).read_bytes()
        return grpc.ssl_server_certificate_configuration([pair])

    return grpc.dynamic_ssl_server_credentials(read(), read)


class _Picker:
    def __init__(self, requests: Requests) -> None:
        self._requests = requests

    async def process(self, messages: Any, stream: Any) -> None:
        try:
            async with asyncio.timeout(self._requests.config.request_timeout_s):
                first = await stream.read()
                if first is not grpc.aio.EOF and first.HasField("response_headers"):
                    # the gateway refuses the request itself
                    await _answer(first, {}, stream)
                    return
        except TimeoutError:
            return
        if first is grpc.aio.EOF or not first.HasField("request_headers"):
            await stream.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with a request's headers")
        headers = CIMultiDictProxy(CIMultiDict(_pairs(first.request_headers)))
        request_id = given_id(headers) or uuid.uuid4().hex
        path = headers.get(":path", "").partition("?")[0]
        exchange = self._requests.new(request_id, path, headers)
        try:
            await self._answered(exchange, first, stream)
        except ApiError as error:
            free_frames(error)  # now also that of `_answered`, which refers to the stream
            refused = error.response()
            refused.headers[ID_HEADER] = request_id
            answer = {
                "status": {"code": error.status},
                "headers": _set(refused.headers),
                "body": refused.body,
            }
            try:
                await stream.write(ProcessingResponse(immediate_response=answer))
            except grpc.aio.InternalError:  # the write of a decision that was cut off is still under way
                await stream.abort(grpc.StatusCode.UNAVAILABLE, error.message)
        except ClientGone:
            pass

    async def _answered(self, exchange: Exchange, first: Any, stream: Any) -> None:
        """Picks a node, and notes how its answer begins. Raises ApiError with the error for the client,
        ClientGone if the gateway ended the stream."""
        requests, pool = self._requests, self._requests.hops.pools["decode"]
        limit_s, pieces = requests.config.request_timeout_s, _Pieces(first, stream)

        async def read() -> bytes:
            method = exchange.headers.get(":method", "")
            if exchange.path not in (COMPLETIONS, CHAT) or method != "POST":
                raise ApiError(404, f"{method} {exchange.path[:200]}: Not Found", code="not_found")
            if first.protocol_config.request_body_mode != FULL_DUPLEX_STREAMED:
                raise ApiError(500, "The gateway's `request_body_mode` must be FULL_DUPLEX_STREAMED")
            check_encoding(exchange.headers)
            # with a place, or many clients that send half a body would take all streams
            with requests.admission.admitted(exchange.client):
                return await read_body(aiter(pieces), exchange.share, LARGEST_BODY, limit_s)

        async with requests.accepted(exchange, read):
            exchange.excluded = await _excluded(first, pool)
            await requests.prepare(exchange)
            exchange.excluded = await _excluded(first, pool)  # nodes may have come meanwhile
            attempts = Attempts(pool, exchange.trial, first=exchange.decode_node, tried=exchange.excluded)
            while (node := attempts.next(time.monotonic())) and not (address := await _address(node)):
                failure = HopError("unreachable", "its name is not known")
                requests.hops.failed(exchange, "decode", node, attempts, failure)
            if node is None:
                raise no_answer(attempts)
            with requests.hops.asking(exchange, "decode", node) as (headers, asked):
                left_s = max(0.001, limit_s - (time.monotonic() - exchange.started))
                sent = {ENDPOINT: address, _DEADLINE: str(int(left_s * 1000)), **headers}
                # if a deadline cut the write that also sends these, gRPC could no longer end the stream
                await stream.send_initial_metadata(())
                for message in _decision(exchange, sent, pieces.trailers):
                    await stream.write(message)
                exchange.decode_body = b""
                head = await stream.read()
                if head is grpc.aio.EOF or not head.HasField("response_headers"):
                    raise ClientGone
                answer = dict(_pairs(head.response_headers))
                exchange.status = exchange.answer_status = status = int(answer.get(":status", "0"))
                exchange.streamed = answer.get("content-type", "").startswith("text/event-stream")
                if status >= 500:
                    # only the gateway knows whether there was a connection
                    fields = (field for entry in head.attributes for field in entry.value.fields)
                    unreachable = any("connection_failure" in field.value.string_value for field in fields)
                    reason: Reason = "unreachable" if unreachable else "busy" if status == 503 else "error"
                    failure = HopError(reason, f"status {status}")
                    requests.hops.failed(exchange, "decode", node, attempts, failure)
                else:
                    attempts.answered(node, time.monotonic(), well=status < 300)
                requests.answering(exchange, asked, well=status < 300)
            await _answer(first, await exchange.answer_headers(), stream)


class _Pieces:
    """A request's body, piece by piece, and whether trailers end it."""

    def __init__(self, first: Any, stream: Any) -> None:
        self._ended = first.request_headers.end_of_stream
        self._stream = stream
        self.trailers = False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while not self._ended:
            message = await self._stream.read()
            if message is grpc.aio.EOF:
                raise ClientGone
            self.trailers = message.HasField("request_trailers")
            self._ended = self.trailers or message.request_body.end_of_stream
            yield message.request_body.body


async def _excluded(first: Any, pool: NodePool) -> Collection[str]:
    """Returns the nodes that the gateway does not allow."""
    if (subset := _subset(first)) is None:
        return ()
    addresses = await asyncio.gather(*map(_address, urls := list(pool.nodes)))
    return {url for url, its in zip(urls, addresses, strict=True) if its not in subset}


def _subset(first: Any) -> Collection[str] | None:
    """Returns the addresses that the gateway allows; None if it allows all."""
    for entry in first.metadata_context.filter_metadata:
        for field in entry.value.fields:
            if (entry.key, field.key) == ("envoy.lb.subset_hint", _SUBSET):
                return {value.string_value for value in field.value.list_value.values}
    return None


async def _address(url: str) -> str:
    """Returns a node's address as IP:PORT; empty if its host name cannot be resolved."""
    parts = urllib.parse.urlsplit(url)
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ""
    host, port = map(str, min(found)[4][:2])  # IPv4 first: vLLM listens only there if its host is a name
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _answer(first: Any, headers: Mapping[str, str], stream: Any) -> None:
    """Makes the gateway pass on the node's answer, with `headers`. Some gateways send its body, too, and wait
    until they get it back."""
    await stream.write(ProcessingResponse(response_headers={"response": {"header_mutation": _set(headers)}}))
    ended = first.protocol_config.response_body_mode != FULL_DUPLEX_STREAMED
    while not ended and (message := await stream.read()) is not grpc.aio.EOF:
        ended = message.HasField("response_trailers") or message.response_body.end_of_stream
        if message.HasField("response_body"):
            await stream.write(_streamed("response_body", message.response_body.body, ended))
        else:
            await stream.write(ProcessingResponse(response_trailers={}))


def _streamed(what: str, body: bytes, last: bool) -> Any:
    piece = {"streamed_response": {"body": body, "end_of_stream": last}}
    return ProcessingResponse(**{what: {"response": {"body_mutation": piece}}})


def _decision(exchange: Exchange, sent: Mapping[str, str], trailers: bool) -> Iterable[Any]:
    """Yields the messages that make the gateway send the request to the node, with the headers `sent` and no
    other headers of the client."""
    body = exchange.decode_body
    kept = {name.lower() for name in sent} | {"host", "content-length"}
    others = {name.lower() for name in exchange.headers} - kept
    removed = [name for name in others if not name.startswith((":", "x-envoy-"))]
    mutation = {**_set({**sent, "content-length": str(len(body))}), "remove_headers": removed}
    # some gateways read the header; clients could send it too, so our Envoy reads the metadata
    node = {"fields": [{"key": ENDPOINT, "value": {"string_value": sent[ENDPOINT]}}]}
    yield ProcessingResponse(
        request_headers={"response": {"header_mutation": mutation}},
        dynamic_metadata={"fields": [{"key": "envoy.lb", "value": {"struct_value": node}}]},
    )
    for start in range(0, len(body), _PIECE):
        last = start + _PIECE >= len(body) and not trailers
        yield _streamed("request_body", body[start : start + _PIECE], last)
    if trailers:
        yield ProcessingResponse(request_trailers={})


def _set(headers: Mapping[str, str]) -> dict[str, Any]:
    return {
        "set_headers": [
            {
                "header": {"key": name, "raw_value": value.encode("utf-8", "surrogateescape")},
                "append_action": OVERWRITE_IF_EXISTS_OR_ADD,
            }
            for name, value in headers.items()
        ]
    }


def _pairs(headers: Any) -> Iterable[tuple[str, str]]:
    for header in headers.headers.headers:
        yield header.key, header.value or header.raw_value.decode("utf-8", "surrogateescape")
