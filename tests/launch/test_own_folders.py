"""Folders of one process: its own stay, those of killed processes go, whatever happens at the same time."""

import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from megatron_rc.launch import own_folders
from megatron_rc.launch.ending import FOLDER
from megatron_rc.launch.own_folders import own_folder, remove_left_behind
from megatron_rc.launch.training.reporting.boards import import_wandb
from tests.support.paths import ROOT

# Without torch, which takes two seconds.
OWNER = """
import importlib.util, sys, time
from pathlib import Path
spec = importlib.util.spec_from_file_location("own_folders", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
with module.own_folder(sys.argv[2], "kind-") as folder:
    (folder / "weights").write_text("a whole model")
    print(folder, flush=True)
    time.sleep(60)
"""


@pytest.fixture
def owner(tmp_path):
    """A process with a folder, and the folder."""
    words = [sys.executable, "-c", OWNER, ROOT / "launch" / "own_folders.py", tmp_path]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        yield process, tmp_path / process.stdout.readline().rsplit("/", 1)[-1].strip()
        process.kill()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_goes_with_its_process_killed_or_not(tmp_path, owner):
    process, folder = owner
    (tmp_path / "kind-file").write_text("no folder")
    (tmp_path / "kind-link").symlink_to(ROOT)
    (tmp_path / "other").mkdir()
    with own_folder(tmp_path, "kind-") as mine:
        assert names(tmp_path) == sorted([folder.name, mine.name, "kind-file", "kind-link", "other"])
        remove_left_behind(tmp_path, "kind-")
        assert mine.is_dir()
    assert names(folder) == ["weights"], "its process lives"
    process.kill()
    process.wait()
    assert folder.is_dir()
    with own_folder(tmp_path, "kind-") as mine:
        assert names(tmp_path) == sorted([mine.name, "kind-file", "kind-link", "other"])
    assert names(tmp_path) == ["kind-file", "kind-link", "other"]


def test_folders_that_cannot_be_locked_or_are_another_users_are_not_removed(tmp_path, monkeypatch):
    """As on NFS."""
    (tmp_path / "kind-1").mkdir()

    def refuse(*_):
        raise OSError(9, "Bad file descriptor")

    with monkeypatch.context() as patch:
        patch.setattr(own_folders.fcntl, "flock", refuse)
        with own_folder(tmp_path, "kind-") as mine:
            assert names(tmp_path) == sorted(["kind-1", mine.name])
    monkeypatch.setattr(own_folders.os, "geteuid", lambda: 12345)
    remove_left_behind(tmp_path, "kind-")
    assert names(tmp_path) == ["kind-1"]


def test_nobody_takes_a_new_folder_for_one_left_behind(tmp_path):
    """Between its making and its lock another process may."""
    done = threading.Event()

    def sweep():
        while not done.is_set():
            remove_left_behind(tmp_path, "kind-")

    sweeper = threading.Thread(target=sweep)
    sweeper.start()
    try:
        for _ in range(200):
            with own_folder(tmp_path, "kind-") as mine:
                (mine / "weights").write_text("all there")
    finally:
        done.set()
        sweeper.join()
    assert not names(tmp_path)


def test_temporary_folders_of_wandb_lie_in_the_launchers(tmp_path, monkeypatch):
    """A stand-in that makes one when it is imported, as wandb does; a rank that is killed would leave it behind."""
    (tmp_path / "wandb.py").write_text("import tempfile\nmade = tempfile.mkdtemp()\n")
    folder = tmp_path / "launcher"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv(FOLDER, str(folder))
    before = tempfile.gettempdir()
    import_wandb()
    assert Path(sys.modules.pop("wandb").made).parent == folder
    assert tempfile.gettempdir() == before
