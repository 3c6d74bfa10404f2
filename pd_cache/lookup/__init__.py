"""Clients that find the longest cached prefix of a prompt without a cache server."""

from pd_cache.lookup.base import LookupClient
from pd_cache.lookup.bypass import BypassLookupClient
from pd_cache.lookup.pool import MooncakeLookupClient

__all__ = ["BypassLookupClient", "LookupClient", "MooncakeLookupClient"]
