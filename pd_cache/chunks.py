"""Tokens or block hashes -> names of chunks -> keys. No I/O, no clock.

A chunk's hash is chained, `H_i = h(H_{i-1} || tokens of chunk i as little-endian int32)`, so that it names
the whole prefix up to its end. `h` is BLAKE2b with a digest of 16 bytes: a shared pool crosses trust
boundaries, and SHA-256 takes three times as long on processors without instructions for it.
"""

from __future__ import annotations

import array
import contextlib
import hashlib
import os
import pickle
import struct
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from itertools import takewhile
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Meta, Struct

from pd_cache.config import MAX_SHARDS, CacheConfig
from pd_cache.decoding import decode_json, prepared
from pd_cache.errors import PdCacheError
from pd_cache.layout import KVLayout

Names = Sequence[bytes]
"""The names of some of a prompt's chunks, in order."""
Keys = Sequence[str]
"""The keys of objects, in the pool and in the tiers."""

KEY_FORMAT = "pdc1"
HASH_BYTES = 16
TOKEN_BYTES = 4
_INT32 = ("i", "<i") if sys.byteorder == "little" else ("<i",)
"""The formats of buffers of little-endian int32."""
_TOKEN_HASH = "blake2b"
"""The name of the hash `h` in the namespace. A release with another hash shares no chunks with this one."""
NAME_WIDTHS = range(8, HASH_BYTES + 1)
"""How many bytes a chunk's name may have; see `stride_hashes`."""
Size = Annotated[int, Meta(ge=1, lt=1 << 48)]
"""Checked when a namespace is read, not when it is made."""


class TokenArray(Protocol):
    """A NumPy array or a tensor, on any device: 1-D, of any type of integers."""

    @property
    def dtype(self) -> Any: ...

    def __len__(self) -> int: ...


Tokens = TokenArray | memoryview | Sequence[int]
"""Token ids; each must fit an int32. Naming a NumPy array, an `array.array("i")` or a memoryview of int32
takes less than half of the time of a list, whose integers are objects."""

ExtraKey = str | bytes | int
"""A part of a request's isolation: its cache_salt, the digest of its LoRA adapter, a multi-modal hash."""


class MediaItem(NamedTuple):
    """An image, audio or video in a prompt."""

    name: str
    """A hash of the item's content."""
    offset: int
    """The position of its first token in the prompt."""
    length: int
    """How many tokens of the prompt stand for it."""


def salt_keys(cache_salt: str | None) -> tuple[ExtraKey, ...]:
    """Returns the isolation of a request with this `cache_salt`."""
    return () if cache_salt is None else ("salt", cache_salt)


class LayerGroup(Struct, frozen=True, kw_only=True):
    """Layers that keep their KV in the same way. A model has several groups if its layers differ in this, or
    if it is cut into pipeline stages."""

    layers: Annotated[str, Meta(min_length=1, max_length=4096)]
    """The layers' numbers, e.g. `0-4,6-10`."""
    keeps: Annotated[str, Meta(min_length=1, max_length=4096)]
    """What the layers keep, e.g. `the last 256 tokens`."""
    tail: Annotated[int, Meta(ge=0, lt=1 << 32)]
    """How many of a prefix's last chunks a load needs from these layers; 0 for all chunks."""
    ahead: Annotated[int, Meta(ge=0, le=1)] = 0
    """1 if a chunk's KV depends on the token after the chunk, so that it is stored under the name of the next
    chunk."""


class Namespace(Struct, frozen=True, kw_only=True):
    """Everything that must agree before two nodes may share a chunk. Its fingerprint is part of every key."""

    model: str
    """Identifies the weights: a name with a digest, or a revision."""
    kv_dtype: str
    layout: str
    """The content of one page, e.g. `heads8.block16.bytes256x2`; from `KVLayout.page_format`."""
    layers: Size
    block_size: Size
    page_bytes: Size
    chunk_size: Size
    shards: Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
    """How many objects a chunk is cut into: the tensor-parallel size for most models, or a multiple of it."""
    hash_mode: Literal["tokens", "blocks"]
    hash_seed: str = ""
    """Hash mode: the algorithm and seed of the engine's block hashes."""
    group: str = ""
    """The layers of this layer group; empty if all layers of the model keep the KV of every token. Each layer
    group has a namespace of its own."""
    keeps: str = ""
    """What these layers keep, if there are groups; see `LayerGroup`."""
    tail: Annotated[int, Meta(ge=0, lt=1 << 32)] = 0
    """How many of a prefix's last chunks a load needs from these layers; 0 for all."""
    ahead: Annotated[int, Meta(ge=0, le=1)] = 0
    """1 if a chunk is stored under the name of the next chunk; see `LayerGroup`."""

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk's pages, in all shards."""
        planes = 2 if self.layout.startswith("kv_outer.") else 1
        return planes * self.layers * self.page_bytes * self.shards * (self.chunk_size // self.block_size)

    def _fields(self) -> dict[str, Any]:
        """Returns all fields. Leaves out newer fields that have their defaults, so that older objects keep
        their keys. Adds the name of the hash if tokens name the chunks."""
        fields: dict[str, Any] = msgspec.to_builtins(self)
        if not self.ahead:
            del fields["ahead"]
        if not self.group:
            del fields["group"], fields["keeps"], fields["tail"]
        if self.hash_mode == "tokens":
            fields["token_hash"] = _TOKEN_HASH
        return fields

    def manifest(self) -> bytes:
        """Returns the namespace as canonical JSON, with sorted keys."""
        return msgspec.json.encode({"format": KEY_FORMAT, **self._fields()}, order="sorted")

    @classmethod
    def read(cls, manifest: bytes) -> Namespace:
        """Reads a text that `manifest` returned. Raises ValueError for any other text, and for the manifest
        of another release."""
        fields: dict[str, str | int] = decode_json(manifest, dict[str, str | int])
        if fields.pop("format", None) != KEY_FORMAT:
            raise ValueError(f"no manifest of format {KEY_FORMAT}: {manifest[:200]!r}")
        if fields.pop("token_hash", None) != (_TOKEN_HASH if fields.get("hash_mode") == "tokens" else None):
            raise ValueError(f"chunks are named by another hash than {_TOKEN_HASH}: {manifest[:200]!r}")
        return msgspec.convert(fields, prepared(cls))

    def described(self, further: Sequence[Namespace] = ()) -> dict[str, Any]:
        """Returns the fields by which a node reports its namespace. `further` are the namespaces of the
        model's other layer groups."""
        others = {"further": [space._fields() for space in further]} if further else {}
        return {"fingerprint": self.fingerprint(), "namespace": self._fields(), **others}

    def fingerprint(self) -> str:
        """Returns 16 hex digits that are equal if and only if all fields are equal."""
        return hashlib.sha256(self.manifest()).hexdigest()[:16]


def token_bytes(tokens: Tokens) -> bytes:
    """Returns token ids as little-endian int32. Raises ValueError for an id that does not fit, and unless
    `tokens` is 1-D and of integers."""
    if hasattr(tokens, "dtype"):
        return _array_bytes(tokens)
    try:
        if isinstance(tokens, array.array | memoryview):
            view = memoryview(tokens)
            if view.ndim == 1 and view.format in _INT32:
                return view.tobytes()
        count = len(tokens)
        with contextlib.suppress(struct.error):
            # packs unsigned integers, which takes two thirds of the time; they fit an int32 if the first bit
            # of each is 0
            raw = struct.Struct(f"<{count}I").pack(*tokens)
            if raw[TOKEN_BYTES - 1 :: TOKEN_BYTES].isascii():
                return raw
        # takes half the time of `array.array` and NumPy
        return struct.Struct(f"<{count}i").pack(*tokens)
    except (struct.error, TypeError, NotImplementedError) as error:
        raise ValueError(f"tokens must be integers that fit an int32: {error}") from None


def _array_bytes(values: Any) -> bytes:
    """As `token_bytes`, for a NumPy array or a tensor."""
    if hasattr(values, "untyped_storage") and not (values.is_floating_point() or values.is_complex()):
        values = values.detach().cpu().numpy()
    if values.ndim != 1 or getattr(values.dtype, "kind", None) not in ("i", "u"):
        raise ValueError(f"tokens must be 1-D and integers, got {tuple(values.shape)} {values.dtype}")
    # torch has no minimum of unsigned types
    if values.dtype.itemsize >= TOKEN_BYTES and values.dtype != "int32" and len(values):
        low, high = int(values.min()), int(values.max())
        if low < -(2**31) or high >= 2**31:
            raise ValueError(f"tokens must fit an int32, got values from {low} to {high}")
    return bytes(values.astype("<i4", copy=False).tobytes())


def root(extra_keys: Iterable[ExtraKey] = ()) -> bytes:
    """Returns `H_{-1}`, which keeps requests of different isolation apart. Each part is tagged and
    length-prefixed, so that ("ab", "c") and ("a", "bc") differ, and so do "1" and 1."""
    if isinstance(extra_keys, str | bytes):
        raise ValueError(
            f"extra_keys must be a sequence of keys, got {type(extra_keys).__name__}: write (salt,)"
        )
    digest = hashlib.sha256(b"pd-cache root")
    for part in extra_keys:
        if isinstance(part, bool) or not isinstance(part, (str, bytes, int)):
            raise ValueError(f"extra_keys must be str, bytes or int, got {type(part).__name__}")
        raw = part if isinstance(part, bytes) else str(part).encode()
        digest.update(f"{type(part).__name__}:{len(raw)}:".encode())
        digest.update(raw)
    return digest.digest()[:HASH_BYTES]


_EMPTY = hashlib.blake2b(digest_size=HASH_BYTES)
"""Copied for each chunk, because a copy takes less time than a new hash with a `digest_size`."""
_RUN_BYTES = 16 << 10
"""Prompts are remembered in runs of about this size, in whole chunks: 4096 tokens. With shorter runs, new
prompts take longer."""
_MOST_BYTES = 16 << 20
"""The most bytes of all runs together: 4 million tokens. Their names take further memory."""


class ChunkNamer:
    """Names the chunks of prompts. Thread-safe.

    It remembers runs of chunks of recent prompts: each with the name before the run, and the names of its
    chunks. It forgets the least recently used run first. It compares all bytes, so a remembered name is the
    name that hashing would return.
    """

    def __init__(
        self,
        chunk_size: int,
        blocks_per_chunk: int = 1,
        mode: str | None = None,
        *,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """At least one run is remembered, whatever `most_bytes` is."""
        self.chunk_size = chunk_size
        self.blocks_per_chunk = blocks_per_chunk
        self.mode = mode
        """How the namespace names chunks: by `tokens` or by `blocks`; None if that is not known yet."""
        self._chunk_bytes = chunk_size * TOKEN_BYTES
        self._run_bytes = max(1, _RUN_BYTES // self._chunk_bytes) * self._chunk_bytes
        self._most = max(1, most_bytes // self._run_bytes)
        self._runs: OrderedDict[bytes, tuple[bytes, list[bytes]]] = OrderedDict()
        """The key is the name before a run and the run's last tokens, because different runs rarely end
        alike. The value is the run and its names."""
        self._lock = threading.Lock()

    def name_chunks(
        self, tokens: Tokens | None, hashes: Names | None = None, extra_keys: Iterable[ExtraKey] = ()
    ) -> list[bytes]:
        """Returns the name of each whole chunk of a prompt, given as tokens or as the engine's block hashes.

        The name of a chunk of tokens is its chained hash. Raises ValueError for both or neither, for the form
        that does not fit the namespace's mode, and for a token that does not fit an int32.
        """
        if (tokens is None) == (hashes is None):
            raise ValueError("exactly one of tokens and block hashes must be given")
        given = "tokens" if hashes is None else "blocks"
        if self.mode not in (None, given):
            raise ValueError(
                f"this namespace names chunks by {self.mode}, not by {given}: the two never agree on a key"
            )
        if hashes is not None:
            if tuple(extra_keys):
                raise ValueError(
                    "block hashes already contain the request's isolation: give extra_keys only with tokens"
                )
            return stride_hashes(hashes, self.blocks_per_chunk)
        assert tokens is not None
        raw, previous = token_bytes(tokens), root(extra_keys)
        whole = len(raw) - len(raw) % self._chunk_bytes
        names: list[bytes] = []
        for start in range(0, whole, self._run_bytes):
            names += self._names(previous, raw[start : min(start + self._run_bytes, whole)])
            previous = names[-1]
        return names

    def _names(self, previous: bytes, run: bytes) -> list[bytes]:
        """Returns the names of a run's chunks. A shorter run at a prompt's end is not remembered."""
        if len(run) < self._run_bytes:
            return self._chain(previous, run)
        key = previous + run[-HASH_BYTES:]
        with self._lock:
            known = self._runs.get(key)
            if known is not None and known[0] == run:
                self._runs.move_to_end(key)
                return known[1]
        names = self._chain(previous, run)
        with self._lock:
            self._runs[key] = (run, names)
            if len(self._runs) > self._most:
                self._runs.popitem(last=False)
        return names

    def _chain(self, previous: bytes, run: bytes) -> list[bytes]:
        step, names = self._chunk_bytes, []
        for start in range(0, len(run), step):
            hashed = _EMPTY.copy()
            hashed.update(previous)
            hashed.update(run[start : start + step])
            previous = hashed.digest()
            names.append(previous)
        return names


def stride_hashes(block_hashes: Names, blocks_per_chunk: int) -> list[bytes]:
    """Returns the names of chunks from an engine's chained block hashes: for each chunk, the hash of its last
    block. Hashes nothing again.

    Short hashes are kept whole; longer ones are truncated to 16 bytes.
    """
    hashes = block_hashes[blocks_per_chunk - 1 :: blocks_per_chunk]
    if not set(map(type, hashes)) <= {bytes} or min(map(len, hashes), default=8) < 8:
        raise ValueError("each block hash must be bytes, at least 8 of them")
    return [value[:HASH_BYTES] for value in hashes]


def fold_names(names: Iterable[bytes], identity: bytes) -> list[bytes]:
    """Returns names that also depend on `identity` (1 to 64 bytes). They are equal if and only if name and
    identity are."""
    return [hashlib.blake2b(name, key=identity, digest_size=HASH_BYTES).digest() for name in names]


def check_names(names: Names) -> None:
    """Raises ValueError unless `names` are valid names of chunks: bytes, all of one width in
    `NAME_WIDTHS`."""
    widths = set(map(len, names)) if set(map(type, names)) <= {bytes} else {-1}
    if len(widths) > 1 or not widths <= set(NAME_WIDTHS):
        raise ValueError(
            f"chunk names must be bytes, all of one length from {NAME_WIDTHS[0]} to {NAME_WIDTHS[-1]}, as `name_chunks` "
            f"returns them; got {', '.join('no bytes' if width < 0 else str(width) for width in sorted(widths))}"
        )


class CacheMetadata(Struct, frozen=True, kw_only=True):
    """A serving engine's model, and its place in it. Together with `CacheConfig` it determines the
    namespace."""

    model: str
    """Identifies the weights. A name alone is not enough; see `Namespace.model`."""
    kv_dtype: str
    page_format: str
    layers: int
    block_size: int
    page_bytes: int
    world_size: int = 1
    """How many ranks hold a part of each chunk; each holds a different part."""
    rank: int = 0
    shards_per_rank: int = 1
    """How many shards of a chunk each rank holds; each shard is an object. page_format and page_bytes
    describe one shard."""
    group: LayerGroup | None = None
    """The layer group; None if all layers are kept alike."""

    @classmethod
    def of(
        cls,
        model: str,
        layout: KVLayout,
        *,
        world_size: int = 1,
        rank: int = 0,
        shards_per_rank: int = 1,
        group: LayerGroup | None = None,
    ) -> CacheMetadata:
        """Returns the metadata of an engine whose paged cache, on this rank, has this layout.

        Raises LayoutError if its pages cannot be cut into `shards_per_rank` shards.
        """
        shard = layout.shard(shards_per_rank)
        return cls(
            model=model,
            kv_dtype=shard.dtype,
            page_format=shard.page_format,
            layers=shard.layers,
            block_size=shard.block_size,
            page_bytes=shard.page_bytes,
            world_size=world_size,
            rank=rank,
            shards_per_rank=shards_per_rank,
            group=group,
        )

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is outside of world_size {self.world_size}")

    @property
    def shards(self) -> range:
        """The numbers of this rank's shards."""
        return range(self.rank * self.shards_per_rank, (self.rank + 1) * self.shards_per_rank)

    def namespace(self, cache: CacheConfig) -> Namespace:
        """Returns the namespace of all nodes whose KV is interchangeable with this one's."""
        group = self.group or LayerGroup(layers="", keeps="", tail=0)
        return Namespace(
            model=self.model,
            kv_dtype=self.kv_dtype,
            layout=self.page_format,
            layers=self.layers,
            block_size=self.block_size,
            page_bytes=self.page_bytes,
            chunk_size=cache.chunk_tokens,
            shards=self.world_size * self.shards_per_rank,
            hash_mode=cache.named_by,
            hash_seed=cache.hash_seed,
            group=group.layers,
            keeps=group.keeps,
            tail=group.tail,
            ahead=group.ahead,
        )


class ChunkedTokenDatabase(ChunkNamer):
    """Names the whole chunks of prompts in a namespace, and makes their keys. A tail shorter than a chunk has
    no name and is never stored."""

    def __init__(self, namespace: Namespace) -> None:
        if namespace.chunk_size < 1 or namespace.chunk_size % namespace.block_size:
            raise ValueError(
                f"chunk_size {namespace.chunk_size} must be a multiple of block_size {namespace.block_size}"
            )
        super().__init__(
            namespace.chunk_size, namespace.chunk_size // namespace.block_size, namespace.hash_mode
        )
        self.namespace = namespace
        self._prefix = f"{KEY_FORMAT}/{namespace.fingerprint()}"

    @property
    def manifest_key(self) -> str:
        return f"{self._prefix}/manifest"

    def name_media_chunks(
        self, tokens: Sequence[int], extra_keys: Iterable[ExtraKey], media: Iterable[MediaItem]
    ) -> list[bytes]:
        """Returns the name of each whole chunk of a prompt with media. `media` are in the order of their
        positions.

        An item changes the name of the chunk in which it begins and of all later chunks. So prompts share the
        text before the item.
        """
        names: list[bytes] = []
        isolation, chunk = [*extra_keys], self.chunk_size
        for item in media:
            if (begins := item.offset // chunk) > len(names):
                names += self.name_chunks(tokens[len(names) * chunk : begins * chunk], None, isolation)
                isolation = [names[-1]]
            isolation += ["mm", item.name, item.offset]
        return names + self.name_chunks(tokens[len(names) * chunk :], None, isolation)

    def keys(self, names: Iterable[bytes], shards: Sequence[int] | None = None, label: str = "") -> list[str]:
        """Returns the pool's keys of some shards, by default of all. The keys of a chunk are adjacent.
        `label` is the weights' label."""
        start = f"{self._prefix}.{label}" if label else self._prefix
        shards = range(self.namespace.shards) if shards is None else shards
        if len(shards) == 1:
            only = f"{start}/{shards[0]}/"
            return [only + name.hex() for name in names]  # takes half the time of the general form
        prefixes = [f"{start}/{shard}/" for shard in shards]
        return [prefix + name for name in (value.hex() for value in names) for prefix in prefixes]


_ALGORITHM = "sha256"
"""vLLM's default algorithm of block hashes, and the only one known here."""
_DEFAULT_SEED = "vllm-none-hash"
SEED_VARIABLE = "PYTHONHASHSEED"


class UnknownHashesError(PdCacheError):
    """This process cannot compute an engine's block hashes."""


def describe_hashes(algorithm: str, seed: str, own: str, step: int | None = None) -> str:
    """Returns a description of the algorithm and seed of vLLM's block hashes, for `Namespace.hash_seed`.
    `own` is the `hash_seed` of the cluster's file. `step` is the number of tokens of each hash, if it is not
    the block size.

    The description holds a digest of the seed, so that a node with the same seed can recognise it. The digest
    does not protect the seed: PYTHONHASHSEED has 32 bits, so anyone who sees the digest can find the seed.
    For sha256 the seed need not be secret. For xxhash, vLLM expects it to be secret.
    """
    every = "" if step is None else f"/{step}"
    return f"{algorithm}{every}:{_digest(seed)}:{own}"


class BlockHasher:
    """Hashes blocks in the same way as the engines of a namespace."""

    def __init__(self, block_size: int, described: str, seeds: Iterable[str] = ()) -> None:
        """`block_size` is the namespace's; `described` is the result of `describe_hashes`. `seeds` are
        candidates for its seed, besides this process's own seed and the default.

        Raises UnknownHashesError if the hashes cannot be computed here.
        """
        named, _, rest = described.partition(":")
        algorithm, _, step = named.partition("/")
        if algorithm != _ALGORITHM:
            known = algorithm or "hashes of its own"
            raise UnknownHashesError(
                f"the engine names its blocks by {known}, but pd-cache knows only vLLM's {_ALGORITHM}"
            )
        digest = rest.partition(":")[0]
        candidates = (_DEFAULT_SEED, os.environ.get(SEED_VARIABLE), *seeds)
        seed = next((seed for seed in candidates if seed is not None and _digest(seed) == digest), None)
        if seed is None:
            raise UnknownHashesError(
                f"vLLM's block hashes start from another seed: set {SEED_VARIABLE} to vLLM's value"
            )
        self.block_size = int(step) if step.isdecimal() and int(step) else block_size
        """The tokens of each hash."""
        self._root = _hash(seed)

    def hashes(
        self, tokens: Sequence[int], cache_salt: str | None = None, media: Iterable[MediaItem] = ()
    ) -> list[bytes]:
        """Returns the chained hash of each whole block, 32 bytes each. `media` are in the order of their
        positions, and do not overlap."""
        step, previous, items = self.block_size, self._root, deque(media)
        hashes = []
        for start in range(0, len(tokens) - step + 1, step):
            end = start + step
            while items and items[0].offset + items[0].length <= start:
                items.popleft()
            # copies each name, because pickle writes the same object only once, and vLLM's equal names are
            # different objects
            extra: list[tuple[str | int, ...]] = [
                ("mm", item.name.encode().decode(), item.offset - start)
                for item in takewhile(lambda item: item.offset < end, items)  # noqa: B023
            ]
            if cache_salt and not start:
                extra.append(("cache_salt", cache_salt))
            previous = _hash((previous, tuple(tokens[start:end]), tuple(extra) or None))
            hashes.append(previous)
        return hashes


def _hash(value: object) -> bytes:
    return hashlib.sha256(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)).digest()


def _digest(seed: str) -> str:
    return hashlib.sha256(seed.encode()).hexdigest()[:16]
