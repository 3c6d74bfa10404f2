"""Which versions of vLLM this connector works with."""

from __future__ import annotations

import logging

from pd_cache.errors import PdCacheError

log = logging.getLogger(__name__)

TESTED = ("0.32.0",)
"""Versions that the tests of `tests/vllm` ran with."""

_NEEDED = (
    "bind_kv_cache_manager",
    "build_connector_worker_meta",
    "get_block_ids_with_load_errors",
    "get_handshake_metadata",
    "get_transfer_results",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "set_xfer_handshake_metadata_pp_aware",
)
"""Hooks of `KVConnectorBase_V1` that must be called for KV to be correct and blocks to be given back."""


class IncompatibleVllmError(PdCacheError):
    """The installed vLLM has another connector interface."""


def check_version(version: str, base: type) -> None:
    """Logs a warning for a version that was not tested. Raises IncompatibleVllmError if the interface lacks what is needed."""
    tested = ", ".join(TESTED)
    lacking = [name for name in _NEEDED if not hasattr(base, name)]
    if lacking:
        raise IncompatibleVllmError(
            f"vLLM {version} has another connector interface than this pd-cache needs: KVConnectorBase_V1 lacks "
            f"{', '.join(lacking)}. Tested versions of vLLM: {tested}"
        )
    if version.split("+")[0] not in TESTED:
        log.warning("pd-cache was tested with vLLM %s; this is %s, and may behave otherwise", tested, version)
