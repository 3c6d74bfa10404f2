"""The connector's part in the scheduler, by histories of events: nothing of other weights is stored, loaded,
or kept in vLLM's own cache. tests/vllm/test_random_histories.py has the usual cases."""

import pytest

from tests.pd_cache.vllm.histories import CHUNK, COMPUTES, PROMPT, WAITS, Request, Scene, announced, blocks_of


def running(scene, request, *, at_hand=0, block=10):
    """A request that has computed its first chunk, or has it at hand."""
    assert scene.ask(request, at_hand) == COMPUTES
    scene.manager.allocate(request, blocks_of(request, block))
    request.num_computed_tokens = CHUNK


def other_weights(scene, label="w1"):
    """The engine hears of a change, and then its weights get a label."""
    scene.side.reset()
    scene.version.reset(label)


def test_a_request_that_learns_of_a_label_with_tokens_at_hand_waits_until_vllm_has_looked_for_them_again():
    scene, request = Scene(), Request()
    scene.side.reset()
    scene.step()
    scene.version.reset("w1")
    assert scene.ask(request, CHUNK) == WAITS
    scene.step()
    running(scene, request)
    assert scene.step(a=CHUNK).stores


@pytest.mark.parametrize("at_hand", [0, CHUNK])
@pytest.mark.parametrize("name", ["old", "late"])
def test_what_begins_after_a_change_is_of_the_new_version_also_if_it_was_preempted_for_it(name, at_hand):
    scene, old = Scene(), Request("old")
    running(scene, old)
    other_weights(scene)
    scene.step(old=1)
    request = old if name == "old" else Request("late")
    if request is old:
        scene.manager.free(old)
        old.num_computed_tokens = 0
    running(scene, request, at_hand=at_hand, block=20)
    scene.manager.coordinator.cache_blocks(request, 2 * CHUNK)
    assert scene.manager.put_into_cache == [name]
    (store,) = scene.step(**{name: CHUNK}).stores
    assert (store.label, store.chunks.names) == ("w1", scene.names(request)[:2])


def test_what_was_found_and_stored_before_a_change_counts_no_more():
    scene, request, waiting = Scene(), Request(), Request("b")
    running(scene, request)
    assert scene.step(a=CHUNK).stores
    scene.has(waiting)
    assert scene.ask(waiting) == (3 * CHUNK, True)
    other_weights(scene)
    scene.lookups.there = set()
    assert scene.ask(waiting) == COMPUTES
    scene.manager.free(request)
    request.num_computed_tokens = 0
    running(scene, request)
    (store,) = scene.step(a=CHUNK).stores
    assert store.chunks.names == scene.names(request)[:2], "it was preempted, and computes them anew"


def test_while_the_weights_have_no_label_nothing_is_stored_and_no_announced_prefix_is_waited_for():
    scene, request, later = Scene(), Request("a", PROMPT, announced(len(PROMPT))), Request("b")
    scene.side.reset()
    assert scene.pool.evicted
    running(scene, request)
    step = scene.step(a=CHUNK)
    assert (step.label, step.stores) == (None, [])
    scene.version.reset("w2")
    running(scene, later, block=20)
    step = scene.step(a=CHUNK, b=CHUNK)
    (store,) = step.stores
    assert (step.label, store.label, store.chunks.names) == ("w2", "w2", scene.names(later)[:2]), (
        "a is from before"
    )


def test_the_same_label_again_does_not_make_what_was_computed_in_between_its_own():
    scene, request = Scene(), Request("a")
    running(scene, request)
    other_weights(scene, "")
    assert scene.step(a=CHUNK).stores == []


def test_what_is_not_stored_because_of_other_weights_is_not_announced():
    scene, request = Scene(), Request(kv_transfer_params={"do_remote_decode": True})
    running(scene, request)
    scene.side.reset()
    request.num_computed_tokens = len(PROMPT)
    assert scene.finish(request)["pd_cache"]["prefix_tokens"] == 0


def test_a_load_bears_the_version_in_which_its_chunks_were_found():
    scene, request = Scene(), Request()
    other_weights(scene)
    scene.has(request)
    scene.load(request)
    (load,) = scene.step().loads
    assert load.label == "w1"


def test_a_node_does_not_wait_for_what_a_node_of_another_version_announces():
    prefill, decode = Scene(), Scene()
    computed = Request(kv_transfer_params={"do_remote_decode": True})
    running(prefill, computed)
    prefill.step(a=len(PROMPT) - CHUNK)
    computed.num_computed_tokens = len(PROMPT)
    params = prefill.finish(computed)
    assert params["pd_cache"]["prefix_tokens"] > 0
    assert decode.ask(Request("a", kv_transfer_params=params)) == WAITS
    other_weights(decode)
    assert decode.ask(Request("b", kv_transfer_params=params)) == COMPUTES
