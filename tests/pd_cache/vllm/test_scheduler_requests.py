"""The connector's part in the scheduler, by histories of events: hand-offs from node to node, reports on
requests, and their spans."""

from types import SimpleNamespace

import msgspec
import pytest

from pd_cache.reasons import Loaded, RequestReport, TierChunks
from pd_cache.tracing import Tracing
from pd_cache.vllm.layers import KeptLayers
from tests.pd_cache.vllm.histories import (
    CHUNK,
    COMPUTES,
    DRAFTS,
    FULL,
    PLAIN,
    PROMPT,
    WAITS,
    WINDOW,
    Request,
    Scene,
    announced,
)

NAMESPACE = Scene().lookups._database.namespace.fingerprint()
OTHER = "0123456789abcdef"
REMOTE = {"do_remote_decode": True}

# --- hand-offs ----------------------------------------------------------------------------------------------


def test_an_announced_prefix_is_waited_for_with_growing_pauses_until_it_is_there():
    scene, request = Scene(), Request("a", PROMPT, announced(2 * CHUNK))
    for _ in range(3):
        assert scene.ask(request) == WAITS
    assert scene.step().expecting
    assert not scene.step().expecting
    assert scene.lookups.asked == [0], "not before the pause is over"
    for _ in range(40):
        scene.clock.now += 0.001
        scene.ask(request)
    assert 3 <= len(scene.lookups.asked) <= 8
    scene.has(request, 2)
    scene.clock.now += 0.1
    assert scene.ask(request) == (2 * CHUNK, True)


DRAFTING, STATES = (FULL, DRAFTS), (PLAIN, KeptLayers(1, CHUNK, "state"))


@pytest.mark.parametrize(
    "params, waits, layers",
    [
        (announced(2 * CHUNK), True, (PLAIN,)),
        (announced(2 * CHUNK, NAMESPACE), True, (PLAIN,)),
        (announced(2 * CHUNK, NAMESPACE, further=[OTHER]), True, (PLAIN,)),
        (announced(2 * CHUNK, OTHER), False, (PLAIN,)),
        (announced(-5), False, (PLAIN,)),
        (announced(CHUNK - 1), False, (PLAIN,)),
        (announced(2 * CHUNK, NAMESPACE), False, DRAFTING),
        (announced(2 * CHUNK, NAMESPACE, further=[OTHER]), False, DRAFTING),
    ],
)
def test_an_announced_prefix_is_waited_for_only_if_it_can_come_true(params, waits, layers):
    scene, request = Scene(*layers), Request("a", PROMPT, params)
    assert scene.ask(request) == (WAITS if waits else COMPUTES)
    assert scene.troubles("lookup", "other_namespace") == (
        not waits and params["pd_cache"]["prefix_tokens"] > CHUNK
    )
    lost = Scene(*layers)
    lost.lookups.here = False
    assert lost.ask(request) == COMPUTES


@pytest.mark.parametrize("namespace, reason", [("", "deadline"), (OTHER, "other_namespace")])
def test_an_announced_prefix_that_does_not_come_is_waited_for_no_longer_than_configured(namespace, reason):
    scene, request = Scene(), Request("a", PROMPT, announced(2 * CHUNK, namespace))
    scene.ask(request)
    scene.clock.now += 1.99
    assert scene.ask(request) == (COMPUTES if namespace else WAITS)
    scene.clock.now += 0.01
    assert scene.ask(request) == COMPUTES
    assert ended(scene, request).reason == reason


@pytest.mark.parametrize(
    "layers, options, length, awaited",
    [(STATES, {"recompute": "block"}, 2 * CHUNK, CHUNK), (DRAFTING, {}, len(PROMPT), 2 * CHUNK)],
)
def test_a_hand_off_is_waited_for_only_up_to_what_a_load_takes(layers, options, length, awaited):
    scene, request = Scene(*layers, **options), Request("a", PROMPT[:length], announced(length))
    assert scene.ask(request) == WAITS
    scene.has(request, awaited // CHUNK + scene.lookups.ahead)
    scene.clock.now += 1
    assert scene.ask(request) == (awaited, True)


@pytest.mark.parametrize(
    "layers, options, chunks", [((PLAIN,), {}, 3), (DRAFTING, {}, 2), ((PLAIN,), {"stores": False}, 0)]
)
def test_a_prefill_node_announces_what_it_stores_and_what_it_did(layers, options, chunks):
    scene, request = Scene(*layers, **options), Request("a", PROMPT, REMOTE)
    scene.ask(request)
    scene.begin(request, *[list(range(10, 17))] * 2)
    scene.step(a=len(PROMPT))
    request.num_computed_tokens = len(PROMPT)
    handed = scene.finish(request)
    assert scene.lookups.ended == ["a"]
    ours = handed["pd_cache"]
    assert (ours["prefix_tokens"], ours["namespace"]) == (chunks * CHUNK, NAMESPACE)
    assert ours["prefill"] == {"cached_tokens": 0, "computed_tokens": 27, "reason": "never_stored"}
    assert ours["report"]["computed"] == 27
    decode, there = Scene(*layers), Request("a", PROMPT, handed)
    decode.has(there)
    decode.load(there, 0, [], list(range(10, 17)))
    there.num_computed_tokens = len(PROMPT)
    answer = decode.finish(there)
    assert answer["pd_cache"]["prefill"] == ours["prefill"], "the decode node's answer says it, too"
    assert "do_remote_prefill" not in answer


def test_a_prefill_node_counts_what_its_own_cache_had_and_what_it_loaded_as_cached():
    scene, request = Scene(), Request("a", PROMPT, REMOTE)
    scene.has(request, 2)
    scene.load(request, CHUNK)
    scene.loaded(Loaded(1))
    request.num_computed_tokens = len(PROMPT)
    prefill = scene.finish(request)["pd_cache"]["prefill"]
    assert prefill == {"cached_tokens": 2 * CHUNK, "computed_tokens": CHUNK + 3, "reason": "never_stored"}
    aborted = Request("b", PROMPT, REMOTE)
    scene.ask(aborted)
    assert scene.finish(aborted)["pd_cache"]["prefill"] == {
        "cached_tokens": 0,
        "computed_tokens": 27,
        "reason": "",
    }


# --- reports ------------------------------------------------------------------------------------------------


def ended(scene, request):
    """The report on a request whose prompt vLLM has computed."""
    request.num_computed_tokens = request.num_prompt_tokens
    answer = scene.finish(request)
    (report,) = scene.reports
    assert answer["pd_cache"]["report"] == msgspec.to_builtins(report)
    return report


def report(**fields):
    return RequestReport(asked=27, **fields)


@pytest.mark.parametrize(
    "at_hand, there, loaded, told",
    [
        (
            0,
            2,
            Loaded(2, "none", TierChunks(memory=1, pool=1)),
            report(found=16, loaded=16, memory=8, pool=8, computed=11, reason="never_stored"),
        ),
        (
            12,
            3,
            Loaded(2, "none", TierChunks(pool=2)),
            report(at_hand=12, found=16, loaded=12, pool=16, computed=3),
        ),
        (
            0,
            3,
            Loaded(1, "damaged", TierChunks(disk=1)),
            report(found=24, loaded=8, disk=8, computed=19, reason="damaged"),
        ),
    ],
    ids=["not all is there", "what vLLM has counts apart", "a load that ends early keeps a part"],
)
def test_a_report_says_where_the_prompt_was_found_and_what_was_not_there(at_hand, there, loaded, told):
    scene, request = Scene(), Request()
    scene.has(request, there)
    scene.load(request, at_hand)
    scene.step()
    scene.loaded(loaded)
    scene.ask(request, CHUNK)  # it was preempted: its first way counts
    scene.loaded(Loaded(0, "deadline"))
    assert ended(scene, request) == told
    assert scene.metrics.totals()["requests", told.reason] == 1


@pytest.mark.parametrize("layers", [(PLAIN,), DRAFTING])
@pytest.mark.parametrize("limit, at_hand, chunks", [(0, 0, 0), (CHUNK, 0, 1), (CHUNK, CHUNK, 2), (15, 3, 2)])
def test_a_request_loads_no_more_than_it_allows_in_whole_chunks_and_waits_for_no_more(
    limit, at_hand, chunks, layers
):
    params = {**announced(3 * CHUNK), "max_load_tokens": limit}
    for there in (chunks, 99):
        scene, request = Scene(*layers), Request("a", [*PROMPT, *PROMPT], params)
        scene.has(request, there + scene.lookups.ahead)
        expected = max(0, chunks * CHUNK - at_hand)
        assert scene.ask(request, at_hand) == (expected, expected > 0)
        told = ended(scene, request)
        assert (told.found, told.reason) == (chunks * CHUNK - at_hand // CHUNK * CHUNK, "limited")


def test_a_limit_that_allows_the_whole_prompt_is_no_reason():
    scene, request = Scene(), Request("a", PROMPT, {"max_load_tokens": len(PROMPT)})
    scene.has(request)
    scene.ask(request)
    assert ended(scene, request).reason == "none"


@pytest.mark.parametrize(
    "tiers, loads",
    [
        ([], False),
        ([{}], True),
        ([{"medium": "cpu"}], True),
        ([{"medium": "STORAGE"}], False),
        ([{"locality": "LOCAL"}], False),
        ([{"medium": "CPU", "locality": "LOCAL"}, {"locality": "remote"}], True),
    ],
)
def test_a_request_loads_only_from_tiers_that_it_names(tiers, loads):
    scene, request = Scene(), Request("a", PROMPT, {"kv_load_tiers": tiers})
    scene.lookups.near = TierChunks(memory=1)
    scene.has(request, 2)  # the other chunk is in the pool
    assert scene.ask(request) == ((2 * CHUNK, True) if loads else COMPUTES)
    told = ended(scene, request)
    assert (told.found, told.reason == "limited") == (2 * CHUNK, not loads)


@pytest.mark.parametrize("limit, chunks", [(2 * CHUNK + 3, 2), (0, 0), (99, 3)])
def test_a_request_stores_and_announces_no_more_than_it_allows(limit, chunks):
    scene, request = Scene(), Request("a", PROMPT, {**REMOTE, "max_offload_tokens": limit})
    scene.begin(request)
    step = scene.step(a=len(PROMPT))
    assert sum(len(op.chunks.names) for op in step.stores) == chunks
    request.num_computed_tokens = len(PROMPT)
    assert scene.finish(request)["pd_cache"]["prefix_tokens"] == chunks * CHUNK


def test_of_a_load_that_fails_as_a_whole_nothing_counts_as_loaded():
    scene, request = Scene(FULL, WINDOW), Request()
    scene.has(request)
    scene.load(request, 0, list(range(30, 37)), list(range(20, 27)))
    scene.loaded(Loaded(2, "evicted", TierChunks(pool=2)))
    told = ended(scene, request)
    assert (told.loaded, told.computed, told.reason) == (0, 27, "evicted")


def test_a_request_that_may_not_read_the_cache_says_so_and_one_that_ends_early_says_nothing():
    scene, request = Scene(), Request("a", skip_reading_prefix_cache=True)
    scene.has(request)
    assert scene.ask(request) == COMPUTES
    assert ended(scene, request) == report(computed=27, reason="not_asked")
    scene, request = Scene(), Request()
    scene.ask(request)
    assert scene.finish(request) is None
    assert not scene.reports


# --- images -------------------------------------------------------------------------------------------------


def image(name, offset=10):
    """An image of eight tokens, and what vLLM names it."""
    return SimpleNamespace(
        identifier=name, mm_hash=name, mm_position=SimpleNamespace(offset=offset, length=8)
    )


@pytest.mark.parametrize("mode", ["tokens", "blocks"])
@pytest.mark.parametrize(
    "made, options, named",
    [
        ({}, {}, False),
        ({"cache_salt": "mine"}, {}, True),
        ({"kv_transfer_params": {**REMOTE, "media_hashed": True}}, {}, True),
        ({}, {"trust_media_ids": True}, True),
        ({"cache_salt": "mine"}, {"hashes_media": False}, False),
        ({"kv_transfer_params": {**REMOTE, "media_hashed": True}}, {"hashes_media": False}, False),
        ({}, {"trust_media_ids": True, "hashes_media": False}, False),
    ],
)
def test_a_prompt_with_an_image_is_named_only_if_its_content_or_a_salt_keeps_the_images_name_apart(
    made, options, named, mode
):
    scene = Scene(hash_mode=mode, **options)
    hashes = [bytes([number]) * 32 for number in range(6)]
    request = Request(
        "a", mm_features=[image("0" * 64)], block_hashes=hashes, **{"kv_transfer_params": REMOTE, **made}
    )
    assert scene.ask(request) == COMPUTES
    assert len(scene.lookups.asked) == named
    scene.begin(request)
    assert bool(scene.step(a=len(PROMPT)).stores) == named
    request.num_computed_tokens = len(PROMPT)
    handed = scene.finish(request)
    assert handed["pd_cache"]["prefix_tokens"] == (24 if named else 0)
    assert handed.get("media_hashed", False) == ("kv_transfer_params" in made), (
        "the decode node has to know it, too"
    )
    assert scene.reports[0].reason == ("never_stored" if named else "media_unidentified")
    assert scene.metrics.totals()["requests", scene.reports[0].reason] == 1


@pytest.mark.parametrize(
    "images, alike",
    [
        ([image("cat")], 3),
        ([image("dog")], 1),
        ([image("cat", 11)], 1),
        ([image("cat", 2)], 0),
        ([image("cat", 16)], 1),
        ([], 1),
        ([image("cat"), image("dog", 19)], 2),
        ([image("dog"), image("cat", 19)], 1),
    ],
)
def test_of_tokens_an_image_isolates_the_chunks_from_its_first_one_on(images, alike):
    """The image `cat` lies in the second and third of three chunks."""
    scene = Scene(trust_media_ids=True)
    first = Request("a", mm_features=[image("cat")])
    scene.begin(first)
    (store,) = scene.step(a=len(PROMPT)).stores
    scene.lookups.there = set(store.chunks.names)
    assert scene.ask(Request("b", mm_features=images)) == (alike * CHUNK, alike > 0)
    assert scene.ask(Request("c", mm_features=images, cache_salt="mine")) == COMPUTES
    text = scene.names(first)
    assert store.chunks.names[0] == text[0], "text alone has the name that it has without an image"
    assert not {*store.chunks.names[1:]} & {*text}


# --- spans --------------------------------------------------------------------------------------------------


class Recorded:
    """A span, as far as the scheduler uses one. Only its first end counts."""

    def __init__(self, name, parent):
        self.name, self.parent = name.removeprefix("pd_cache."), parent
        self.noted = {}
        self.ended = None

    def note(self, **attributes):
        self.noted |= attributes

    def end(self, error=""):
        self.ended = error if self.ended is None else self.ended


class Recorder(Tracing):
    def __init__(self):
        self.spans = []

    def begin(self, name, parent=None, **attributes):
        self.spans.append(Recorded(name, parent))
        self.spans[-1].note(**attributes)
        return self.spans[-1]

    def told(self):
        return [(span.name, span.ended) for span in self.spans]


def test_the_wait_for_an_announced_prefix_is_one_span_that_the_requests_end_ends_and_a_load_may_fail():
    scene, request = Scene(tracing=(recorder := Recorder())), Request("a", PROMPT, announced(3 * CHUNK))
    for _ in range(4):
        assert scene.ask(request) == WAITS
        scene.clock.now += 0.1
    assert recorder.told() == [("lookup", None)]
    scene.finish(request)
    assert recorder.told() == [("lookup", "the request ended")]
    scene.has(request)
    scene.load(request)
    scene.step()
    scene.loaded(Loaded(1, "transfer_failed"))
    assert recorder.told()[1:] == [("lookup", ""), ("load", "failed")]
    assert (recorder.spans[1].noted["found"], recorder.spans[2].noted["reason"]) == (
        3 * CHUNK,
        "transfer_failed",
    )
    scene.finish(request)
