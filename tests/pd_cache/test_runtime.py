"""Runtime files are believed only where no other user could have put them, and only while their writer
lives."""

import os
import stat
import sys

import pytest

from pd_cache import runtime
from pd_cache.runtime import (
    RuntimeFolderError,
    lock_file,
    note,
    own_folder,
    read_note,
    runtime_folder,
    temporary_folder,
)
from tests.support.pool import Process

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to another user")
STRANGER = 54321


@pytest.fixture
def shared(tmp_path, monkeypatch):
    """In place of /tmp."""
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    monkeypatch.setattr(runtime, "_SHARED", folder)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    return folder


@pytest.fixture
def ours(shared):
    """Where this user's folder would be in it."""
    return shared / f"pd-cache-{os.geteuid()}"


@pytest.fixture
def session(shared, tmp_path, monkeypatch):
    """A session's folder, as a shell has it and a service does not."""
    folder = tmp_path / "session"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    return folder


def test_the_folder_is_made_for_us_alone(ours):
    with own_folder():
        assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    with own_folder():
        pass  # and found again


def test_a_session_folder_is_taken_if_it_is_provably_our_own(ours, session, monkeypatch):
    assert runtime_folder() == session / "pd-cache"
    session.chmod(0o755)
    assert runtime_folder() == ours
    session.chmod(0o700)
    if os.geteuid() == 0:
        os.chown(session, STRANGER, STRANGER)
        assert runtime_folder() == ours
    monkeypatch.setenv("XDG_RUNTIME_DIR", "relative")
    assert runtime_folder() == ours


@pytest.mark.usefixtures("session")
def test_what_others_planted_where_our_folder_would_be_is_nothing_to_a_session_with_a_folder_of_its_own(ours):
    ours.symlink_to("nowhere")
    with note("n", "text") as other:
        assert other is None
        assert read_note("n") == "text"


@needs_root
def test_a_folder_that_another_user_made_first_is_refused(ours):
    ours.mkdir(mode=0o700)
    (ours / "n").write_text("planted")
    os.chown(ours, STRANGER, STRANGER)
    for use in (own_folder, temporary_folder, lambda: note("n", "x")):
        with (
            pytest.raises(
                RuntimeFolderError, match=r"belongs to another user.*remove it, or set XDG_RUNTIME_DIR"
            ),
            use(),
        ):
            pass
    with pytest.raises(RuntimeFolderError):
        read_note("n")


@pytest.mark.parametrize(
    "plant, message",
    [
        (lambda ours: (ours.mkdir(), ours.chmod(0o750)), "has mode 0750"),
        (lambda ours: (ours.mkdir(), ours.chmod(0o1777)), "has mode 1777"),
        (
            lambda ours: ((ours.parent / "target").mkdir(mode=0o700), ours.symlink_to("target")),
            "cannot be used",
        ),
        (lambda ours: ours.symlink_to("nowhere"), "cannot be used"),
        (lambda ours: ours.write_text("a file"), "cannot be used"),
        (lambda ours: ours.parent.chmod(0o777), "is not sticky"),
    ],
    ids=["readable", "writable", "link", "dead link", "file", "can be renamed"],
)
def test_what_is_not_provably_ours_is_refused(ours, plant, message):
    plant(ours)
    with pytest.raises(RuntimeFolderError, match=message), own_folder():
        pass


def test_a_note_is_there_for_as_long_as_its_writer_keeps_it(ours):
    assert read_note("n") is None
    with note("n", "text") as other:
        assert other is None
        assert read_note("n") == "text"
        assert stat.S_IMODE((ours / "n").stat().st_mode) == 0o600
        with note("n", "of a second writer") as other:
            assert other == "text"
        assert read_note("n") == "text"
    assert os.listdir(ours) == []


def test_a_note_of_a_service_is_found_by_a_shell(session, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    with note("n", "text"):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(session))
        assert read_note("n") == "text"
        assert runtime_folder().parent == session


WRITER = """
import sys, time
from pd_cache.runtime import lock_file, note, temporary_folder
from pathlib import Path
with note("n", "text"), temporary_folder() as folder, lock_file(Path(sys.argv[1])) as locked:
    (folder / "left").write_text("over")
    print(locked, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def writer(tmp_path, session):
    """A process that keeps a note, a temporary folder and a lock, until it is killed."""
    with Process("writer", [sys.executable, "-c", WRITER, str(tmp_path / "lock")]) as process:
        process.said.wait()
        assert process.lines == ["True"], process.errors
        yield process


def test_what_a_killed_process_left_is_not_believed_and_goes_with_the_next(writer, tmp_path):
    lock = tmp_path / "lock"
    folder = runtime_folder()
    assert read_note("n") == "text"
    with lock_file(lock) as got:
        assert not got
    with temporary_folder():
        assert len(list(folder.glob("tmp-*/left"))) == 1, "a living process keeps its own"
    writer.kill()
    assert {"n"} < set(os.listdir(folder))
    assert lock.exists()
    assert read_note("n") is None
    with temporary_folder() as own:
        assert [one.name for one in folder.glob("tmp-*")] == [own.name]
    with lock_file(lock) as got:
        assert got
    assert not lock.exists()
    with note("n", "new"):
        assert read_note("n") == "new"
    assert os.listdir(folder) == []
