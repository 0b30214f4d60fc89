"""Checkpoints on the ranks of the pool: what stands beside the weights, and what is found when it is read back."""

import dataclasses
import json

import pytest

from megatron_rc.launch.training.checkpoints.folders import iteration_folder
from megatron_rc.launch.training.checkpoints.settings import SETTINGS, checkpoint_settings
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config, save_initial


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """A folder with one checkpoint of a small model, and the flags that wrote it."""
    folder = tmp_path_factory.mktemp("saved")
    words = flags(folder, "--num-layers=2", f"--save={folder}/save")
    ranks.run(save_initial, Layout(), words)
    return folder / "save", words


def test_a_checkpoint_says_how_it_was_made(saved):
    folder, words = saved
    found, config = checkpoint_settings(folder), run_config(words)
    assert found["transformer"] == dataclasses.asdict(config.transformer)
    assert found["model"]["padded_vocab_size"] == config.model.padded_vocab_size
    assert found["experts"] is None
    assert found["task"]["tokenizer_type"] == config.task.tokenizer_type


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is missing: checkpoint 0 says nothing of its model"),
        ("", "cannot be read (Expecting value"),
        ("[" * 100_000, "cannot be read (maximum recursion depth"),
        ("[]", "expected one object for each section"),
        ('{"model": 3}', "expected one object for each section"),
        ('{"model": ' + "9" * 5000 + "}", "cannot be read (Exceeds the limit"),
    ],
)
def test_settings_that_cannot_be_read_are_one_error(saved, tmp_path, text, message):
    folder = iteration_folder(tmp_path, 0)
    folder.mkdir()
    (folder / "metadata.json").write_text(json.dumps({}))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("0")
    if text is not None:
        (folder / SETTINGS).write_text(text)
    with pytest.raises(ValueError, match=r"settings\.json") as error:
        checkpoint_settings(tmp_path)
    assert message in str(error.value)


def test_a_folder_without_checkpoints_has_no_settings(tmp_path):
    with pytest.raises(ValueError, match="holds no checkpoint"):
        checkpoint_settings(tmp_path)
