"""Frames: what is sent is what is read, and nothing that can be sent harms the reader."""

import struct
import uuid

import msgspec
import pytest

from pd_cache.reasons import Found
from pd_cache.server.protocol import (
    PROTOCOL,
    EndSession,
    FrameError,
    Lookup,
    Refused,
    Welcome,
    decode_answer,
    decode_request,
    encode,
)
from tests.fuzz.targets import REQUESTS
from tests.support.engines import troubles
from tests.support.server import StrangePeer, served

TOKEN = uuid.uuid4().hex


def of_version(version):
    return struct.pack("<4sHHQ", b"PDCM", version, 0, 7) + encode(1, EndSession("x"))[16:]


def nonsense(body):
    return encode(9, EndSession("x"))[:16] + body


def hello(**engine):
    """The frame of a scheduler that says this about its engine."""
    return nonsense(
        msgspec.msgpack.encode(["hello", TOKEN, "scheduler", {"model": "m", "block_size": 4, **engine}])
    )


BAD = {
    "empty": b"",
    "no header": b"PDCM",
    "other magic": b"HTTP/1.1 200 OK\r\n\r\n",
    "no body": nonsense(b""),
    "half a body": encode(9, REQUESTS[0])[:-3],
    "an unknown type": nonsense(b"\x91\xa5wrong"),
    "a string where a number belongs": nonsense(encode(9, Lookup("r", (), 3))[16:-2] + b"\xa1x\xa0"),
    "a name that is too short": nonsense(msgspec.msgpack.encode(["lookup", "r", [b"abc"], 0])),
    "a rank outside of the world": hello(world_size=2, rank=2),
    "a pickle": nonsense(b"\x80\x04cos\nsystem\n(S'true'\ntR."),
    "an answer": encode(9, Found(3, 3)),
    "nested deeply": nonsense(b"\x91" * 5000),
}


def test_another_version_is_refused_and_the_refusal_is_read_across_versions():
    with pytest.raises(
        FrameError, match=f"speaks version {PROTOCOL} of the protocol, the client version {PROTOCOL + 1}"
    ) as caught:
        decode_request(of_version(PROTOCOL + 1))
    assert (caught.value.refused.reason, caught.value.number) == ("version", 7)
    refusal = bytearray(encode(7, Refused("version", "why")))
    refusal[4] = 9
    assert decode_answer(bytes(refusal)) == (7, Refused("version", "why"))
    answer = bytearray(encode(7, Found(3, 3)))
    answer[4] = 9
    with pytest.raises(FrameError):
        decode_answer(bytes(answer))


# --- a server that is sent such things ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(pool, tmp_path_factory):
    with served(pool, tmp_path_factory.mktemp("server")) as one:
        yield one


@pytest.fixture
def peer(server):
    with StrangePeer(server.url) as one:
        yield one


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_a_malformed_frame_is_answered_with_an_error_if_its_number_can_be_read_and_stops_nothing(
    server, peer, frame
):
    with pytest.raises(FrameError) as caught:
        decode_request(frame)
    assert caught.value.refused.reason == "malformed"
    peer.send([frame])
    assert not caught.value.number or peer.hear().reason == "malformed"
    assert isinstance(peer.hello(), Welcome)
    assert troubles(server.metrics, "server")["refused_malformed"] >= 1


def test_a_client_is_told_what_to_do_first(peer):
    peer.send([of_version(PROTOCOL + 1)])
    answers = [peer.hear(), *(peer.ask(request) for request in REQUESTS[1:])]
    assert isinstance(peer.hello(), Welcome)
    answers.append(peer.ask(REQUESTS[1]))
    reasons = [answer.reason for answer in answers if isinstance(answer, Refused)]
    assert reasons == ["version", *["unknown_client"] * len(REQUESTS[1:]), "invalid"]
    assert "over the Unix socket" in str(answers[-1])


def test_a_client_that_does_not_read_its_answers_holds_up_no_other(server, peer):
    with StrangePeer(server.url) as deaf:
        for _ in range(20_000):  # more than all buffers hold
            deaf.say(EndSession("x"))
        assert isinstance(peer.hello(), Welcome)
