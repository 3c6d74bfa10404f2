"""Lets nodes find one another: `static`, from the file, or `etcd`.

1. A node registers under a lease when it can be used, keeps the lease alive, and leaves when it stops.
2. Other processes follow a view of the nodes. The view is always available: nothing in serving waits for
   etcd.
3. While etcd is away, the last view stays and is marked stale. Nodes that vanished because of that come back
   afterwards (`membership`).

Only processes of the launcher use this package; no engine imports it. `membership` is pure, `etcd` speaks to
etcd, `directory` is the interface to both kinds.
"""

from launch.discovery.directory import (
    Member,
    file_records,
    find_master,
    known_master,
    master_of,
    open_directory,
)
from launch.discovery.membership import View

__all__ = [
    "Member",
    "View",
    "file_records",
    "find_master",
    "known_master",
    "master_of",
    "open_directory",
]
