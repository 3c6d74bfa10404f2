"""How a process ends that still has a call in Mooncake.

Such a call cannot be cancelled and may last for a minute after its peer is gone. Python would end beside it, take down what it
uses, and be killed by SIGSEGV instead of telling what went wrong.
"""

from __future__ import annotations

import os
import sys
import threading


def end_if_stuck(status: int, message: str = "") -> None:
    """End this process at once with `message` on stderr, if a call is under way that its owner has given up; else return.

    Whatever has to be closed must be closed.
    """
    if any(thread.name.startswith("mooncake-") for thread in threading.enumerate()):
        print(message, end="\n" if message else "", file=sys.stderr)
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)
