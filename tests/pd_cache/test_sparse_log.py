"""How often a line that repeats itself is written."""

from pd_cache.sparse_log import SparseLog


def test_one_line_in_ten_seconds_for_each_key_with_what_was_held_back():
    now = 0.0
    log = SparseLog(lambda: now)
    assert log.admit("a", 2) == 2
    assert log.admit("a", 3) is None
    assert log.admit("b") == 1
    now = 10.0 - 0.001
    assert log.admit("a") is None
    now = 10.0
    assert log.admit("a", 5) == 3 + 1 + 5
    assert log.admit("a") is None
