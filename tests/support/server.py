"""Cache servers and the engines that talk to them, small enough for tests."""

import itertools
import uuid
from contextlib import ExitStack, contextmanager

import msgspec
import yaml
import zmq

from launch.http import fetch
from launch.watch.figures import read_samples, total
from pd_cache.cluster import CacheServerNode
from pd_cache.config import CacheConfig
from pd_cache.layout import KVLayout
from pd_cache.server.adapters import LoadStoreOp, SchedulerAdapter, WorkerAdapter
from pd_cache.server.protocol import (
    EngineIdentity,
    Hello,
    Retrieve,
    decode_answer,
    encode,
)
from pd_cache.server.server import CacheServer
from tests.support.engines import BLOCK, BLOCKS, CHUNK
from tests.support.kv import holds_token, make_cache, write_prompt
from tests.support.pool import PATIENT, Node, free_port
from tests.support.waiting import wait_for

SMALL = {"staging_size": "1MiB", "timeouts": {**PATIENT, "close_ms": 10_000}}
LATE_S = 300.0
"""When a request is given up here: so late that no test waits for it."""
PER_CHUNK = CHUNK // BLOCK


@contextmanager
def served(pool, folder, *, cache=None, lease_s=10.0, **options):
    """A cache server in this process, on the pool, whose sessions end when a test ends them."""
    settings = pool.settings(cache or CacheConfig(chunk_size=CHUNK), SMALL)
    node = msgspec.convert(
        {"role": "cache-server", "name": "cache", "session_s": 12 * LATE_S, **options}, CacheServerNode
    )
    server = CacheServer(settings, node, f"ipc://{folder}/{uuid.uuid4().hex[:6]}.sock", lease_s=lease_s)
    try:
        yield server
    finally:
        server.close()
        for backend in server.models.backends:
            backend.memory.pool.check_integrity()


class ServerProcess(Node):
    """`pd-cache launch cache-server` on a pool, always at the same address."""

    def __init__(self, pool, folder, **options):
        """`options` of the node in the file."""
        port = free_port()
        self.metrics = f"http://127.0.0.1:{port}"
        tree = {
            "name": "test",
            "transfer": {**SMALL, "prefault": False},
            "cache": {"chunk_size": CHUNK},
            "nodes": [
                pool.master,
                {
                    "name": "cache",
                    "role": "cache-server",
                    "url": f"ipc://{folder}/cache.sock",
                    "metrics_port": port,
                    **options,
                },
            ],
        }
        file = folder / "server.yaml"
        file.write_text(yaml.safe_dump(tree))
        super().__init__("cache-server", "cache", file)


class Engine:
    """A serving engine as a cache server sees it: a scheduler, a worker and a paged cache."""

    def __init__(self, url, model=None, *, cache=None, register=True, move_timeout_s=LATE_S, **identity):
        """`identity`: further fields of `EngineIdentity`."""
        self.model = model or uuid.uuid4().hex
        self.cache = cache or make_cache(blocks=BLOCKS, block_size=BLOCK)
        self.layout = KVLayout.from_tensors(self.cache)
        it = EngineIdentity(model=self.model, block_size=BLOCK, **identity)
        with ExitStack() as stack:
            self.scheduler = SchedulerAdapter(
                url, None, it, connect_timeout_s=LATE_S, lookup_timeout_s=LATE_S
            )
            stack.callback(self.scheduler.shutdown)
            self.worker = WorkerAdapter(
                url, None, it, connect_timeout_s=LATE_S, move_timeout_s=move_timeout_s
            )
            stack.callback(self.worker.shutdown)
            if register:
                self.worker.register_kv_caches(self.tensors)
            self.close = stack.pop_all().close

    @property
    def tensors(self):
        """The cache as an engine registers it."""
        return {str(index): tensor for index, tensor in enumerate(self.cache)}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    def compute(self, tokens, first_block=0):
        """Fill blocks as the model would."""
        first = first_block * BLOCK
        write_prompt(self.cache, self.layout, tokens, range(first, first + len(tokens)))

    def holds(self, tokens, first_block=0):
        """Whether the blocks hold exactly what the model would have computed."""
        first = first_block * BLOCK
        return all(
            holds_token(self.cache, self.layout, tokens[: index + 1], first + index)
            for index in range(len(tokens))
        )

    def lookup(self, tokens, request="request", **options):
        """Ask as a scheduler does, until there is an answer."""
        self.scheduler.maybe_submit_lookup_request(request, token_ids=tokens, **options)
        wait_for(lambda: self.scheduler.check_lookup_result(request) is not None, "the lookup's answer")
        found = self.scheduler.check_lookup_result(request)
        self.scheduler.cleanup_lookup_result(request)
        return found or 0

    def op(self, tokens, first_block=0, **options):
        """All whole chunks of a prompt, in blocks one after the other."""
        end = len(tokens) // CHUNK * CHUNK
        blocks = list(range(first_block, first_block + end // BLOCK))
        return LoadStoreOp(blocks, token_ids=tokens, start=0, end=end, **options)

    def store(self, tokens, first_block=0, request="request", **options):
        """Compute, store and wait for it."""
        self.compute(tokens, first_block)
        self.worker.submit_store_request(request, self.op(tokens, first_block, **options))
        self.finish_store(request)

    def finish_store(self, request="request"):
        wait_for(lambda: request in (self.worker.get_finished({request})[0] or ()), "the store's end")

    def retrieve(self, tokens, first_block=0, request="request", **options):
        """Load and wait for it; the bad blocks."""
        self.worker.submit_retrieve_request(request, self.op(tokens, first_block, **options))
        self.finish_retrieve(request)
        return self.worker.get_block_ids_with_load_errors()

    def finish_retrieve(self, request="request"):
        wait_for(lambda: request in (self.worker.get_finished(set())[1] or ()), "the retrieve's end")


def store_surely(engine, tokens):
    """Store, again until it is there: a server's store opens in the background."""

    def there():
        engine.store(tokens)
        found = engine.lookup(tokens)
        engine.scheduler.end_session("request")
        return found == len(tokens) // CHUNK * CHUNK

    wait_for(there, "the prompt being stored")


def move_unchecked(connection, kind, names, blocks):
    """The answer to a store or retrieve of an engine that checks nothing itself. Raises ServerRefusedError if
    the server refuses it."""
    place = connection.fence.admit(loads=kind is Retrieve)
    assert place is not None
    try:
        return connection.ask(kind("", tuple(names), tuple(blocks), *place, int(LATE_S * 1000)), LATE_S)
    finally:
        wait_for(lambda: connection.fence.revoke(*place), "the ticket being taken away")


class StrangePeer:
    """A client that says what it likes, whether or not it makes sense, without a Unix socket."""

    def __init__(self, url):
        self.name = uuid.uuid4().hex
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDTIMEO, 60_000)
        self._socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self._socket.setsockopt(zmq.IDENTITY, self.name.encode())
        self._socket.connect(url)
        self._numbers = itertools.count(1)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self._context.destroy(0)

    def send(self, frames):
        self._socket.send_multipart(list(frames))

    def say(self, message):
        self.send([encode(next(self._numbers), message)])

    def hear(self):
        """The next answer."""
        return decode_answer(self._socket.recv_multipart()[-1])[1]

    def ask(self, message):
        self.say(message)
        return self.hear()

    def hello(self):
        return self.ask(Hello(self.name, "observer"))


def running_at(metrics):
    """How many operations wait or run at the cache server with these metrics. Raises OSError or ValueError if
    it does not answer."""
    return total(read_samples(fetch(f"{metrics}/metrics", 60.0).decode()), "pd_cache_server_running")


def pinned_keys(server):
    """How many keys all sessions hold. A key that several sessions hold counts several times."""
    held = [pins for session in list(server.sessions._sessions.values()) for pins in session.pins.values()]
    return sum(len(pins.pinned) + len(pins.leased) for pins in held)
