"""A user's Ctrl-C at a chosen moment: KeyboardInterrupt at each point of a call at which Python looks for signals."""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

_OURS = tuple(f"{Path(__file__).parents[2] / package}/" for package in ("pd_cache", "transfer"))
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
"""Instructions after which Python looks for signals. Where it does not, an interrupt cannot come."""

FEWEST = 20 if sys.version_info < (3, 13) else 15
"""Every call that is tried has more points than that. Newer versions of Python look less often."""


def interrupted_at(point: int, call: Callable[[], object]) -> bool:
    """Calls `call` and interrupts it at its `point`-th point in our own code. Returns False if it has fewer of them."""
    if sys.version_info[:2] == (3, 12):
        pytest.skip("Python 3.12 crashes where single instructions are traced; run it with another version")
    left = point
    raised = False

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code, before = frame.f_code, 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal before, left, raised
            if event == "opcode":
                if _may_come_between(code, before, frame.f_lasti):
                    left -= 1
                    if left < 0:
                        raised = True
                        raise KeyboardInterrupt
                before = frame.f_lasti
            return step

        return step

    usually = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(usually)
    return raised


@functools.cache
def _may_come_between(code: CodeType, before: int, after: int) -> bool:
    """Whether Python looks for signals between two instructions. The second stands for the first here, whose handlers get the
    exception: if it has others (a `with` block ends there, for example), it cannot."""
    looks = dis.opname[code.co_code[before]].startswith(_LOOKS)
    return looks and _handler(code, before) == _handler(code, after)


def _handler(code: CodeType, offset: int) -> int | None:
    """Where the handler of an instruction's exceptions begins."""
    entries = dis._parse_exception_table(code)  # type: ignore[attr-defined]
    return next((entry.target for entry in entries if entry.start <= offset < entry.end), None)
