"""Hints that reach an engine past any proxy: what is pinned until when, and what each is answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pd_cache.cluster import HintsConfig
from pd_cache.vllm.settings import PinSettings, read_settings
from tests.pd_cache.vllm.histories import CHUNK, PROMPT, Request, Scene
from tests.support.waiting import wait_for

OTHER = [7, *PROMPT]
LONG = [*PROMPT, *PROMPT]
HINTS = {"protocol_version": "0.1", "message_id": "m"}


class Pinning(Scene):
    """A scheduler's side whose pins may have four chunks, and the pool that is asked to keep them."""

    def __init__(self, **bounds: Any) -> None:
        super().__init__(
            pins=PinSettings(bounds=HintsConfig(max_ttl_s=60, **bounds), most_bytes=4 * 100 + 99, renew_s=0.001)
        )
        self.epoch, self.opened, self.closed = "", 0, 0
        self.kept: Sequence[bytes] = ()
        self.side.hints.open(100, self.open)

    def open(self) -> Any:
        self.opened += 1
        return SimpleNamespace(renew=self.renew, close=self.close)

    def renew(self, names: Sequence[bytes]) -> tuple[str, int]:
        self.kept = names
        return self.epoch, len(names)

    def close(self) -> None:
        self.closed += 1

    def send(self, kind: str, prompt: list[int] = PROMPT, action_id: str = "a", /, **payload: Any) -> dict[str, Any]:
        """A request with this hint comes and is answered. Returns what its answer says of the hint."""
        action = {"action_id": action_id, "action_type": kind, "action_version": "1.0", "payload": payload}
        request = Request(action_id, prompt, kv_hints={**HINTS, "actions": [action]})
        (told,) = self.answered(request)["actions"]
        return dict(told)

    def answered(self, request: Request) -> Any:
        self.side.arrived(request)
        self.ask(request)
        request.num_computed_tokens = request.num_tokens
        return self.finish(request)["pd_cache"].get("kv_hints")

    def keeps(self, *prompts: list[int]) -> None:
        """Waits until the leases of these prompts' chunks are renewed, and of no others."""
        wanted = {name for prompt in prompts for name in self.names(Request("x", prompt))}
        wait_for(lambda: set(self.kept) == wanted)


@pytest.fixture
def scene() -> Iterator[Pinning]:
    scene = Pinning()
    yield scene
    scene.side.close()
    assert scene.opened == scene.closed, "a client for pins, once there are some"


def test_a_retained_prompt_has_its_leases_renewed_until_its_time_is_over_or_it_is_released(scene: Pinning) -> None:
    assert scene.answered(Request("x")) is None
    told = scene.send("kv.retain", ttl_s=30)
    assert told == {"action_id": "a", "status": "accepted", "ttl_s": 30, "tokens": 3 * CHUNK}
    scene.keeps(PROMPT)
    told = scene.send("kv.retain", OTHER, "b", ttl_s=100)
    assert (told["status"], told["ttl_s"], told["tokens"]) == ("clipped", 60, CHUNK)
    assert told["reason"] == "max_ttl_s is 60; all pins of this engine may take 499 bytes"
    scene.keeps(PROMPT, OTHER[:CHUNK])
    assert scene.send("kv.retain", OTHER[1:CHUNK] * 2, "c", ttl_s=1)["reason"].startswith("all pins of this engine")
    scene.clock.now += 30
    scene.keeps(OTHER[:CHUNK])
    scene.clock.now += 30
    scene.keeps()
    assert scene.send("kv.retain", OTHER, "b", ttl_s=9)["status"] == "accepted"
    assert scene.send("kv.release", PROMPT, "d", action_id="b")["released"] == 1
    assert scene.send("kv.retain", PROMPT, "e", ttl_s=9)["status"] == "accepted"
    assert scene.send("kv.release", LONG)["reason"] == "this engine has no such pin"
    assert scene.send("kv.release", PROMPT)["released"] == 1, "its prompt is the request's own"
    assert scene.opened == 1
    assert scene.troubles("hints", "refused") == 2


def test_a_pin_for_one_use_ends_with_the_next_request_that_begins_with_its_prompt(scene: Pinning) -> None:
    scene.send("kv.retain", PROMPT, "once", ttl_s=9, once=True)
    scene.answered(Request("other", OTHER))
    scene.keeps(PROMPT)
    scene.answered(Request("longer", LONG))
    assert scene.send("kv.release", PROMPT, "x", action_id="once")["status"] == "refused"


def test_pins_end_with_the_weights(scene: Pinning) -> None:
    scene.send("kv.retain", ttl_s=9)
    scene.keeps(PROMPT)
    scene.epoch = "2"
    wait_for(lambda: not scene.side.hints.pins)
    assert scene.send("kv.retain", ttl_s=9)["status"] == "accepted"


def test_pins_outlive_a_renewal_that_fails(scene: Pinning) -> None:
    renew, fails = scene.renew, [OSError("no such device"), ValueError("no such key")]

    def opens() -> Any:
        if len(fails) == 2:
            raise fails.pop()
        return scene.open()

    def renews(names: Sequence[bytes]) -> tuple[str, int]:
        if fails:
            raise fails.pop()
        return renew(names)

    scene.renew = renews  # type: ignore[method-assign]
    scene.side.hints.open(100, opens)
    assert scene.send("kv.retain", ttl_s=9)["status"] == "accepted"
    scene.keeps(PROMPT)
    assert scene.opened == 1
    assert [scene.troubles("hints", f"error_{kind}") for kind in ("OSError", "ValueError")] == [1, 1]


def test_anybody_can_send_them_as_kv_transfer_params_and_wrong_ones_fail_no_request(scene: Pinning) -> None:
    action = {"action_id": "a", "action_type": "kv.retain", "action_version": "1.0", "payload": {"ttl_s": 9}}
    sent = Request("sent", kv_transfer_params={"kv_hints": {**HINTS, "actions": [action, 7]}})
    assert [one["status"] for one in scene.answered(sent)["actions"]] == ["accepted", "refused"]
    sent = Request("handed over", kv_transfer_params={**sent.kv_transfer_params, "do_remote_decode": True})
    assert len(scene.answered(sent)["actions"]) == 2
    assert scene.answered(Request("bad", kv_transfer_params={"kv_hints": "retain"})) is None
    assert scene.troubles("hints", "unreadable") == 1


@pytest.mark.parametrize(
    ("kind", "payload", "reason"),
    [
        ("kv.share\n", {}, "kv.share\\n 1.0 is not supported"),
        ("kv.prefetch", {}, "the request is here"),
        ("kv.retain", {}, "ttl_s is missing"),
        ("kv.retain", {"ttl_s": 0}, "ttl_s"),
        ("kv.retain", {"ttl_s": 9, "tokens": [1]}, "only a proxy takes tokens"),
        ("kv.release", {"block_hashes": [], "evict": True}, "only a proxy takes block_hashes, evict"),
        ("kv.release", {"action_id": "x"}, "no such pin"),
    ],
)
def test_what_is_refused(scene: Pinning, kind: str, payload: dict[str, Any], reason: str) -> None:
    told = scene.send(kind, PROMPT, "a", **payload)
    assert (told["status"], reason in told["reason"]) == ("refused", True)
    assert scene.send("kv.retain", PROMPT[: CHUNK - 1], "b", ttl_s=9)["reason"].startswith("the prompt has no whole")


POOL = "nodes: [{name: m, role: master, port: 1}, {name: s, role: store, segment_size: 1GiB}"


@pytest.mark.parametrize(
    ("file", "most"),
    [
        (POOL, (256 << 20) // 16),
        (
            "engine: {kind: vllm, model: m}\n"
            + POOL
            + ", {name: p, role: prefill, segment_size: 1GiB}, {name: d, role: decode}",
            256 << 20,
        ),
        ("proxy: {hints: {max_share: 0}}\n" + POOL, 0),
    ],
)
def test_an_engines_pins_take_its_part_of_what_the_files_nodes_give(tmp_path: Path, file: str, most: int) -> None:
    (tmp_path / "f.yaml").write_text(file + "]\n")
    assert read_settings({"config_file": str(tmp_path / "f.yaml")}, "kv_consumer").pins.most_bytes == most
