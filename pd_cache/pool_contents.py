"""Which chunks a pool holds, from lists of its keys, and what changed from one list to the next, as KV events. Pure.

Mooncake's master does not report what it evicts. So the caller lists the pool's keys again and again, and this module says what came and what
went. A chunk is there if all its shards are there, in the current epoch of its model's weights.

The events are vLLM's: `medium` STORAGE, `locality` REMOTE, and as `ownership` the fingerprint of the namespace. A chunk's hash in them is its
name, 16 bytes. If an engine has published the hashes and tokens of a chunk's blocks, the chunk's event has those instead, and the first 16
bytes of the last hash are the name. An event without tokens may name many chunks, in no order. A removal has a chunk's name, and also the
hashes of its blocks if they were published: a subscriber may have learned of the chunk in either way, or in both.
"""

from __future__ import annotations

import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from msgspec import Raw, structs

from pd_cache.kv_events import (
    MEDIUM_STORAGE,
    REMOTE,
    BlockHash,
    ClearedEvent,
    KvEvent,
    RemovedEvent,
    StoredEvent,
)
from pd_cache.tokens import HASH_BYTES, KEY_FORMAT, Namespace

_EPOCHS = b"epochs"
_MANIFEST = b"manifest"
_A_EVENT = 8192
"""The most hashes of an event."""
_MOST_LEARNED = 1 << 14
"""For how many chunks engines' events are kept that have not been published again yet."""
_MOST_FINGERPRINTS = 256
_MOST_BLOCKS = 1024
_MOST_HASH_BYTES = 64
_MOST_TOKEN_BYTES = 1 << 16

Chunk = tuple[str, bytes]
"""A namespace's fingerprint and a name in it."""


class PoolListing:
    """What one list of a pool's keys says."""

    def __init__(self, keys: Iterable[bytes], most_chunks: int) -> None:
        """`keys`: the pool's, in any order. At most `most_chunks` chunks are noted."""
        self.shards: dict[bytes, dict[bytes, int]] = {}
        """For each namespace and epoch, as in keys: how many shards of each chunk there are, by the chunk's name in hex."""
        self.widths: dict[str, int] = {}
        """How many shards chunks of each namespace have, as far as is seen."""
        self.signs: dict[bytes, dict[str, int]] = {}
        """For each root of epochs: the number of the last epoch of each run."""
        self.manifests: set[str] = set()
        self.left_out = 0
        """How many chunks were not noted."""
        form, count = KEY_FORMAT.encode(), 0
        spaces = self.shards
        for key in keys:
            parts = key.split(b"/")
            if len(parts) == 4 and len(parts[3]) == 2 * HASH_BYTES and parts[0] == form and parts[1] != _EPOCHS:
                _, space, shard, name = parts
                chunks = spaces.get(space)
                if chunks is None:
                    if len(spaces) >= _MOST_FINGERPRINTS:
                        continue
                    chunks = spaces[space] = {}
                known = chunks.get(name, 0)
                if not known:
                    if count >= most_chunks:
                        self.left_out += 1
                        continue
                    count += 1
                chunks[name] = known + 1
                if shard != b"0":
                    self._note_width(space, shard)
            elif len(parts) >= 3 and parts[0] == form:
                self._note_other(parts)

    def _note_other(self, parts: Sequence[bytes]) -> None:
        if parts[1] == _EPOCHS:
            self._note_sign(parts)
        elif parts[2] == _MANIFEST and len(self.manifests) < _MOST_FINGERPRINTS:
            self.manifests.add(parts[1].decode("ascii", "replace"))

    def _note_width(self, space: bytes, shard: bytes) -> None:
        if shard.isdigit() and len(shard) < 6:
            fingerprint = space.partition(b".")[0].decode("ascii", "replace")
            self.widths[fingerprint] = max(self.widths.get(fingerprint, 1), int(shard) + 1)

    def _note_sign(self, parts: Sequence[bytes]) -> None:
        if len(parts) == 3:
            self.signs.setdefault(parts[2], {})
            return
        run, _, number = parts[3].partition(b"-")
        if len(run) == 8 and number.isdigit() and len(number) < 13:
            runs, label = self.signs.setdefault(parts[2], {}), run.decode("ascii", "replace")
            runs[label] = max(runs.get(label, 0), int(number))


class Change(NamedTuple):
    """What a listing changes."""

    events: list[KvEvent]
    chunks: dict[str, set[bytes]]
    epochs: dict[str, str]
    forgotten: list[Chunk]
    described: list[Chunk]


class PoolContents:
    """Which chunks were there in the last listing. Not thread-safe."""

    def __init__(self, most_chunks: int) -> None:
        self.most_chunks = most_chunks
        self._chunks: dict[str, set[bytes]] = {}
        """The names of the chunks, by the namespace's fingerprint."""
        self._epochs: dict[str, str] = {}
        self._learned: OrderedDict[bytes, StoredEvent] = OrderedDict()
        """What engines have published, by name, about chunks of which no such event has gone out yet."""
        self._hashes: dict[Chunk, bytes] = {}
        """For each chunk that was published with the hashes of its blocks: the length of one hash, and then all hashes."""

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def learn(self, event: StoredEvent) -> None:
        """Takes in an engine's `slim` event about a chunk that it has stored, if it is of use (`describes_chunk`)."""
        if not describes_chunk(event):
            return
        last = event.block_hashes[-1]
        assert isinstance(last, bytes)
        self._learned[last[:HASH_BYTES]] = event
        while len(self._learned) > _MOST_LEARNED:
            self._learned.popitem(last=False)

    def compare(self, listing: PoolListing, namespaces: Mapping[str, Namespace]) -> Change:
        """Returns what changes with a listing. `namespaces`: those of its fingerprints, as far as they are known."""
        now: dict[str, set[bytes]] = {}
        epochs = dict(self._epochs)
        fingerprints = {space.partition(b".")[0] for space in listing.shards}
        for raw in fingerprints:
            fingerprint = raw.decode("ascii", "replace")
            space = namespaces.get(fingerprint)
            epoch = _current_epoch(listing, fingerprint, space)
            if epoch is None:  # a run has begun and has no sign yet
                continue
            chunks = listing.shards.get(f"{fingerprint}.{epoch}".encode() if epoch else raw, {})
            width = listing.widths.get(fingerprint, 1) if space is None else space.shards
            epochs[fingerprint] = epoch
            now[fingerprint] = _names(
                [name for name, count in chunks.items() if count >= width] if width > 1 else list(chunks)
            )
        begun = any(epochs[one] != epoch for one, epoch in self._epochs.items())
        before = {} if begun else self._chunks
        events: list[KvEvent] = [ClearedEvent()] if begun else []
        forgotten: list[Chunk] = []
        described: list[Chunk] = []
        for fingerprint in sorted({*before, *now}):
            gone = before.get(fingerprint, set()) - now.get(fingerprint, set())
            came = now.get(fingerprint, set()) - before.get(fingerprint, set())
            events += self._removals(fingerprint, gone)
            forgotten += [(fingerprint, name) for name in gone]
            plain = []
            for name in came:
                if name in self._learned:
                    described.append((fingerprint, name))
                else:
                    plain.append(name)
            described += [
                (fingerprint, name) for name in self._learned if name not in came and name in now.get(fingerprint, ())
            ]
            events += _stored(fingerprint, plain, namespaces.get(fingerprint))
        events += [_owned(self._learned[name], fingerprint) for fingerprint, name in described]
        if begun:
            forgotten = list(self._hashes)
        return Change(events, now, epochs, forgotten, described)

    def commit(self, change: Change) -> None:
        """Takes a change to be published."""
        while len(change.epochs) > _MOST_FINGERPRINTS:
            del change.epochs[next(iter(change.epochs))]
        self._chunks, self._epochs = change.chunks, change.epochs
        for chunk in change.forgotten:
            self._hashes.pop(chunk, None)
        learned = {name: self._learned.pop(name) for name in {name for _, name in change.described}}
        self._hashes |= {chunk: _packed(learned[chunk[1]].block_hashes) for chunk in change.described}

    def everything(self, namespaces: Mapping[str, Namespace]) -> list[KvEvent]:
        """Returns the events that say everything that is there. Tokens are not remembered."""
        events: list[KvEvent] = []
        for fingerprint, names in self._chunks.items():
            events += _stored(fingerprint, list(names), namespaces.get(fingerprint))
        return events

    def named(self, name: bytes) -> list[Chunk]:
        """Returns the chunks of this name."""
        return [(fingerprint, name) for fingerprint, names in self._chunks.items() if name in names]

    def keys(self, chunk: Chunk, namespaces: Mapping[str, Namespace]) -> list[str]:
        """Returns the keys of a chunk's shards, as far as their number is known; none if the chunk is not there."""
        fingerprint, name = chunk
        if name not in self._chunks.get(fingerprint, ()):
            return []
        space, epoch = namespaces.get(fingerprint), self._epochs.get(fingerprint, "")
        prefix = f"{KEY_FORMAT}/{fingerprint}.{epoch}" if epoch else f"{KEY_FORMAT}/{fingerprint}"
        return [f"{prefix}/{shard}/{name.hex()}" for shard in range(1 if space is None else space.shards)]

    def without(self, gone: Iterable[Chunk]) -> Change:
        """Returns what changes if these chunks are gone. Nothing else may change until it is committed."""
        chunks = dict(self._chunks)
        by_space: dict[str, set[bytes]] = {}
        for fingerprint, name in gone:
            if name in chunks.get(fingerprint, ()):
                by_space.setdefault(fingerprint, set()).add(name)
        events: list[KvEvent] = []
        for fingerprint, names in sorted(by_space.items()):
            events += self._removals(fingerprint, names)
            chunks[fingerprint] = chunks[fingerprint] - names
        forgotten = [(fingerprint, name) for fingerprint, names in by_space.items() for name in names]
        return Change(events, chunks, dict(self._epochs), forgotten, [])

    def _removals(self, fingerprint: str, gone: Iterable[bytes]) -> Iterator[RemovedEvent]:
        hashes: list[BlockHash] = []
        for name in gone:
            hashes.append(name)
            hashes += _unpacked(self._hashes.get((fingerprint, name), b""))
        for start in range(0, len(hashes), _A_EVENT):
            yield RemovedEvent(hashes[start : start + _A_EVENT], MEDIUM_STORAGE, locality=REMOTE, ownership=fingerprint)


def describes_chunk(event: StoredEvent) -> bool:
    """Returns whether an engine's event is about one chunk in the pool, has whole hashes (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES=0), and is small
    enough to be kept."""
    hashes = event.block_hashes
    if event.medium != MEDIUM_STORAGE or not 0 < len(hashes) <= _MOST_BLOCKS:
        return False
    size = len(hashes[0]) if isinstance(hashes[0], bytes) else 0
    return (
        HASH_BYTES <= size <= _MOST_HASH_BYTES
        and all(isinstance(one, bytes) and len(one) == size for one in hashes)
        and len(memoryview(event.token_ids)) <= _MOST_TOKEN_BYTES
    )


def slim(event: StoredEvent) -> StoredEvent:
    """Returns the part of an engine's event that is published again. It does not keep the message in memory from which the event was read."""
    return StoredEvent(
        event.block_hashes,
        event.parent_block_hash,
        Raw(bytes(event.token_ids)),
        event.block_size,
        event.lora_id,
        event.medium,
        event.lora_name,
        group_idx=event.group_idx,
    )


def _packed(hashes: Sequence[BlockHash]) -> bytes:
    whole = [one for one in hashes if isinstance(one, bytes)]
    return bytes([len(whole[0])]) + b"".join(whole)


def _unpacked(packed: bytes) -> Iterator[bytes]:
    size = packed[0] if packed else 1
    for start in range(1, len(packed), size):
        yield packed[start : start + size]


def _stored(fingerprint: str, names: list[bytes], space: Namespace | None) -> Iterator[StoredEvent]:
    size = 0 if space is None else space.chunk_size
    for start in range(0, len(names), _A_EVENT):
        hashes: list[BlockHash] = [*names[start : start + _A_EVENT]]
        yield StoredEvent(hashes, block_size=size, medium=MEDIUM_STORAGE, locality=REMOTE, ownership=fingerprint)


def _owned(event: StoredEvent, fingerprint: str) -> StoredEvent:
    return structs.replace(event, locality=REMOTE, ownership=fingerprint)


def _current_epoch(listing: PoolListing, fingerprint: str, space: Namespace | None) -> str | None:
    """Returns the label of a namespace's current epoch, as far as a listing says it; None if it does not."""
    if space is not None:
        root = hashlib.sha256(space.model.encode()).hexdigest()[:16].encode()
        if root not in listing.signs:
            return ""
        runs = listing.signs[root]
    else:  # of which model these chunks are is not known: the run in their keys says whose epochs theirs are
        if not listing.signs:
            return ""
        runs = {}
        spaces = (one.decode("ascii", "replace").partition(".") for one in listing.shards)
        own = {epoch.partition("-")[0] for owner, _, epoch in spaces if owner == fingerprint}
        for known in listing.signs.values():
            runs |= {run: number for run, number in known.items() if run in own}
    if len(runs) != 1:
        return None
    ((run, number),) = runs.items()
    return f"{run}-{number}"


def _names(hexed: list[bytes]) -> set[bytes]:
    """Returns the names that these are in hex, without those that are none."""
    try:
        raw = binascii.unhexlify(b"".join(hexed))
    except ValueError:
        return set().union(*map(_names, ([one] for one in hexed))) if len(hexed) > 1 else set()
    return {raw[start : start + HASH_BYTES] for start in range(0, len(raw), HASH_BYTES)}
