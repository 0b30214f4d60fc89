"""Damaged checkpoints are refused by their checksums before anything of them is read."""

import json
import os
import shutil

import pytest

from megatron_rc.launch.checkpoint_folders import TRACKER, iteration_folder
from megatron_rc.launch.flags.saved_settings import SETTINGS, checkpoint_settings
from megatron_rc.launch.training.checkpoints.checksums import MANIFEST
from megatron_rc.launch.training.checkpoints.find import checked_checkpoint
from tests.launch.training.checkpoints.test_saving import SMALL, steps
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, refusal
from tests.support.training_runs import logged


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with the checkpoints of two steps, and the flags that wrote it."""
    folder = tmp_path_factory.mktemp("saved")
    arguments = flags(folder, *SMALL, "--grpo-kl-beta=0")
    ranks.run(steps, Layout(), [*arguments, f"--save={folder}/save"], 2)
    return folder / "save", arguments


@pytest.fixture
def copy(saved, tmp_path):
    """A copy to be spoilt."""
    return shutil.copytree(saved[0], tmp_path / "copy")


def flip_a_bit(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def replace_by_a_pipe(path):
    """Reading a pipe waits for whoever writes to it."""
    path.unlink()
    os.mkfifo(path)


SPOILT = {
    flip_a_bit: "is not what was written: its checksum differs",
    shorten: "bytes instead of",
    os.remove: "is missing",
    replace_by_a_pipe: "is missing",
}


@pytest.mark.parametrize(("spoil", "reason"), SPOILT.items(), ids=[spoil.__name__ for spoil in SPOILT])
def test_damage_in_any_file_is_found_and_named(saved, tmp_path, spoil, reason):
    folder, _ = saved
    names = {path.name for path in iteration_folder(folder, 2).iterdir()} - {MANIFEST, "metadata.json"}
    assert {".metadata", "__0_0.distcp", SETTINGS} <= names
    for name in names:
        spoilt = shutil.copytree(folder, tmp_path / name.strip("."))
        spoil(iteration_folder(spoilt, 2) / name)
        with pytest.raises(ValueError, match=f"checkpoint 2 is damaged: {name} .*{reason}"):
            checked_checkpoint(spoilt)
        assert checked_checkpoint(spoilt, 1)[0] == 1
        if spoil is flip_a_bit:
            assert checked_checkpoint(spoilt, checksums=False)[0] == 2


def is_refused_on(folder, rank):
    """Whether one of two ranks, each of which reads its share of the files, refuses the newest checkpoint."""
    try:
        checked_checkpoint(folder, rank=rank, ranks=2)
    except ValueError:
        return True
    return False


def test_each_file_is_read_by_one_of_the_ranks(saved, tmp_path):
    folder, _ = saved
    readers = []
    for path in iteration_folder(folder, 2).iterdir():
        if path.name in (MANIFEST, "metadata.json"):
            continue
        spoilt = shutil.copytree(folder, tmp_path / path.name.strip("."))
        flip_a_bit(iteration_folder(spoilt, 2) / path.name)
        readers.append([rank for rank in range(2) if is_refused_on(spoilt, rank)])
    assert [len(ranks_of_file) for ranks_of_file in readers] == [1] * len(readers)
    assert [0] in readers
    assert [1] in readers


def steps_in_words(words):
    """Return the step that a trainer begins at, and what it warns of."""
    with logged() as warnings:
        return make_trainer(words).iteration, warnings


def test_a_run_refuses_a_flipped_bit_and_goes_on_from_another_checkpoint(ranks, saved, copy):
    """PyTorch's format has no checksums: without ours a flipped bit is trained on."""
    arguments = [*saved[1], f"--load={copy}"]
    flip_a_bit(iteration_folder(copy, 2) / "__0_0.distcp")
    (error,) = ranks.run(refusal, Layout(), arguments)
    assert "checkpoint 2 is damaged: __0_0.distcp is not what was written: its checksum differs" in error
    assert "--ckpt-step takes another one (there are 1, 2)" in error
    assert ranks.run(steps_in_words, Layout(), [*arguments, "--ckpt-step=1"]) == [(1, [])]


def test_a_checkpoint_without_checksums_is_loaded_with_a_line(ranks, saved, copy):
    (iteration_folder(copy, 2) / MANIFEST).unlink()
    ((step, warnings),) = ranks.run(steps_in_words, Layout(), [*saved[1], f"--load={copy}"])
    assert step == 2
    assert [warning for warning in warnings if "has no manifest.json: its files are not verified" in warning]


def test_a_newer_checkpoint_than_the_tracker_names_is_named(copy, caplog):
    """The tracker has nothing but digits: spoilt ones may name an older checkpoint."""
    (copy / TRACKER).write_text("1")
    assert checked_checkpoint(copy)[0] == 1
    assert f"{TRACKER} names checkpoint 1, but checkpoint 2 is there too" in caplog.text


OUTSIDE = json.dumps({"files": {"../../x": {"bytes": 1, "sha256": ""}}}) + "\n"
UNREADABLE = [
    (SETTINGS, "", r"cannot be read \(Expecting value"),
    (SETTINGS, '{"model": 3}', "expected one object for each section"),
    *((TRACKER, text, "expected the number of a checkpoint") for text in ("", "x", "1" * 500, "²", "-1", "\0")),
    *((MANIFEST, text, "is no list of files") for text in ("[]", "{", OUTSIDE, "[" * 100_000)),
]


@pytest.mark.parametrize(("name", "content", "reason"), UNREADABLE, ids=range(len(UNREADABLE)))
def test_a_file_that_cannot_be_read_is_one_error(copy, name, content, reason):
    folder = iteration_folder(copy, 2)
    (copy / name if name == TRACKER else folder / name).write_text(content)
    with pytest.raises(ValueError, match=rf"{name}.*{reason}"):
        checkpoint_settings(folder) if name == SETTINGS else checked_checkpoint(copy, checksums=False)
