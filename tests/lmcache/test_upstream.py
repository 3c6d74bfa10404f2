"""LMCache's own tests of adapters, from its source distribution, against ours."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.pool import ROOT

SOURCES = (
    Path(os.environ.get("LMCACHE_SOURCES", Path(sys.prefix) / "lmcache-sources")) / "tests/v1/distributed"
)
NO_SOURCES = f"LMCache's tests are not in {SOURCES}; `make install-lmcache` puts them there, and LMCACHE_SOURCES names another folder"

FILES = ("test_mock_l2_adapter.py", "test_fs_l2_adapter_delete.py")
NOT_OURS = ("TestBandwidthSimulation",)
"""What only a mock has: a bandwidth that it pretends."""


@pytest.mark.skipif(not SOURCES.is_dir(), reason=NO_SOURCES)
def test_lmcaches_own_tests_of_its_mock_and_file_adapters_pass_with_ours(pool, tmp_path):
    for file in FILES:  # elsewhere: their package is called `tests`, as ours is
        shutil.copy(SOURCES / file, tmp_path)
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.lmcache.upstream"),
        *("--rootdir", str(tmp_path), "-c", os.devnull, *FILES),
        *("-k", " and ".join(f"not {name}" for name in NOT_OURS)),
    ]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PD_CACHE_MASTER": pool.address}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=tmp_path, env=env, timeout=600
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) >= 51, done.stdout
    assert "skipped" not in done.stdout
