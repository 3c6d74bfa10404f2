"""Lookups in the pool for prompts of other nodes, in the namespaces that these nodes report."""

from __future__ import annotations

from collections.abc import Sequence

from launch.discovery import View, known_master
from launch.masters import segments_at
from pd_cache.chunks import SEED_VARIABLE, Namespace
from pd_cache.cluster import ClusterConfig, EngineNode, VllmEngineConfig
from pd_cache.config import NodeSettings
from pd_cache.lookup import MooncakeLookupClient


def master_of(config: ClusterConfig, view: View) -> str | None:
    """Returns the address of the pool's master: the file's, or that of the registered one; None if both are
    unknown."""
    return known_master(config) or next((record.address for record in view.by_role("master")), None)


def hash_seeds(config: ClusterConfig) -> set[str]:
    """Returns the seeds of vLLM's block hashes that the file sets."""
    if not isinstance(config.engine, VllmEngineConfig):
        return set()
    own = (node.env for node in config.nodes if isinstance(node, EngineNode))
    return {env[SEED_VARIABLE] for env in (config.engine.env, *own) if SEED_VARIABLE in env}


def pool_bytes(config: ClusterConfig, view: View) -> int:
    """Returns how many bytes the pool can hold, with as many copies of each object as the file says. Segments
    that are drained do not count. Raises OSError or ValueError if no master answers."""
    failure: OSError | ValueError = ValueError("no master of the pool is known")
    sizes = []
    for record in view.by_role("master"):
        try:
            sizes.append(
                sum(
                    segment.size_bytes
                    for segment in segments_at(record.metrics or "")
                    if not segment.shown_status
                )
            )
        except (OSError, ValueError) as error:
            failure = error
    if not sizes:
        raise failure
    return max(sizes) // config.cache.pool.replicas  # of elected masters, only the leader knows the segments


def open_lookup(
    config: ClusterConfig, host: str, namespaces: Sequence[Namespace], master: str
) -> MooncakeLookupClient:
    """Returns a client that looks up in the namespaces of a model's layer groups. The first group names the
    chunks.

    `host` is this process's address. Does not wait for the pool at `master`.
    """
    settings = NodeSettings(master=master, host=host, cache=config.cache, transfer=config.transfer)
    first, *further = namespaces
    return MooncakeLookupClient(settings, first, master, further=further)
