"""`pd-cache pin`, `release` and `prefetch`: thin clients of the proxy's `POST /hints` (docs/hints.md)."""

from __future__ import annotations

import secrets
from typing import Any

import msgspec

from launch.http import client_key, fetch, proxy_access
from launch.proxy.hints.messages import ActionAnswer, HintsAnswer
from launch.watch.asker import cluster_status
from pd_cache.cluster import ClusterConfig
from pd_cache.decoding import decode_json
from pd_cache.errors import PdCacheError

_ASK_S = 10.0


def send_action(
    config: ClusterConfig, kind: str, payload: dict[str, Any], action_id: str | None
) -> ActionAnswer:
    """Sends an action to one of the cluster's proxies after the other, until one does not refuse it. Returns
    its answer, or the last refusal.

    Raises PdCacheError if no proxy answers.
    """
    name = action_id or secrets.token_hex(8)
    action = {"action_id": name, "action_type": kind, "action_version": "1.0", "payload": payload}
    body = msgspec.json.encode(
        {"protocol_version": "0.1", "message_id": secrets.token_hex(8), "actions": [action]}
    )
    access = proxy_access(config)._replace(key=client_key(config))
    answer, why = None, "discovery knows none"
    for row in cluster_status(config).nodes:
        if row.record.role != "proxy":
            continue
        try:
            answered = fetch(f"{row.record.address}/hints", _ASK_S, access, body)
            (answer,) = decode_json(answered, HintsAnswer).actions
        except (OSError, ValueError) as error:
            why = f"{row.name}: {error if row.answers else row.why}"
        else:
            if answer.status != "refused":
                return answer
    if answer is None:
        raise PdCacheError(f"no proxy has answered: {why}")
    return answer


def answer_text(kind: str, answer: ActionAnswer) -> str:
    """Returns what `pin`, `release` and `prefetch` print."""
    if answer.status == "refused":
        return f"refused: {answer.reason}"
    clipped = f" ({answer.reason})" if answer.reason else ""
    if answer.released is not None:
        return f"{answer.released} released"
    if kind == "kv.prefetch":
        return f"{answer.node or 'a decode node'} loads {answer.in_pool} of {answer.tokens} tokens; for {answer.ttl_s:g} s, its next request goes there{clipped}"
    kept = f"{answer.tokens} tokens for {answer.ttl_s:g} s{clipped}"
    return f"{answer.action_id}: keeps {kept}; the pool has {answer.in_pool} of them now"
