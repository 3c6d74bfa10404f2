"""Fixtures that make things for a test, as many as it asks for, and end all of them."""

from contextlib import ExitStack


def made(make, end):
    """Yields `make` to a test, which a fixture does by `yield from`. Ends what it has made after the test,
    the last first."""
    with ExitStack() as stack:

        def make_one(*arguments, **options):
            one = make(*arguments, **options)
            stack.callback(end, one)
            return one

        yield make_one
