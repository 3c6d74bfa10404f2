"""Paged caches with known contents, read and written one slot at a time: the slow, obvious way that copiers
must match."""

import hashlib

import torch

from pd_cache.layout import PageKind

KINDS_WITH_TOKENS = [kind for kind in PageKind if kind is not PageKind.OPAQUE]
"""Those whose pages show where a token lies."""


def make_cache(
    kind=PageKind.HEADS_FIRST, *, layers=2, blocks=32, block_size=4, heads=3, dim=8, one_storage=True
):
    """Tensors of `layers` layers, bfloat16, filled with random bytes."""
    shapes = {
        PageKind.HEADS_FIRST: (blocks, heads, block_size, 2 * dim),
        PageKind.KV_OUTER: (2, blocks, block_size, heads, dim),
        PageKind.KV_INNER: (blocks, 2, block_size, heads, dim),
        PageKind.MLA: (blocks, block_size, dim),
        PageKind.HEADS_LAST: (blocks, block_size, heads, 2 * dim),
    }
    shape = (layers, *shapes[kind])
    whole = torch.randint(-(2**15), 2**15, shape, dtype=torch.int16).view(torch.bfloat16)
    if kind is PageKind.HEADS_LAST:
        whole = whole.transpose(2, 3)
    return list(whole.unbind()) if one_storage else [layer.clone() for layer in whole]


def token_view(tensor, kind, slot, block_size):
    """The part of a layer's tensor that belongs to one slot, as int16."""
    block, offset = divmod(slot, block_size)
    bits = tensor.view(torch.int16)
    if kind in (PageKind.HEADS_FIRST, PageKind.HEADS_LAST):
        return bits[block, :, offset, :]
    if kind is PageKind.KV_OUTER:
        return bits[:, block, offset]
    if kind is PageKind.KV_INNER:
        return bits[block, :, offset]
    return bits[block, offset]


def kv_of(prefix, layer, shape):
    """The KV that a model would compute for the last token of `prefix`: a function of the whole prefix,
    int16."""
    count = int(torch.Size(shape).numel())
    seed = hashlib.sha256(f"{layer}:{list(prefix)}".encode()).digest()
    raw = (seed * (2 * count // len(seed) + 1))[: 2 * count]
    return torch.frombuffer(bytearray(raw), dtype=torch.int16).view(shape)


def write_prompt(cache, layout, tokens, slots):
    """What an engine does when it computes `tokens`: put each token's KV into its slot."""
    for index, slot in enumerate(slots):
        for layer, tensor in enumerate(cache):
            place = token_view(tensor, layout.kind, slot, layout.block_size)
            place.copy_(kv_of(tokens[: index + 1], layer, place.shape))


def holds_token(cache, layout, prefix, slot):
    """Whether a slot holds the KV of the last token of `prefix`, in every layer."""
    return all(
        torch.equal(place, kv_of(prefix, layer, place.shape))
        for layer, tensor in enumerate(cache)
        for place in (token_view(tensor, layout.kind, slot, layout.block_size),)
    )


def same_tensors(one, other):
    """Whether tensors of any bytes are the same: random numbers may be none, and those equal nothing."""
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in zip(one, other, strict=True))
