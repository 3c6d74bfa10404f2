"""`pd-cache top`: what the nodes of a cluster do now, in a terminal.

`asker.py` asks each node on its own schedule, `watched.py` (pure) turns the answers into rows and follows the keys, `screen.py` draws them
with rich, `terminal.py` reads keys, and `run.py` is the loop. A few keys and one table need no more than rich, which `status` needs anyway.
"""

from launch.top.run import top

__all__ = ["top"]
