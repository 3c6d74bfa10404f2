"""What a bench across machines can fail with."""

from __future__ import annotations

from pd_cache.errors import PdCacheError


class FleetError(PdCacheError):
    """Machines that should measure together cannot: the message names them."""
