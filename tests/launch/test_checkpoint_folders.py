"""Folders of checkpoints, without a model: writing one once more, older ones that stay, and files that come or go."""

import errno
import logging
import os
from unittest import mock

import pytest

from megatron_rc.launch import checkpoint_folders as folders
from megatron_rc.launch.run_config.training import CheckpointSection
from megatron_rc.launch.training.checkpoints import save as saving


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
