"""The folder of a disk tier that an earlier version wrote is read, and what is written today is the same,
byte for byte."""

import shutil
from contextlib import closing, contextmanager

from tests.golden.promise import HERE
from tests.support.backends import Subject, make_disk, make_memory
from transfer.errors import Status

PAYLOAD = 5000
VALUES = {f"pdc1/0123456789abcdef/0/{n:032x}": bytes((n + i) % 251 for i in range(PAYLOAD)) for n in range(3)}


@contextmanager
def opened(path):
    with closing(make_disk(make_memory(PAYLOAD, 8), path, 8, threads=1)) as disk:
        disk.wait_available(60)
        yield Subject(disk, {"disk": disk}, None)


def objects(path):
    """The bytes of each file that is an object, by folder and digest."""
    return {
        str(file.relative_to(path)).partition("-")[0]: file.read_bytes() for file in path.glob("*/0/??/*")
    }


def test_a_folder_of_an_earlier_version_is_opened_and_read(tmp_path):
    shutil.copytree(HERE / "disk", tmp_path / "disk")
    with opened(tmp_path / "disk") as subject:
        assert subject.get([*VALUES, "none"]) == [*VALUES.values(), "missing"]
        assert subject.put({"new": bytes(PAYLOAD)}) == [Status.OK]
    assert objects(HERE / "disk").items() <= objects(tmp_path / "disk").items()
    assert len(objects(tmp_path / "disk")) == 4


def test_what_is_written_is_the_same_as_ever(tmp_path):
    with opened(tmp_path) as subject:
        for key, value in VALUES.items():
            assert subject.put({key: value}) == [Status.OK]
        assert subject.backend.annotate("note", b"for people") is Status.OK
    assert objects(tmp_path) == objects(HERE / "disk")
    notes = [
        {file.name: file.read_text() for file in path.glob("*/0/note-*")}
        for path in (tmp_path, HERE / "disk")
    ]
    assert notes[0] == notes[1]
