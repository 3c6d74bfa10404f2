"""The errors of launching nodes."""

from __future__ import annotations

from pd_cache.errors import PdCacheError


class RoleError(PdCacheError):
    """A role cannot do its work."""
