"""Which adapters can be told from others, by real files in real folders."""

import shutil
from contextlib import closing
from types import SimpleNamespace

import pytest

from pd_cache.vllm.lora import Adapters
from tests.pd_cache.vllm.histories import CHUNK, COMPUTES, PROMPT, Request, Scene
from tests.support.waiting import wait_for


@pytest.fixture
def adapters():
    with closing(Adapters()) as opened:
        yield opened


def write_adapter(folder, weights=b"weights", config="{}"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(config)
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def known(adapters, folder, name="a"):
    """What is known of an adapter once its files have been looked at."""
    adapter = adapters.of(name, str(folder))
    wait_for(lambda: not adapter.checking)
    return adapter


def test_an_adapter_is_its_weights_and_its_configuration_and_no_name(adapters, tmp_path):
    one = known(adapters, write_adapter(tmp_path / "one")).digest
    assert one
    assert known(adapters, write_adapter(tmp_path / "copy"), name="b").digest == one
    assert known(adapters, write_adapter(tmp_path / "weights", b"other weights")).digest not in (one, b"")
    assert known(adapters, write_adapter(tmp_path / "config", config='{"r": 8}')).digest not in (one, b"")
    with closing(Adapters("in another dtype")) as served:
        assert known(served, tmp_path / "one").digest not in (one, b"")


def test_what_is_no_folder_of_an_adapter_is_refused_in_words_until_it_is_one(adapters, tmp_path):
    folder = tmp_path / "adapter"
    adapter = known(adapters, folder)
    assert (adapter.digest, adapter.why) == (b"", "adapter_unreadable")
    assert "has no adapter_config.json" in adapter.detail
    assert "not the folder of a LoRA adapter" in known(adapters, "somebody/adapter").detail
    write_adapter(folder)
    assert known(adapters, folder).digest


def test_files_that_were_replaced_while_vllm_runs_are_trusted_no_more(adapters, tmp_path):
    """vLLM may still compute with the old ones, and its own prefix cache still has what they computed."""
    folder = write_adapter(tmp_path / "adapter")
    before = known(adapters, folder).digest
    shutil.copytree(folder, tmp_path / "copy")
    folder.rename(tmp_path / "elsewhere")
    assert known(adapters, folder).digest == before, "what is gone was not replaced"
    write_adapter(folder, b"other weights")
    adapter = known(adapters, folder)
    assert (adapter.digest, adapter.why) == (b"", "adapter_changed")
    write_adapter(folder)
    assert known(adapters, folder).digest == b"", "whatever they are now"
    assert known(adapters, tmp_path / "copy").digest == before


# --- requests -----------------------------------------------------------------------------------------------


def lora(folder, name="a"):
    return SimpleNamespace(lora_name=name, lora_path=str(folder))


def identified(scene, folder, name="a"):
    """The `lora_request` of an adapter whose digest is known."""
    known(scene.adapters, folder, name)
    return lora(folder, name)


@pytest.fixture
def scene():
    made = Scene()
    yield made
    made.adapters.close()


def stored(scene, request):
    """The names under which all of a request's chunks are stored."""
    scene.begin(request)
    (store,) = scene.step(**{request.request_id: len(request.all_token_ids)}).stores
    return list(store.chunks.names)


def test_an_adapters_chunks_are_named_by_its_digest(scene, tmp_path):
    one, copy = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "copy")
    other = write_adapter(tmp_path / "other", b"other weights")
    names = [
        stored(scene, Request(f"{number}", PROMPT, lora_request=request))
        for number, request in enumerate(
            (None, identified(scene, one), identified(scene, copy, "b"), identified(scene, other))
        )
    ]
    assert names[0] == scene.names(Request("plain", PROMPT))
    assert names[1] == names[2], "two names of one adapter share"
    assert not set(names[3]) & set(names[1])
    assert not set(names[0]) & set(names[1])


def test_block_hashes_which_have_an_adapters_name_and_path_get_its_digest(tmp_path):
    folder, names = tmp_path / "adapter", []
    for weights in (b"weights", b"other weights", b"weights"):
        scene = Scene(hash_mode="blocks")
        write_adapter(folder, weights)
        request = Request("a", PROMPT, lora_request=identified(scene, folder))
        request.block_hashes = [bytes([number]) * 32 for number in range(6)]
        names.append(stored(scene, request))
        scene.adapters.close()
    assert names[0] == names[2]
    assert not set(names[0]) & set(names[1])
    assert {len(name) for name in names[0]} == {16}


def write_while_nobody_looks(scene, folder):
    known(scene.adapters, folder)  # no look is under way that could see half of the files
    write_adapter(folder)
    assert known(scene.adapters, folder).digest


@pytest.mark.parametrize("written", ["never", "in time", "late"])
def test_until_the_digest_is_known_a_request_neither_loads_nor_stores_and_then_it_stores_all_of_its_chunks(
    scene, tmp_path, written
):
    folder = tmp_path / "adapter"
    known(scene.adapters, folder)
    request = Request("a", PROMPT, {"do_remote_decode": True}, lora_request=lora(folder))
    for _ in range(3):
        assert scene.ask(request) == COMPUTES
    scene.begin(request)
    assert scene.step(a=CHUNK).stores == []
    assert (scene.lookups.asked, scene.troubles("lookup", "adapter_unreadable")) == ([], 1), (
        "it is counted once"
    )
    if written == "in time":
        write_while_nobody_looks(scene, folder)
    request.num_computed_tokens = CHUNK
    stores = scene.step(a=2 * CHUNK + 3).stores
    assert [len(store.chunks.names) for store in stores] == ([3] if written == "in time" else [])
    if written == "late":
        write_while_nobody_looks(scene, folder)
    request.num_computed_tokens = len(PROMPT)
    announced = scene.finish(request)["pd_cache"]["prefix_tokens"]
    assert announced == (3 * CHUNK if written == "in time" else 0), "nobody waits for what is not stored"
