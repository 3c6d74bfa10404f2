"""The books of a soak: all answers, which of them were wrong or late, and what requests through the proxy
brought."""

import contextlib
import http.client
import json
import random
import threading
import time
import urllib.request
from collections import Counter
from typing import NamedTuple

from tests.soak.cluster import FACES, REQUEST_S
from tests.soak.oracle import VOCABULARY
from tests.support.proxy import one_hint

ALLOWANCE_S = 2.0
"""Seconds beyond its deadline that every answer may take, for scheduling on a busy machine."""
OLD_S = 0.1
"""Seconds after an engine's weights have changed, as this machine's clocks tell them, from which no load of
it may begin that brings KV of earlier weights."""
TICK_S = 0.02
OUTPUT_TOKENS = 8
_SHOWN = 20


class Span(NamedTuple):
    """A time from `begin` to `end`, in seconds since 1970."""

    begin: float
    end: float


class Call(NamedTuple):
    """An answered call."""

    node: str
    what: str
    answer: Span
    bound: float
    starved: float = 0.0
    """Seconds for which the kernel let the caller wait for a processor."""
    in_copy: bool = False
    """Whether the caller found the cache server in the middle of a copy into its blocks when it wanted them
    back."""

    def seconds_late(self, excused):
        """Returns by how much the answer missed its deadline.

        Time that the machine or the soak itself took from the caller (`starved`, `excused`) does not count.
        """
        begin, end = self.answer
        excused_s, at = 0.0, begin
        for span in sorted(excused):
            excused_s += max(0.0, min(span.end, end) - max(span.begin, at))
            at = max(at, span.end)
        return max(0.0, end - begin - self.starved - excused_s - self.bound - ALLOWANCE_S)


class Books:
    """Thread-safe."""

    def __init__(self):
        self._lock = threading.Lock()
        self.counts = Counter()
        """Operations, requests by what became of them, bytes compared, tokens loaded …"""
        self.troubles = {kind: [] for kind in ("wrong", "late", "raised", "ended", "lost", "left")}  # fmt: skip
        self.resets = {}
        """When each engine's weights changed, in seconds since 1970, by the engine and the number of the
        weights."""
        self.stops = {}
        """When each node was stopped, or its host cut off (`link of HOST`)."""
        self.standstills = []
        """When the whole machine stood still: a thread that wants to run every `TICK_S` did not."""
        self.answers = []
        """Prompts, and what the model says to each without a cache."""
        self._looking = threading.Lock()
        self.roles = {}
        """What each node of the role `both` was last seen to do."""
        self._calls = []
        self._open = {}
        self._past = 0
        """Changes of weights of processes that have ended."""
        self._answers = {}
        """The last answer of each engine to each command."""

    def add(self, kind, what):
        """Notes a trouble."""
        with self._lock:
            self.troubles[kind].append(what)

    def event(self, node, event):
        """Takes in a line that an engine printed. Raises RuntimeError if the engine's program itself is
        broken."""
        kind = event["e"]
        if kind == "broken":
            raise RuntimeError(f"{node}: {event['what']}")
        if kind == "begin":
            self._open[event["lane"]] = event
        elif kind == "end":
            self._end(node, event)
        else:
            if kind == "weights":
                self.resets[node, event["number"]] = event["end"]
            self._answers[node, kind] = event

    def answer(self, node, kind):
        """Takes out and returns the engine's answer to a command; None if there is none yet."""
        return self._answers.pop((node, kind), None)

    def forget(self, node):
        """Notes that an engine's process has ended: nothing waits any more for the operations of its lanes.
        The next one has the first weights."""
        for change in [change for change in self.resets if change[0] == node]:
            self._past += 1
            del self.resets[change]
        for lane in [lane for lane in self._open if lane.startswith(f"{node}/")]:
            del self._open[lane]
            self.counts["operations that ended with their process"] += 1

    def overdue(self):
        """Returns the operations that are not answered."""
        now = time.time()
        return [f"{lane} {one['kind']}, begun {now - one['begin']:.1f} s ago for {one['bound']:g} s" for lane, one in self._open.items()]  # fmt: skip

    def request(self, face, label, reply):
        """Notes that a request has ended."""
        if reply.wrong:
            self.add("wrong", f"{label}: {reply.wrong}")
        with self._lock:
            self.counts[f"requests to {face}, {reply.outcome}"] += 1
            self.counts["tokens, cached by nodes"] += reply.cached
            self.counts["tokens, streamed"] += reply.streamed
            self.counts["tokens, pinned"] += reply.pinned
            self._calls.append(Call(face, f"{label} ({reply.outcome})", reply.span, FACES[face][1]))

    def look(self, proxy):
        """Counts the nodes whose roles the proxy has changed. One that starts anew has changed none."""
        with self._looking, contextlib.suppress(OSError, ValueError, http.client.HTTPException):
            host, port = proxy
            with urllib.request.urlopen(f"http://{host}:{port}/health", timeout=1.0) as page:
                found = json.load(page)["roles"]
            for node, now in found.items():
                if self.roles.get(node, now["does"]) != now["does"] and now["why"] != "it is new":
                    with self._lock:
                        self.counts["roles changed" + " by load" * now["why"].startswith("prompts")] += 1
                self.roles[node] = now["does"]

    def judge(self):
        """Adds the answers that came too late, the worst first."""
        found = []
        for call in self._calls:
            mine = self.stops.get(call.node, [])
            if call.node in FACES:
                mine = [*mine, *self.stops.get(f"link of {FACES[call.node][0]}", ())]
            if call.in_copy:  # the one case in which a stopped cache server delays an engine
                mine = [*mine, *self.stops.get("cache", ())]
            if late := call.seconds_late([*mine, *self.standstills]):
                found.append((late, call))
        for late, call in sorted(found, reverse=True):
            took, begin = call.answer.end - call.answer.begin, call.answer.begin
            self.add("late", f"{call.node} {call.what}: {late:.2f} s late, {took:.2f} s for {call.bound:g} s, begun at {begin:.3f}")  # fmt: skip

    def report(self):
        """Returns everything that was counted and what was wrong, as lines of text."""
        lines = [f"{name}: {count}" for name, count in sorted({**self.counts, "resets": self._past + len(self.resets)}.items())]  # fmt: skip
        for kind, all_of_kind in self.troubles.items():
            lines += [f"{len(all_of_kind)} {kind}", *(f"  {what[:1500]}" for what in all_of_kind[:_SHOWN])]
        return "\n".join(lines)

    def _end(self, node, event):
        self._open.pop(event["lane"], None)
        kind, begin = event["kind"], event["begin"]
        name = f"{event['lane']} {kind} of {event['prompt']} at {begin:.3f}"
        self.counts[f"operations, {kind}"] += 1
        self.counts[f"tokens, {kind}"] += event["hit"]
        self.counts["tokens, declined"] += event["declined"]
        self.counts["bytes compared"] += event["compared"]
        if kind == "retrieve" and event["hit"]:
            newer = [
                end for (of, number), end in self.resets.items() if of == node and number > event["weights"]
            ]
            if newer and begin - min(newer) > OLD_S:
                self.add("wrong", f"{name}: KV of weights {event['weights']}, {begin - min(newer):.2f} s after others came")  # fmt: skip
        if event["wrong"]:
            self.add("wrong", f"{name}: {event['wrong']} slots: {'; '.join(event['first'])}")
        if event["complaint"]:
            self.add("raised" if event["raised"] else "wrong", f"{name}: {event['complaint']}")
        answer = Span(begin, event["end"])
        self._calls.append(
            Call(node, f"{event['lane']} {kind}", answer, event["bound"], event["starved"], event["in_copy"])
        )


class Reply(NamedTuple):
    """What became of a request."""

    span: Span
    outcome: str
    """`answered`, `refused 503` and the like, or the name of what was raised (KeyError: a stream ended with
    an error)."""
    wrong: str
    """The wrong tokens; empty if none was wrong."""
    cached: int = 0
    """Prompt tokens that the nodes took from the cache."""
    streamed: int = 0
    """Those of them that the decode node loaded while the prefill node computed."""
    pinned: int = 0


def complete(address, prompt, expected, pin_s=0.0, **more):
    """Sends one request and reads its answer to the end. `pin_s`: how long its prompt is to be pinned;
    `more`: other fields of its body."""
    begin, cached, streamed, pinned, wrong, outcome = time.time(), 0, 0, 0, "", "answered"
    connection = http.client.HTTPConnection(*address, timeout=REQUEST_S + 15.0)
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        **more,
    }
    if pin_s:
        body["kv_hints"] = one_hint("kv.retain", {"ttl_s": pin_s}, str(prompt[0]))
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            answer.read()
            outcome = f"refused {answer.status}"
        else:
            events = answer.read().split(b"data: ")  # one, unless it is a stream
            chunks = [json.loads(event) for event in events if event.startswith(b"{")]
            tokens = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
            whole = chunks[-1]
            wrong = "" if tokens == expected else f"got {tokens} instead of {expected}"
            cached = sum(
                (whole["pd_cache"].get(node) or {}).get("cached_tokens", 0) for node in ("self", "prefill")
            )
            streamed = whole["pd_cache"]["report"]["streamed"]
            if pin_s:
                told = json.loads(answer.headers["X-KV-Hints"] or "")
                pinned = told.get("actions", [{}])[0].get("tokens", 0)
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        outcome = type(error).__name__
    finally:
        connection.close()
    return Reply(Span(begin, time.time()), outcome, wrong, cached, streamed, pinned)


def served_prompts(seed, count):
    """Returns prompts for the proxy, many of which share a prefix."""
    rng = random.Random(f"{seed}/served")
    heads = [rng.choices(range(VOCABULARY), k=rng.randint(32, 320)) for _ in range(max(1, count // 4))]
    return [rng.choice(heads) + rng.choices(range(VOCABULARY), k=rng.randint(1, 120)) for _ in range(count)]


class Client(threading.Thread):
    """Sends one request after the other, and looks at the roles of nodes."""

    def __init__(self, number, seed, faces, books, crowd=False):
        """`crowd`: no cache has its prompts, and it does not pause between them."""
        super().__init__(name=f"client-{number}", daemon=True)
        self._faces, self._books, self._crowd = faces, books, crowd
        self._rng = random.Random(f"{seed}/client/{number}")
        self.go, self.closing, self.resting = threading.Event(), threading.Event(), threading.Event()

    def run(self):
        rng = self._rng
        while not self.closing.wait(0.0 if self._crowd else min(4.0, rng.expovariate(1.5))):
            if not self.go.is_set():
                self.resting.set()
                self.go.wait()
                self.resting.clear()
                continue
            prompt, expected = rng.choice(self._books.answers)
            face = rng.choice(list(self._faces))
            more = {"cache_salt": str(rng.random())} if self._crowd else {}
            more["stream"] = rng.random() < 0.5
            reply = complete(self._faces[face], prompt, expected, rng.choice((0.0, 0.0, 0.0, 10.0)), **more)
            self._books.request(face, f"{self.name}, prompt of {len(prompt)} tokens", reply)
            self._books.look(self._faces["proxy"])
        self.resting.set()
