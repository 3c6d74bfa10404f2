"""`bench ttft` by device: what runs with vLLM is in tests/vllm."""

import pytest

from bench.lib.links import linked
from bench.suites.ttft import arguments
from tests.support.cli import cli


def test_on_a_gpu_two_servers_fit_and_no_limit_of_cpus_is_set():
    on_cpu, on_gpu = (arguments(4096, "mamba2", gpu=gpu) for gpu in (False, True))
    assert 2 * on_gpu.pop("gpu-memory-utilization") < 1
    assert set(on_cpu) - set(on_gpu) == {"max-num-batched-tokens", "max-num-seqs"}


def test_nodes_that_compute_on_a_gpu_have_all_cores():
    with linked(None, gpu=False) as on_cpu, linked(None, gpu=True) as on_gpu:
        assert [place.before for place in on_cpu] == [("taskset", "-c", "0"), ("taskset", "-c", "1")]
        assert [place.before for place in on_gpu] == [(), ()]


@pytest.mark.parametrize("rate", ["foo", "10", "0mbit", "-5mbit", "1.5gbit", ""])
def test_a_link_whose_rate_makes_no_sense_is_an_error(rate):
    told = cli("bench", "ttft", "--link", "1gbit", "--link", rate, code=2).output
    assert f"expected a rate from 1mbit to 9999gbit, got '{rate}'" in told
