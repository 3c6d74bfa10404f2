"""Fixtures that make things for a test, as many as it asks for, and end all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

T = TypeVar("T")


def made(make: Callable[..., T], end: Callable[[T], object]) -> Iterator[Callable[..., T]]:
    """Yields `make` to a test, which a fixture does by `yield from`. Ends what it has made after the test, the last first."""
    with ExitStack() as stack:

        def make_one(*arguments: Any, **options: Any) -> T:
            one = make(*arguments, **options)
            stack.callback(end, one)
            return one

        yield make_one
