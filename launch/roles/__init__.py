"""What each role does in its process, one file per role. `run_role` is the one entry point, for `launch`, for `up` and for the demo.

Each role is a function of the file, its node, a callback for the moment at which the node can be used, and the node's membership in the
cluster. It returns when the process is asked to stop, and raises PdCacheError if it cannot do its work.
"""

from launch.roles.run import run_role

__all__ = ["run_role"]
