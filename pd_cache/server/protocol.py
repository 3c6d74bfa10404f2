"""All messages between a cache server and its engines and lookup clients.

A frame is a 16-byte header and a msgpack body:

    offset  size
    0       4     magic "PDCM"
    4       2     protocol version
    6       2     zero
    8       8     number of the request, which its answer repeats; 0 for a request that needs no answer

All numbers are little-endian. Neither the header nor `Refused` ever changes, so two sides of different
versions notice that they differ. KV bytes never travel in messages: they stay in memory that both sides map.

Both sides are processes of one user. So all fields have types, but only the fields that describe an engine
have bounds. A number that does not fit is an error of its request.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from pd_cache.chunks import NAME_WIDTHS, CacheMetadata, LayerGroup
from pd_cache.config import MAX_SHARDS, CacheConfig
from pd_cache.decoding import UndecodableError, msgpack_decoder
from pd_cache.reasons import Found, Loaded
from pd_cache.versions import Label

PROTOCOL = 7

_HEADER = struct.Struct("<4sHHQ")
_MAGIC = b"PDCM"

MAX_CHUNKS = 1 << 16
MAX_FRAME = 4 << 20
"""The most bytes of a frame. A store of three million tokens in blocks of 16 takes a quarter of this."""

Name = Annotated[bytes, Meta(min_length=NAME_WIDTHS[0], max_length=NAME_WIDTHS[-1])]
Names = Annotated[tuple[Name, ...], Meta(max_length=MAX_CHUNKS)]


class Message(Struct, frozen=True, array_like=True, tag_field="type"):
    """The base of all messages."""


# --- requests -----------------------------------------------------------------------------------------------

ObjectSize = Annotated[int, Meta(ge=1, lt=1 << 48)]
Shards = Annotated[int, Meta(ge=1, le=MAX_SHARDS)]
BlockSize = Annotated[int, Meta(ge=1, le=1 << 20)]


class EngineIdentity(Struct, frozen=True, kw_only=True):
    """Identifies an engine's rank. Engines with equal identities share chunks, if their tensors agree,
    too."""

    model: Annotated[str, Meta(max_length=4096)]
    """Identifies the weights."""
    block_size: BlockSize
    """Tokens per block of the engine's paged cache."""
    world_size: Shards = 1
    """Ranks that hold a part of each chunk."""
    rank: Annotated[int, Meta(ge=0)] = 0
    shards_per_rank: Shards = 1
    """How many shards of each chunk every rank holds. Each shard is an object."""
    chunk_size: Annotated[int, Meta(ge=1, lt=1 << 40)] | None = None
    """Tokens per chunk; None to use the server's."""
    hash_mode: Literal["", "tokens", "blocks"] = ""
    """Whether this engine names chunks by tokens or by its blocks' hashes; empty to use the setting in the
    server's file."""
    hash_seed: Annotated[str, Meta(max_length=4096)] = ""
    """The seed of these hashes; empty to use the setting in the server's file."""
    layers: LayerGroup | None = None
    """The layer group of this connection; None if all layers are kept alike. An engine has a connection for
    each layer group."""
    further: Annotated[tuple[EngineIdentity, ...], Meta(max_length=256)] = ()
    """The other layer groups that lookups ask for. Their ranks and shards may differ from these: all ranks
    hold the same latents, but each rank holds its own part of the states."""
    object_sizes: Annotated[tuple[ObjectSize, ...], Meta(max_length=256)] = ()
    """The payload bytes of a chunk's object in each layer group of this worker. Groups of similar sizes share
    the server's memory."""

    def __post_init__(self) -> None:
        if self.chunk_size is not None and self.chunk_size % self.block_size:
            raise ValueError(
                f"chunk_size {self.chunk_size} must be a multiple of the block size {self.block_size}"
            )
        if self.rank >= self.world_size:
            raise ValueError(f"rank must be less than world_size {self.world_size}, got {self.rank}")
        shards = self.world_size * self.shards_per_rank
        if shards > MAX_SHARDS:
            raise ValueError(
                f"ranks and their shards make {shards} shards of a chunk; at most {MAX_SHARDS} are allowed"
            )

    @classmethod
    def of(
        cls, metadata: CacheMetadata, cache: CacheConfig, further: Sequence[CacheMetadata] = ()
    ) -> EngineIdentity:
        """Returns the identity of an engine's rank. `cache` says how chunks are sized and named. `further`
        are the engine's other layer groups, for lookups."""
        return cls(
            model=metadata.model,
            block_size=metadata.block_size,
            world_size=metadata.world_size,
            rank=metadata.rank,
            shards_per_rank=metadata.shards_per_rank,
            chunk_size=cache.chunk_tokens,
            hash_mode=cache.named_by,
            hash_seed=cache.hash_seed,
            layers=metadata.group,
            further=tuple(cls.of(other, cache) for other in further),
        )


NOBODY = EngineIdentity(model="", block_size=1)
"""The identity of an observer."""


class Hello(Message, frozen=True, tag="hello"):
    """Introduces the client: the first message of a connection. The answer is `Welcome`."""

    client: str
    """The name of this process's connection, also on its Unix socket."""
    kind: Literal["scheduler", "worker", "observer"]
    engine: EngineIdentity = NOBODY


class CpuStorage(Message, frozen=True, tag="cpu"):
    """Shared memory. Its file descriptor comes with the request, in the order of the storages."""

    nbytes: int


class CudaStorage(Message, frozen=True, tag="cuda"):
    """A CUDA IPC handle, as `torch.UntypedStorage` exports it."""

    nbytes: int
    gpu: str
    """The UUID of the GPU that has the memory."""
    handle: bytes
    offset: int
    ref_counter: bytes
    ref_counter_offset: int
    event: bytes
    event_sync: bool


Storage = CpuStorage | CudaStorage


class TensorView(Message, frozen=True):
    """One layer's tensor inside a storage; offset and strides in elements."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str


class Register(Message, frozen=True, tag="register"):
    """Lends a worker's KV tensors to the server. The answer is `Done`, once they are mapped.

    The request comes over the Unix socket, with the file descriptors of the fence and of each CPU storage.
    """

    storages: tuple[Storage, ...]
    tensors: Annotated[tuple[TensorView, ...], Meta(min_length=1)]
    layout_kind: str = ""
    """A `PageKind`; needed only if the shapes fit two kinds."""


class Unregister(Message, frozen=True, tag="unregister"):
    """Takes the KV tensors back. The answer is `Done`, once nothing touches them. The request comes over the
    Unix socket."""


class Lookup(Message, frozen=True, tag="lookup"):
    """Asks how many leading chunks of these are there. The answer is `Found`.

    If `session` is not empty, the found chunks are protected for that session.
    """

    session: str
    names: Names
    chunks_at_hand: int = 0
    """How many of the first chunks need not be looked up."""
    label: Label = ""
    """The weights version to look in."""


class BlockRequest(Message, frozen=True):
    """The chunks of a request, and the blocks to or from which they are copied. The blocks of the first chunk
    come first.

    A retrieve may leave out blocks at the start that the engine already holds.
    """

    session: str
    names: Names
    blocks: tuple[int, ...]
    slot: int
    ticket: int
    """The ticket is in `slot` of the worker's fence for as long as the blocks may be touched."""
    patience_ms: int
    """How long the engine waits. A load or store that has not begun by then is dropped."""
    event: bytes = b""
    """The CUDA IPC handle of the event after which the blocks are valid; empty for none."""
    label: Label = ""
    """For a store, the label of the weights that computed the blocks; for a retrieve, the label with which
    the chunks were found."""


class Store(BlockRequest, frozen=True, tag="store"):
    """Stores chunks from the blocks. The answer is `Stored`."""


class Retrieve(BlockRequest, frozen=True, tag="retrieve"):
    """Loads chunks into the blocks, and releases what the session protects for this worker. The answer is
    `Loaded`."""


class EndSession(Message, frozen=True, tag="end_session"):
    """Releases what a session protects."""

    session: str


Request = Hello | Register | Unregister | Lookup | Store | Retrieve | EndSession


# --- answers ------------------------------------------------------------------------------------------------


class Welcome(Message, frozen=True, tag="welcome"):
    chunk_size: int
    hash_mode: Literal["tokens", "blocks"]
    hash_seed: str
    may_choose: bool
    """Whether the file lets each engine decide how chunks are named."""
    may_size: bool
    """Whether the file lets each engine decide how many tokens a chunk has."""


class Done(Message, frozen=True, tag="done"):
    """The request was done."""


class Stored(Message, frozen=True, tag="stored"):
    """The outcome of each chunk."""

    outcomes: bytes
    """A byte for each chunk: 0 not stored, 1 there before, 2 new, as in `pd_cache.reasons.StoreOutcome`."""


class Refused(Message, frozen=True, tag="refused"):
    """The request was not done. `reason` and `message` say why."""

    reason: str
    """`busy`, `unknown_client` and `closing` are temporary. `version`, `malformed`, `mismatch`, `invalid`,
    `late`, `abandoned`, `failed` and others are not."""
    message: str


class RefusalError(Exception):
    """Raised to refuse a request. `refused` is the answer to its sender, and `number` the request's number;
    0 if it could not be read."""

    def __init__(self, reason: str, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.refused = Refused(reason, message)
        self.number = number


def failed(error: Exception) -> Refused:
    """Returns the answer to a request that raised an unexpected error."""
    return Refused("failed", f"{type(error).__name__}: {error}")


Answer = Welcome | Done | Found | Stored | Loaded | Refused

_encoder = msgspec.msgpack.Encoder()
_read_request = msgpack_decoder(Request)
_read_answer = msgpack_decoder(Answer)
_read_refusal = msgpack_decoder(Refused)


class FrameError(RefusalError):
    """Raised for a frame that cannot be read."""


def encode(number: int, message: Message | Found | Loaded) -> bytes:
    """Returns the frame of a message."""
    return _HEADER.pack(_MAGIC, PROTOCOL, 0, number) + _encoder.encode(message)


def decode_request(frame: bytes) -> tuple[int, Request]:
    """Returns the number and the request in a frame. Raises FrameError if it cannot be read."""
    version, number = _header(frame)
    if version != PROTOCOL:
        raise FrameError(
            "version",
            f"this server speaks version {PROTOCOL} of the protocol, the client version {version}; run the same release "
            "of pd-cache on both sides",
            number,
        )
    try:
        return number, _read_request(memoryview(frame)[_HEADER.size :])
    except UndecodableError as error:
        raise FrameError("malformed", f"not a request: {error}", number) from None


def decode_answer(frame: bytes) -> tuple[int, Answer]:
    """Returns the number and the answer in a frame. Raises FrameError if it cannot be read.

    From a server of another version, it reads only `Refused`.
    """
    version, number = _header(frame)
    read = _read_answer if version == PROTOCOL else _read_refusal
    try:
        return number, read(memoryview(frame)[_HEADER.size :])
    except UndecodableError as error:
        raise FrameError("malformed", f"not an answer: {error}", number) from None


def _header(frame: bytes) -> tuple[int, int]:
    """Returns the version of the protocol, and the number of the request."""
    if len(frame) < _HEADER.size:
        raise FrameError("malformed", f"a frame of {len(frame)} bytes is too short for a header")
    magic, version, _, number = _HEADER.unpack_from(frame)
    if magic != _MAGIC:
        raise FrameError("malformed", f"a frame that begins with {magic!r} is not one of ours")
    return version, number
