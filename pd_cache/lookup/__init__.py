"""Clients that tell how long a prefix of a prompt the cache holds."""

from pd_cache.lookup.base import LookupClient
from pd_cache.lookup.bypass import BypassLookupClient
from pd_cache.lookup.mooncake import MooncakeLookupClient
from pd_cache.lookup.rpc import RpcLookupClient, RpcLookupServer

__all__ = ["BypassLookupClient", "LookupClient", "MooncakeLookupClient", "RpcLookupClient", "RpcLookupServer"]
