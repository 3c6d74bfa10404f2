"""`make models`, of five small models of different kinds."""

import json
import subprocess

from tests.support.pool import ROOT
from tests.vllm.servers import PROGRAM

FIVE = ("GPT2LMHeadModel", "OPTForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM")


def test_five_small_models_answer_the_same_whether_their_kv_is_computed_or_comes_out_of_the_pool(tmp_path):
    subprocess.run(
        [PROGRAM[0], ROOT / "tests/vllm/models.py", tmp_path, "--alone", *FIVE], check=True, cwd=ROOT
    )
    lines = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    whole = [64, 192, 320]
    assert {
        line["name"]: (line["pd-cache"]["outcome"], line["pd-cache"].get("loaded")) for line in lines
    } == {name: ("right", [whole, whole]) for name in FIVE}
