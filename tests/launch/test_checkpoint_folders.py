"""Folders of checkpoints, without a model: writing one once more, older ones that stay, and files that come or go."""

import contextlib
import errno
import itertools
import logging
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from megatron_rc.launch import checkpoint_folders as folders
from megatron_rc.launch.run_config.training import CheckpointSection
from megatron_rc.launch.training.checkpoints import save as saving
from megatron_rc.launch.training.checkpoints.checksums import MANIFEST, checksums_of_rank
from megatron_rc.launch.training.checkpoints.find import checked_checkpoint


def written(folder, text):
    """A checkpoint of iteration 3 that only waits for its name."""
    folders.begin(folder, 3)
    (folders.partial_folder(folder, 3) / "metadata.json").write_text(text)


def content(folder):
    return (folders.iteration_folder(folder, 3) / "metadata.json").read_text()


def failing_rename(killed):
    """Where the new one gets its name an error, or the end of the run: nothing is done after it."""
    rename = folders.Path.rename

    def fail(path, target):
        if path.suffix == ".partial":
            raise KeyboardInterrupt if killed else OSError(errno.EIO, os.strerror(errno.EIO))
        return rename(path, target)

    return mock.patch.object(folders.Path, "rename", fail)


@pytest.mark.parametrize("killed", [False, True], ids=["error", "killed"])
def test_a_checkpoint_that_is_replaced_is_never_lost(tmp_path, killed):
    written(tmp_path, "old")
    folders.complete(tmp_path, 3)
    written(tmp_path, "new")
    with failing_rename(killed), pytest.raises(KeyboardInterrupt if killed else OSError):
        folders.complete(tmp_path, 3)
    written(tmp_path, "newer")
    assert content(tmp_path) == "old"
    folders.complete(tmp_path, 3)
    assert content(tmp_path) == "newer"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000003", folders.TRACKER]


def test_a_checkpoint_is_whole_though_an_older_one_stays(tmp_path, caplog):
    files = CheckpointSection(save=str(tmp_path), keep_last=1)
    error = OSError(errno.EACCES, os.strerror(errno.EACCES), "iter_0000001")
    with mock.patch.object(folders, "prune", side_effect=error), caplog.at_level(logging.WARNING):
        saving.remove_older(files, newest=3)
    assert "an older checkpoint could not be removed (iter_0000001: Permission denied)" in caplog.text


def pending(folder, iteration):
    """A checkpoint that is written, but has neither manifest nor name; with a function that completes it."""
    folders.begin(folder, iteration)
    partial = folders.partial_folder(folder, iteration)
    (partial / "metadata.json").write_text("new")
    thread = SimpleNamespace(folder=partial, save_folder=folder, iteration=iteration, _keeps_older=True)
    return lambda: saving.PendingCheckpoint._complete(thread, [checksums_of_rank(partial, 0, lambda: None)])


def killed_at(number):
    """Patches that end the run at its ``number``-th change of a name, removal, or write to the disk."""
    calls = itertools.count(1)

    def killing(work):
        def work_or_die(*args, **kwargs):
            if next(calls) == number:
                raise KeyboardInterrupt
            return work(*args, **kwargs)

        return work_or_die

    patches = contextlib.ExitStack()
    for owner, name in ((Path, "rename"), (Path, "replace"), (shutil, "rmtree"), (os, "fsync")):
        patches.enter_context(mock.patch.object(owner, name, killing(getattr(owner, name))))
    return patches


@pytest.mark.parametrize("iteration", [2, 3], ids=["replaced", "added"])
def test_wherever_a_run_is_killed_the_newest_checkpoint_is_whole(tmp_path, iteration):
    """A manifest after the name would leave unverified files; a number before it would name nothing."""
    for number in itertools.count(1):
        folder = tmp_path / str(number)
        pending(folder, 2)()
        complete = pending(folder, iteration)
        try:
            with killed_at(number):
                complete()
        except KeyboardInterrupt:
            folders.restore(folder)
            newest, path = checked_checkpoint(folder)
            assert newest in (2, iteration)
            assert (path / MANIFEST).is_file()
            continue
        assert folders.latest_iteration(folder) == iteration
        break
    assert number > 5, "names, manifest and tracker have been on the way"
