"""vLLM servers for tests: started by `pd-cache launch` from a cluster's file, or plain ones to compare
with."""

import contextlib
import http.client
import json
import math
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import yaml

from bench.lib.vllm_server import vllm_server
from pd_cache.cluster import load_config
from pd_cache.paged import has_gpu
from tests.support.cluster import fetched, metric_at
from tests.support.pool import Node, free_port
from tests.support.waiting import wait_for

CHUNK, BLOCK = 64, 32
SHARDS = 2
"""Into how many objects a chunk is cut: as many as a tensor parallel node here has ranks, so that all nodes
share."""
MODEL_NAME = "demo"
CACHE = "cache-0"

ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0-1",
    # the worker of an engine of one rank lives in the engine's process, as on a GPU: a process less to start,
    # and that costs a third of the processor time that a server takes to get ready
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "MC_LOG_LEVEL": "ERROR",
}
GPU = has_gpu()
DTYPE = "bfloat16" if GPU else "float32"
"""Attention's kernels of GPUs take no float32; not each CPU has bfloat16's."""
ARGS = {
    "max-model-len": 4096,
    "block-size": BLOCK,
    "max-num-batched-tokens": 256,
    "num-gpu-blocks-override": 1024,
    "dtype": DTYPE,
    "enforce-eager": True,
    "enable-prompt-tokens-details": True,
    **({"gpu-memory-utilization": 0.15} if GPU else {}),  # up to five servers run at the same time
}
"""Of every server, plain or not: small steps, so that each longer prompt is computed in several, and 128 MiB
of KV cache."""

PROGRAM = ["vllm"]
"""vLLM's command. The session's fixture `warm_vllm` puts one in its place that starts sooner."""

"""The fixture `new_prompt`: returns a prompt of so many tokens that no other test has used."""
LENGTH = 1000
WHOLE = LENGTH // CHUNK * CHUNK
"""A prompt's tokens, and those of its whole chunks."""


def whole_chunks(tokens):
    return tokens // CHUNK * CHUNK


TRANSFER = {"staging_size": "32MiB", "prefault": False}
HANDOFF_MS = 8000
_READY_S = 900.0


class Answer(NamedTuple):
    """What a completion request came back with."""

    tokens: list
    cached: int
    """Tokens of the prompt that were not computed."""
    kv_transfer_params: dict | None
    logprobs: list
    """Of each token; empty unless they were asked for."""
    seconds_best: list
    """The logprob of the token that came second; empty unless two were asked for."""

    @property
    def outcome(self):
        """What was not computed, and what was answered."""
        return self.cached, self.tokens


def close(one, other):
    """Whether two answers are equal, except that log probabilities differ by rounding: after a hit, a prompt
    is computed in other pieces."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(close(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, abs_tol=1e-3)
    return bool(one == other)


class Server:
    """An OpenAI-compatible server."""

    def __init__(self, url, headers=None):
        """`headers` are sent with each request."""
        self.url = url
        self.headers = headers or {}

    def complete(self, prompt, max_tokens=6, headers=None, **options):
        """Greedy, and always `max_tokens` long."""
        answer = self.ask("/v1/completions", {**_body(prompt, max_tokens), **options}, headers)
        details = answer["usage"]["prompt_tokens_details"] or {}
        logprobs = answer["choices"][0]["logprobs"] or {}
        return Answer(
            answer["choices"][0]["token_ids"],
            details.get("cached_tokens") or 0,
            answer.get("kv_transfer_params"),
            logprobs.get("token_logprobs", []),
            [sorted(best.values())[-2] for best in logprobs.get("top_logprobs") or [] if len(best) > 1],
        )

    def store(self, prompt, max_tokens=6, **options):
        """The same, and waits until everything is stored and every block given back."""
        answer = self.complete(prompt, max_tokens, **options)
        self.settle()
        return answer

    def settle(self):
        """Waits until nobody holds a block of the KV cache."""
        wait_for(lambda: not self.blocks_in_use, "all blocks given back")

    def complete_all(self, prompts, max_tokens=6, **options):
        """All at once."""
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(prompt, max_tokens, **options), prompts))

    def stream(self, prompt, max_tokens=6):
        """The token ids of each event."""
        choices = self.choices("/v1/completions", {**_body(prompt, max_tokens), "stream": True})
        return [choice.get("token_ids") or [] for choice in choices]

    def chat(self, text, max_tokens=6):
        """The content of a streamed chat completion."""
        body = {**_body([], max_tokens), "messages": [{"role": "user", "content": text}], "stream": True}
        del body["prompt"], body["return_token_ids"]
        return "".join(
            choice["delta"].get("content") or "" for choice in self.choices("/v1/chat/completions", body)
        )

    @contextlib.contextmanager
    def abandoned(self, prompt, max_tokens=400, **options):
        """A request whose client goes away at the end of the block."""
        connection = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=600)
        try:
            body = json.dumps({**_body(prompt, max_tokens), "stream": True, **options})
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json", **self.headers}
            )
            yield
        finally:
            connection.close()

    def forget_prefixes(self):
        """Empties vLLM's own prefix cache."""
        self.ask("/reset_prefix_cache", {})

    def reset_external(self):
        """Does the same, and says that the server has other weights now."""
        self.ask("/reset_prefix_cache?reset_external=true", {})

    def reload_weights(self, folder):
        """Replaces the model's weights while it runs."""
        self.ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    def metric(self, name, **labels):
        """The sum of a metric over all label sets that have `labels`."""
        return metric_at(self.url, name, self.headers, **labels)

    @property
    def loaded(self):
        """How many tokens it has loaded so far."""
        return self.metric("vllm:pd_cache_tokens_total", op="retrieve", outcome="loaded")

    @property
    def blocks_in_use(self):
        """Share of the KV cache's blocks that somebody holds."""
        return self.metric("vllm:kv_cache_usage_perc")

    def ask(self, path, body=None, headers=None):
        """What it answers to a GET; to a POST if there is a body. AssertionError, with what the server says,
        if it is an error."""
        answer = fetched(self.url + path, body, headers={**self.headers, **(headers or {})}, timeout=600)
        assert answer.status == 200, answer
        return answer.body

    def choices(self, path, body):
        """Those of each event of a stream."""
        for line in self.ask(path, body).splitlines():
            if line.startswith("data: {"):
                yield from json.loads(line[6:])["choices"]


def _body(prompt, max_tokens):
    return {
        "model": MODEL_NAME,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


class PdCacheServer(Server):
    """A prefill or decode node, as `pd-cache launch ROLE` runs it."""

    def __init__(self, name, file, cache_url=None):
        """Started, but not ready yet. `cache_url` is where the metrics of its cache server are, if it has
        one."""
        self.node = Node(role_of(name), name, file, wait=False)
        self.file = file
        self._cache_url = cache_url
        super().__init__("")

    def troubles(self, op, reason):
        """Chunks that ended so, in vLLM's connector or in the cache server behind it."""
        own = self.metric("vllm:pd_cache_troubles_total", op=op, reason=reason)
        if self._cache_url is None:
            return own
        return own + metric_at(self._cache_url, "pd_cache_troubles_total", op=op, reason=reason)

    def wait_ready(self):
        self.node.wait_ready(_READY_S)
        self.url = self.node.address


def connector(name, role, options, **more):
    """The flag by which anybody's `vllm serve` gets a connector."""
    config = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": options, **more}
    return f"--kv-transfer-config={json.dumps(config)}"


@contextlib.contextmanager
def by_hand(model, *more):
    """`vllm serve`, not started by pd-cache; without `more` flags it has no connector."""
    with vllm_server(
        model, MODEL_NAME, ARGS, ENV, *more, ready_timeout_s=_READY_S, program=PROGRAM[0]
    ) as url:
        yield Server(url)


class Reference:
    """A plain vLLM's outputs, each computed once."""

    def __init__(self, server):
        """`server` waits until the plain vLLM is ready."""
        self.server = server
        self._known = {}

    def tokens(self, prompt, max_tokens=6):
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = self.server().complete(prompt, max_tokens).tokens
        return self._known[key]


def cluster_file(folder, pool, model, nodes, *, args=None, connector=None, mode="in-process", **sections):
    """A file that describes prefill and decode nodes (`prefill-0`, …) over a pool that runs already.

    In the mode `server` the cache of all of them is in one cache server, in the mode `mixed` that of decode
    nodes. No deadline is met too late because the machine is busy: it has few cores, every one of these
    servers computes on all of them, and threads that had work to do, the pool's too, were seen to wait for a
    core for seconds.
    """
    described = [
        {"name": name, "role": role_of(name), "port": 0, "segment_size": 0, **options}
        for name, options in nodes.items()
    ]
    if mode != "in-process":
        for node in described:
            if mode == "server" or node["role"] == "decode":
                node["cache_server"] = CACHE
        described.append(
            {
                "name": CACHE,
                "role": "cache-server",
                "metrics_port": free_port(),
                "segment_size": 0,
                "session_s": 15,
            }
        )
    tree = {
        "transfer": {**TRANSFER, "timeouts": {"exist_ms": 10_000, "get_ms": 10_000, "put_ms": 20_000}},
        "cache": {"chunk_size": CHUNK, "shards": SHARDS},
        "engine": {
            "kind": "vllm",
            "executable": PROGRAM[0],
            "model": str(model),
            "name": MODEL_NAME,
            "args": {**ARGS, **(args or {})},
            "env": ENV,
        },
        # tests count loads, and on a machine that is busy with other things any load may seem slower than to
        # compute
        "connector": {
            "load": "always",
            "lookup_timeout_ms": 10_000,
            "load_timeout_ms": 60_000,
            **(connector or {}),
        },
        "handoff": {"wait_ms": HANDOFF_MS},
        "supervisor": {"ready_timeout_s": _READY_S, "stop_grace_s": 30},
        "nodes": [pool.master, *described],
        **sections,
    }
    tree["name"] = f"vllm-{free_port()}"  # a cache server's socket is named after it
    file = folder / f"{tree['name']}.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


@contextlib.contextmanager
def running(*files, wait=True):
    """The prefill and decode nodes of these files, started at the same time, and their cache servers: most of
    a start keeps one core busy. They are ready unless `wait` is false."""
    with contextlib.ExitStack() as stack:
        servers = []
        try:
            for file in files:
                config = load_config(file)
                cache, cache_url = config.node(CACHE), None
                if cache is not None:
                    cache_url = f"http://127.0.0.1:{cache.metrics_port}"
                    stack.enter_context(cache_server(file))
                nodes = config.by_role("prefill") + config.by_role("decode")
                servers += [PdCacheServer(node.name, file, cache_url) for node in nodes]
            for server in servers if wait else ():
                server.wait_ready()
            yield servers
        finally:
            statuses = [server.node.stop(timeout=180) for server in servers]
    assert not any(statuses), "".join(line for server in servers for line in server.node.errors[-40:])


@contextlib.contextmanager
def before(file, urls, **settings):
    """A proxy before the nodes of a file that are at these URLs, by their names."""
    tree = yaml.safe_load(file.read_text())
    ports = {name: {"port": int(url.rpartition(":")[2])} for name, url in urls.items()}
    listed = [{**node, **ports.get(node["name"], {})} for node in tree["nodes"]]
    tree |= {"nodes": [*listed, {"name": "proxy", "role": "proxy", "port": 0}], "proxy": settings}
    described = file.with_suffix(".proxy.yaml")
    described.write_text(yaml.safe_dump(tree))
    with Node("proxy", "proxy", described) as node:
        yield Server(node.address)


@contextlib.contextmanager
def begun(server):
    """Starts `server` meanwhile; what is yielded waits until it is ready, and raises what its start
    raised."""
    # the thread stays until the end: the kernel ends a child together with the thread that started it
    with ThreadPoolExecutor(1) as thread, contextlib.ExitStack() as stack:
        starting = thread.submit(stack.enter_context, server)
        try:
            yield starting.result
        finally:
            with contextlib.suppress(Exception):
                starting.result()


@contextlib.contextmanager
def cache_server(file):
    """The cache server of the file; a test may kill it, and start another."""
    node = Node(role_of(CACHE), CACHE, file)
    try:
        yield node
    finally:
        node.stop()


def role_of(name):
    """The role of a node of `cluster_file`."""
    return "cache-server" if name == CACHE else name.split("-")[0]
