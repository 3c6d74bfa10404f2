"""What two SGLang engines must have in common to share pages: pure, so it runs without SGLang."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pd_cache.adapters.sglang_pages import bytes_of, namespace_of
from pd_cache.errors import ConfigError

SERVER = {"model_path": "org/llama", "revision": "main", "kv_cache_dtype": "fp8_e4m3", "quantization": None}


def named(server: dict[str, Any] | None = None, **changes: Any) -> str:
    given = {"revision": "1", "salts": ("", ""), **changes}
    return namespace_of(SimpleNamespace(model_name="org/llama"), SERVER if server is None else server, **given)


def test_all_that_changes_the_bytes_of_pages_is_another_namespace() -> None:
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
    assert named({**SERVER, "speculative_draft_model_path": "org/llama"}) == named(), "its draft layers are its own"
    assert named({**SERVER, "port": 1}) == named()


def test_without_a_revision_the_files_decide_wherever_they_lie(tmp_path: Path) -> None:
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
    with pytest.raises(ConfigError, match=r"org/eagle: cannot tell its weights.*put a `revision`"):
        named({**with_draft, "speculative_draft_model_path": "org/eagle"}, revision="")


def test_a_tensor_of_one_element_has_its_bytes_whatever_its_strides() -> None:
    tensor = torch.arange(6, dtype=torch.int32)[::7]
    assert tensor.is_contiguous()
    assert tensor.stride() == (7,)
    assert bytes_of(tensor) == tensor.clone().numpy().tobytes()
