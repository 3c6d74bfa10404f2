"""Names, keys, objects, YAML keys, commands, metrics and the public API are what they were."""

import pytest

from tests.golden.promise import HERE, PROMISE, promised


@pytest.mark.parametrize("file", PROMISE)
def test_what_users_rely_on_is_as_it_was(file):
    assert promised(file) == (HERE / file).read_text(), "see the docstring of tests/golden/promise.py"
