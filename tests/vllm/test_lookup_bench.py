"""`bench lookup --groups`: ours and MooncakeStoreConnector's lookup find the same prefix, each by its own
keys."""

import json

from tests.support.cli import printed, program


def test_lookups_in_deepseeks_layer_groups_are_measured_beside_mooncake_store_connectors():
    told = printed(*program("bench", "lookup", "--groups", "--clients", 1, "--json"))
    groups = json.loads(told.splitlines()[-1])["groups"]
    # ours: a chunk of 256 tokens in each of the eight parts of five groups; theirs: in each group, the blocks
    # that a hit needs that ends at such a chunk
    assert [(row["tokens"], row["keys"], row["their_keys"]) for row in groups] == [
        (4096, 128, 368),
        (32768, 1024, 2944),
    ]
    assert all(row["lookup_ms"] > 0 and row["their_lookup_ms"] > 0 for row in groups)
