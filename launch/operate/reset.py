"""`pd-cache reset`: another version of the weights, on all nodes at once."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import NamedTuple

from launch.versions import Told, known_versions, tell_all
from launch.watched import cluster_status
from pd_cache.cluster import ClusterConfig
from pd_cache.errors import PdCacheError
from pd_cache.versions import UnavailableError


class ResetModel(NamedTuple):
    """A model that has another version of the weights now."""

    name: str
    """As the nodes call it."""
    label: str
    processes: Told


def reset_models(config: ClusterConfig, model: str | None, version: str | None) -> Iterator[ResetModel]:
    """Says that all nodes have other weights of the model that they call `model`, or of all models if it is None: those of `version`.

    Yields each model when it is done. Raises PdCacheError if the authority refuses or does not answer: then nothing has changed for the models
    that were not yielded.
    """
    status = cluster_status(config)
    authorities = [row.record.versions for row in status.nodes if row.record.versions is not None]
    known = known_versions(authorities)
    records = [row.record for row in status.nodes if row.record.cache_namespaces]
    served = {one.cache_namespaces[0].model: one.model or one.cache_namespaces[0].model for one in records}
    engines = [record for record in records if record.role in ("prefill", "decode")]
    names = {weights: weights for weights in known} | served
    chosen = {weights: name for weights, name in names.items() if model in (None, name, weights)}
    if not chosen:
        there = f"they serve {', '.join(sorted(set(names.values())))}" if names else "none has told its namespace"
        raise PdCacheError(f"no node serves {'any model' if model is None else model}: {there}; see `pd-cache status`")
    for weights, name in chosen.items():
        label = version or secrets.token_hex(8)
        try:
            processes = tell_all(authorities, weights, label)
        except UnavailableError as error:
            raise PdCacheError(
                f"no master has answered for the versions of {weights} ({error}): nothing is known to be reset; see `pd-cache status`, and "
                f"try again with --version {label}"
            ) from error
        # engines of which no authority has heard, as after its start, have not been told either
        serving = {one.name for one in engines if any(space.model == weights for space in one.cache_namespaces)}
        untold = sorted({*processes.untold, *serving.difference(processes.told)})
        yield ResetModel(name, label, processes._replace(untold=untold))
