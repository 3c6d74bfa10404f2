"""A cluster across hosts, each a network namespace with a 1 Gbit/s link, and what becomes of it when links
and hosts fail.

One cluster serves all scenarios, one after the other: that each begins with a cluster that works is the
recovery of the one before.
"""

import itertools
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager

import pytest

from launch.doctor.report import Verdict
from tests.support.cluster import CHUNK, OUTAGES, broken, cluster_file, complete, examined, fetched, metric_at
from tests.support.etcd import Etcd
from tests.support.hosts import Network, why_not
from tests.support.leaks import no_leaks
from tests.support.needs import needs_etcd
from tests.support.pool import Node
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow(seconds=60), needs_etcd]
DEADLINE_S = 60
"""Of a request; the proxy answers by then, whatever happens."""
PROMPT = 12 * CHUNK + 9


class Hosts:
    """etcd, master, two prefill and two decode nodes and the proxy, each on a host of its own.

    All of the pool's memory is that of prefill-1, so that what the others store and load crosses links.
    """

    def __init__(self, network, folder):
        names = ("etcd", "master", "prefill-0", "prefill-1", "decode-0", "decode-1", "proxy")
        self.hosts = {name: network.host(name) for name in names}
        self.etcd = Etcd(folder, host=self.hosts["etcd"]).start()
        self.nodes = {}
        roles = ("prefill", "decode")
        nodes = [
            {"name": "master", "role": "master", "port": 50051, "metrics_port": 9003, "client_ttl_s": 2},
            *(
                {
                    "name": name,
                    "role": role,
                    "port": 8100,
                    "segment_size": "64MiB" if name == "prefill-1" else 0,
                }
                for name in names
                if (role := name.split("-")[0]) in roles
            ),
            {"name": "proxy", "role": "proxy", "port": 8000},
        ]
        self.file = cluster_file(
            folder,
            **OUTAGES,
            discovery={"kind": "etcd", "endpoints": [self.etcd.endpoint], "ttl_s": 2},
            proxy={
                "policy": "round_robin",
                "direct_tokens": 0,
                "request_timeout_s": DEADLINE_S,
                "prefill_timeout_s": 5,
            },
            nodes=[{**node, "host": self.hosts[str(node["name"])].address} for node in nodes],
        )

    def start(self, *names):
        """Start these nodes at the same time, and wait until each is ready."""
        for name in names:
            self.nodes[name] = Node(name.split("-")[0], name, self.file, wait=False, host=self.hosts[name])
        for name in names:
            self.nodes[name].wait_ready()

    @property
    def url(self):
        return self.nodes["proxy"].address

    def well(self):
        """Whether the proxy knows all prefill and decode nodes, and would send requests to each."""
        told = fetched(f"{self.url}/health").body
        nodes = {**told["prefill"], **told["decode"]}
        return nodes == {f"http://{self.hosts[name].address}:8100": True for name in EVERYBODY}

    def stored(self, name):
        """Tokens that a node has put into the pool so far."""
        return metric_at(self.nodes[name].address, "pd_cache_tokens_total", op="store", outcome="stored")

    def stop(self):
        # the master last, also where it was started again: the others say goodbye to it
        for name in sorted(self.nodes, key=lambda name: (name == "master", name)):
            self.nodes.pop(name).stop()
        self.etcd.stop()


EVERYBODY = ("prefill-0", "prefill-1", "decode-0", "decode-1")


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Scenarios start nodes again that go on; `hosts` looks after what is left at the end."""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory, alone):
    if reason := why_not():
        pytest.skip(reason)
    with no_leaks(), closing(Network()) as network:
        cluster = Hosts(network, tmp_path_factory.mktemp("hosts"))
        try:
            cluster.start("master")
            cluster.start(*EVERYBODY, "proxy")
            yield cluster
            wait_until_whole(cluster, alone)
        finally:
            cluster.stop()
    names = subprocess.run(
        ("ip", "netns", "list"), capture_output=True, check=True, timeout=60
    ).stdout.decode()
    assert network.prefix not in names


@pytest.fixture(autouse=True)
def works_before(hosts, alone):
    """Recovery without a restart: everybody is routed to again, and prompts go through the pool."""
    wait_until_whole(hosts, alone)


def wait_until_whole(hosts, alone):
    wait_for(hosts.well, "all nodes well")
    rng = random.Random()
    met = set()

    def all_met():
        """Each prefill node stores and each decode node finds: seen on whole hits of prompts that went over
        all of them."""
        prompt = [rng.randrange(512) for _ in range(PROMPT)]
        before = {name: hosts.stored(name) for name in EVERYBODY[:2]}
        received = {name: hosts.hosts[name].received() for name in EVERYBODY[2:]}
        answer = ask(hosts, prompt)
        assert answer.status == 200
        assert answer.tokens == alone(prompt)
        if answer.cached[1] == 12 * CHUNK:
            payload = 12 * CHUNK * 512  # bytes of KV a token of this model
            assert max(hosts.hosts[name].received() - before for name, before in received.items()) > payload
        met.update(
            name for name in before if hosts.stored(name) > before[name] and answer.cached[1] == 12 * CHUNK
        )
        return met == set(before)

    wait_for(all_met, "both prefill nodes hand over through the pool")


def ask(hosts, prompt):
    """Ask the proxy; it must answer within its deadline, and a second for the way."""
    return complete(hosts.url, prompt, timeout=DEADLINE_S + 1)


_seeds = itertools.count(1)


def prompts(count):
    """Prompts that nobody has seen before."""
    rng = random.Random(next(_seeds))
    return [[rng.randrange(512) for _ in range(PROMPT)] for _ in range(count)]


@contextmanager
def asking(hosts, alone, todo):
    """Ask all of `todo` while the block runs; at its end every answer must be there, and right."""
    answers = []

    def one_of(prompt):
        answer = ask(hosts, prompt)
        answers.append(answer)
        return prompt, answer

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(one_of, prompt) for prompt in todo]
        yield answers
        for one in asked:
            prompt, answer = one.result(timeout=len(todo) * DEADLINE_S)
            assert answer.status == 200, answer.body
            assert answer.tokens == alone(prompt)


def cut_in_the_middle(hosts, alone, todo, victim, moved):
    """The victim's link, a slow one, is cut when `moved()` says that a transfer is under way."""
    victim.limit("8mbit")
    try:
        before = moved()
        with asking(hosts, alone, todo):
            wait_for(lambda: moved() - before > 80_000, "a transfer under way")
            victim.cut()
    finally:
        victim.mend()
        victim.limit("1gbit")


def test_a_prefill_hosts_link_is_cut_in_the_middle_of_a_store(hosts, alone):
    memory = hosts.hosts["prefill-1"]  # which receives prompts of 4 KB besides
    cut_in_the_middle(hosts, alone, prompts(8), hosts.hosts["prefill-0"], memory.received)


def test_the_link_of_the_host_with_the_memory_is_cut_in_the_middle_of_a_load(hosts, alone):
    todo = prompts(6)
    with asking(hosts, alone, todo):
        pass  # now the pool has them
    victim = hosts.hosts["prefill-1"]
    cut_in_the_middle(hosts, alone, todo * 2, victim, victim.sent)


def examine(hosts, folder, *inside):
    """What `pd-cache doctor` says, by default from outside of all hosts, which reaches each. `inside`: a
    host, as in `examined`."""
    file = folder / "doctor.yaml"
    file.write_text(hosts.file.read_text())
    return examined(file, *inside)


def test_the_doctor_tells_a_host_that_is_cut_off_from_one_that_only_some_do_not_reach(hosts, tmp_path):
    whole = examine(hosts, tmp_path)
    assert broken(whole) == set()
    (segment,) = (one.about for one in whole.findings if one.check == "transfer.segment")

    reader, memory = hosts.hosts["decode-0"], hosts.hosts["prefill-1"]
    reader.block(memory)
    try:
        report = examine(hosts, tmp_path, *reader.inside())
    finally:
        reader.unblock(memory)
    (unreached,) = [
        one.found for one in report.findings if (one.check, one.about) == ("cluster.node", "prefill-1")
    ]
    assert unreached.startswith(f"down: {memory.address}:8100: "), unreached
    assert ("transfer.segment", segment) in broken(report)

    hosts.hosts["decode-1"].cut()
    try:
        report = examine(hosts, tmp_path)
    finally:
        hosts.hosts["decode-1"].mend()
    found = [one.verdict for one in report.findings if (one.check, one.about) == ("cluster.node", "decode-1")]
    assert found in ([Verdict.BROKEN], []), "it does not answer, or its lease is over"


def test_the_masters_host_is_gone_and_comes_back(hosts, alone):
    master = hosts.hosts["master"]
    with asking(hosts, alone, prompts(12)) as answers:
        wait_for(lambda: answers, "an answer")
        master.cut()
        hosts.nodes.pop("master").kill()
    try:
        with asking(hosts, alone, prompts(4)):
            pass
    finally:
        master.mend()
        hosts.start("master")
