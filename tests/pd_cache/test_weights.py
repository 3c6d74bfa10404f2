"""The digest that keeps two models apart which agree in name, shape and size."""

import json
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pd_cache.weights import WeightsError, adapter_digest, adapter_stamps, weights_digest

TENSOR = 300_000
"""Bytes: far more than what is sampled of it."""


def write_model(folder, tensors, config="{}", name="model.safetensors"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    header, start = {}, 0
    for index, data in enumerate(tensors):
        header[f"layer.{index}"] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [start, start + len(data)],
        }
        start += len(data)
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / name).write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(tensors))
    return folder


def test_small_tensors_and_the_configuration_count_and_the_folder_does_not(tmp_path):
    norm = bytearray(4096)
    base = weights_digest(write_model(tmp_path / "a" / "llama", [b"a" * TENSOR, bytes(norm)]))
    assert weights_digest(write_model(tmp_path / "b" / "other", [b"a" * TENSOR, bytes(norm)])) == base
    assert (
        weights_digest(write_model(tmp_path / "c", [b"a" * TENSOR, bytes(norm)], '{"rope_theta": 1}')) != base
    )
    norm[1234] = 1
    assert weights_digest(write_model(tmp_path / "d", [b"a" * TENSOR, bytes(norm)])) != base


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changed=st.integers(0, 19))
def test_two_fine_tunes_that_differ_in_one_matrix_of_many_have_different_digests(tmp_path, changed):
    tensors = [bytes([index]) * TENSOR for index in range(20)]
    base = weights_digest(write_model(tmp_path / "llama", tensors))
    tensors[changed] = bytes([200]) * TENSOR
    assert weights_digest(write_model(tmp_path / "llama", tensors)) != base


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf", "broken.safetensors"])
def test_other_formats_are_sampled_all_over(tmp_path, name):
    (tmp_path / "config.json").write_text("{}")
    data = bytearray(b"\xff" * 4_000_000)
    (tmp_path / name).write_bytes(data)
    base = weights_digest(tmp_path)
    for changed in range(0, len(data), 1_000_000):
        altered = bytearray(data)
        altered[changed : changed + 20_000] = bytes(20_000)
        (tmp_path / name).write_bytes(altered)
        assert weights_digest(tmp_path) != base


def test_a_folder_without_weights_is_no_model(tmp_path):
    with pytest.raises(WeightsError, match=r"no config\.json"):
        weights_digest(tmp_path / "nowhere")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="no weight files"):
        weights_digest(tmp_path / "b")


def test_every_byte_of_an_adapter_counts_and_no_other_file(tmp_path):
    tensors = [bytes(TENSOR), bytes(TENSOR)]
    write_model(tmp_path, tensors, name="adapter_model.safetensors")
    with pytest.raises(WeightsError, match=r"no adapter_config\.json"):
        adapter_digest(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    base, stamps = adapter_digest(tmp_path), adapter_stamps(tmp_path)
    (tmp_path / "optimizer.pt").write_bytes(b"state")
    assert (adapter_digest(tmp_path), adapter_stamps(tmp_path)) == (base, stamps)
    changed = bytearray(tensors[1])
    changed[TENSOR // 3] = 1
    write_model(tmp_path, [tensors[0], bytes(changed)], name="adapter_model.safetensors")
    os.utime(tmp_path / "adapter_model.safetensors", ns=(1, 1))
    assert adapter_digest(tmp_path) != base
    assert adapter_stamps(tmp_path) != stamps
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(WeightsError, match="no weight files"):
        adapter_stamps(tmp_path)
