"""What every test of the proxy is checked for, and what several need."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
import pytest

from launch.proxy import routing


@pytest.fixture(autouse=True)
def no_file_left_open() -> Iterator[None]:
    before = psutil.Process().num_fds()
    yield
    assert psutil.Process().num_fds() <= before


@pytest.fixture
def long_skips(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node that is left alone stays so until the test's end, however slow the machine is."""
    monkeypatch.setattr(routing, "_FIRST_SKIP_S", 3600.0)
    monkeypatch.setattr(routing, "_LAST_SKIP_S", 3600.0)
