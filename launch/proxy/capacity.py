"""Computes how many requests and connections fit under the limit of open files. Pure."""

from __future__ import annotations

import logging

import msgspec

from launch.descriptors import PER_REQUEST, RESERVED, descriptors_for
from pd_cache.cluster import ProxyConfig

log = logging.getLogger(__name__)


_UI_SHARE = 8
"""One connection of so many may belong to a browser that follows `/ui`."""


def fitted(config: ProxyConfig, descriptors: int) -> tuple[ProxyConfig, int]:
    """Returns the configuration with as many requests as `descriptors` allow, and the most connections of clients."""
    usable = descriptors - min(RESERVED, descriptors // 4)
    most = max(1, min(config.max_requests, usable // PER_REQUEST))
    if most < config.max_requests:
        log.warning(
            "at most %d requests at a time, not the %d of max_requests: this process may open %d files, and that many "
            "requests need %d; raise the hard limit (ulimit -Hn, LimitNOFILE of systemd)",
            most,
            config.max_requests,
            descriptors,
            descriptors_for(config.max_requests),
        )
    room = min(usable - 2 * most, 4 * most + 1024)
    followers = min(config.ui_followers, room // _UI_SHARE)
    return msgspec.structs.replace(config, max_requests=most, ui_followers=followers), room
