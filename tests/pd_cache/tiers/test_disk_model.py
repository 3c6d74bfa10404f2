"""A disk tier beside a dictionary, while things turn up in its folder, files get lost, and it is opened again
and again."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from pd_cache.metrics import CacheMetrics
from pd_cache.tiers.disk import digest_of
from tests.support.backends import Subject, make_disk, make_memory
from tests.support.disks import OBJECT, PAYLOAD, file_of, put, value
from transfer.errors import Status

ODDITIES = {
    "nothing": lambda path: None,
    "an empty file": Path.touch,
    "zeros": lambda path: path.write_bytes(bytes(102_400)),
    "too much": lambda path: path.write_bytes(bytes(200_000)),
}
REASONS = {"missing", "truncated", "foreign"}
KEYS = [f"k{n}" for n in range(10)]
some_keys = st.lists(st.sampled_from(KEYS), max_size=6, unique=True)


class DiskModel(RuleBasedStateMachine):
    """`spoiled` are keys of the model whose file was replaced and not read since."""

    @initialize(direct=st.booleans())
    def start(self, direct):
        self.path = Path(tempfile.mkdtemp())
        self.direct = direct
        self.model = set()
        self.spoiled = set()
        self.open()

    def open(self):
        metrics = CacheMetrics()
        disk = make_disk(make_memory(PAYLOAD, 24), self.path, 16, metrics=metrics, direct=self.direct)
        disk.wait_available(60)
        self.subject = Subject(disk, {"disk": disk}, metrics)

    @rule()
    def open_again(self):
        self.subject.backend.close()
        self.open()

    @rule(keys=some_keys)
    def put(self, keys):
        assert put(self.subject, *keys) == [Status.OK] * len(keys)
        self.model.update(keys)

    @rule(keys=some_keys)
    def get(self, keys):
        for key, outcome in zip(keys, self.subject.get(keys), strict=True):
            if key in self.spoiled and outcome in REASONS:
                self.model.discard(key)
                self.spoiled.discard(key)
            else:  # a spoiled one may have been found when the folder was opened, and written again
                assert outcome == (value(key) if key in self.model else "missing")

    @rule(keys=some_keys)
    def remove(self, keys):
        for key, status in zip(keys, self.subject.backend.batched_remove(keys), strict=True):
            assert key in self.spoiled or (status is Status.OK) == (key in self.model)
            self.model.discard(key)
            self.spoiled.discard(key)

    @rule(key=st.sampled_from(KEYS), oddity=st.sampled_from(sorted(ODDITIES)))
    def spoil(self, key, oddity):
        if key in self.model and key not in self.spoiled:
            path = file_of(self.subject, key)
            path.unlink()
            ODDITIES[oddity](path)
            self.spoiled.add(key)

    @rule(
        name=st.sampled_from(["tmp/1", "tmp/ff", "zz", "note-1", "readme", "stray-1", "00/\udcff", "00/x-1"])
    )
    def litter(self, name):
        path = self.subject.backend.folder.root / name
        if path.parent.is_dir() and not os.path.lexists(path):
            path.write_text("not ours")

    @invariant()
    def well(self):
        if not hasattr(self, "subject"):
            return
        self.subject.check_integrity()
        disk = self.subject.backend
        assert disk.state is Status.OK
        assert self.subject.count("pd_cache_tier_failures_total") == 0
        assert disk.index.held == 0
        assert self.subject.count("pd_cache_tier_bytes") == len(disk.index) * OBJECT
        assert self.subject.backend.memory.pool.in_use == 0
        held = disk.index.contains([digest_of(key) for key in KEYS])
        for key, there in zip(KEYS, held, strict=True):
            assert key in self.spoiled or there == (key in self.model)

    def teardown(self):
        if hasattr(self, "subject"):
            self.subject.backend.close()
            ours = [path for path in self.path.glob("*/0/??/*") if stat.S_ISREG(path.lstat().st_mode)]
            assert len(ours) <= 16 + len(KEYS)
            shutil.rmtree(self.path)


def test_whatever_turns_up_in_its_folder_a_disk_tier_keeps_what_was_put():
    run_state_machine_as_test(
        DiskModel,
        settings=settings(
            max_examples=40, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
