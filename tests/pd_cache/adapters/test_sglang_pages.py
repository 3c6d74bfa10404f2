"""What two SGLang engines must have in common to share pages, and where a page lies in a host pool."""

from types import SimpleNamespace

import pytest
import torch

from pd_cache.adapters.sglang_pages import PoolPages, namespace_of
from pd_cache.errors import ConfigError, LayoutError
from pd_cache.objects.values import memory_of

SERVER = {"model_path": "org/llama", "revision": "main", "kv_cache_dtype": "fp8_e4m3", "quantization": None}


def named(server=None, **changes):
    given = {"revision": "1", "salts": ("", ""), **changes}
    return namespace_of(
        SimpleNamespace(model_name="org/llama"), SERVER if server is None else server, **given
    )


def test_all_that_changes_the_bytes_of_pages_is_another_namespace():
    others = [
        named({**SERVER, "model_path": "org/llama-tuned"}),
        named({**SERVER, "revision": "dev"}),
        named({**SERVER, "kv_cache_dtype": "fp8_e5m2"}),
        named({**SERVER, "quantization": "fp8"}),
        named({**SERVER, "quantization_param_path": "/scales.json"}),
        named({**SERVER, "json_model_override_args": '{"rope_theta": 1}'}),
        named({**SERVER, "speculative_draft_model_path": "org/eagle"}),
        named({**SERVER, "speculative_draft_model_path": "org/eagle-2"}),
        named({}),
        named(revision="2"),
        named(salts=("tenant", "")),
        named(salts=("", "tenant")),
    ]
    assert len({named(), *others}) == len(others) + 1
    assert named({**SERVER, "speculative_draft_model_path": "org/llama"}) == named(), (
        "its draft layers are its own"
    )
    assert named({**SERVER, "port": 1}) == named()


def test_without_a_revision_the_files_decide_wherever_they_lie(tmp_path):
    folders = [tmp_path / name for name in ("one", "same", "other")]
    for folder, weights in zip(folders, (b"1", b"1", b"2"), strict=True):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "model.bin").write_bytes(weights)
    one, _, other = folders
    names = [named({**SERVER, "model_path": str(path)}, revision="") for path in folders]
    assert names[0] == names[1] != names[2]
    with_draft = {**SERVER, "model_path": str(one), "speculative_draft_model_path": str(other)}
    assert named(with_draft, revision="") != names[0]
    with pytest.raises(ConfigError, match=r"org/eagle: its weights cannot be identified.*put a `revision`"):
        named({**with_draft, "speculative_draft_model_path": "org/eagle"}, revision="")


def test_a_tensor_of_one_element_has_its_bytes_whatever_its_strides():
    tensor = torch.arange(6, dtype=torch.int32)[::7]
    assert tensor.is_contiguous()
    assert tensor.stride() == (7,)
    assert memory_of(tensor) == tensor.clone().numpy().tobytes()


class Host:
    """A host pool of two buffers, K and V, with four pages of two tokens."""

    layout, page_size, size = "page_first", 2, 8

    def __init__(self):
        self.kv_buffer = [
            torch.arange(80, dtype=torch.uint8).reshape(8, 10),
            torch.arange(80, dtype=torch.uint8),
        ]
        self.off = 0

    def get_page_buffer_meta(self, indices):
        places = [int(index) * 10 + self.off for index in indices[::2]]
        return [buffer.data_ptr() + place for place in places for buffer in self.kv_buffer], [20] * 2 * len(
            places
        )


def test_a_page_of_a_host_pool_is_its_pieces_one_after_another():
    pages = PoolPages(Host(), b"")
    assert pages.bytes == 40
    second, first = pages.values(torch.tensor([2, 3, 0, 1]))
    assert b"".join(first.part(slice(0, 40))) == bytes(range(20)) * 2
    assert b"".join(second.part(slice(15, 25))) == bytes([35, 36, 37, 38, 39, 20, 21, 22, 23, 24])
    assert pages.values(torch.tensor([], dtype=torch.int64)) == []


def test_an_address_outside_the_pools_buffers_is_refused():
    host = Host()
    pages = PoolPages(host, b"")
    host.off = 70
    with pytest.raises(LayoutError, match="outside"):
        pages.values(torch.tensor([2, 3]))
