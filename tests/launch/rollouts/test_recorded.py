"""Rollouts on disk: which steps of a folder can be trained on again."""

import contextlib
import dataclasses

import pytest
import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rollouts.recorded import (
    RecordedRollouts,
    _check_split_rollouts,
    find_rollouts,
    write_rollouts,
)
from megatron_rc.records.rollout import FINISH_REASONS
from tests.fuzz.targets import example
from tests.support.recorded_training import flags, run_config


def written(folder, *files):
    for step, replica in files:
        batch = example()
        rows = batch.num_sequences
        batch = dataclasses.replace(
            batch, group_ids=torch.arange(rows) + rows * replica, rewards=torch.ones(rows) * step
        )
        write_rollouts(batch, folder, step, replica)
    return batch


def test_steps_that_a_replica_did_not_write_are_skipped(tmp_path, caplog):
    """A replica failed at step 1; of step 2, where the run was killed, a file is half written."""
    batch = written(tmp_path, (0, 0), (0, 1), (1, 1), (3, 0), (3, 1), (2, 0))
    (tmp_path / ".step-0000002-replica-0001.safetensors.0f").write_bytes(b"half")
    assert list(find_rollouts(tmp_path)) == [0, 3]
    rows, length = batch.tokens.shape
    recorded = RecordedRollouts(tmp_path, length, 2 * rows, 2 * rows)
    (message,) = caplog.messages
    assert message.startswith(f"--load-rollouts {tmp_path}: skipped steps 1, 2, ")
    assert [float(recorded.read(index, 0, 1).rewards[0]) for index in range(2)] == [0, 3]
    written(tmp_path, (2, 1), (1, 0))
    assert list(find_rollouts(tmp_path)) == [0, 1, 2, 3]
    assert len(list(tmp_path.iterdir())) == 8, "the half of a file is gone"
    caplog.clear()
    RecordedRollouts(tmp_path, length, 2 * rows, 2 * rows)
    assert not caplog.messages, "of a folder with all steps nothing is said"


def test_a_folder_without_a_whole_step_is_refused(tmp_path):
    written(tmp_path, (0, 1), (1, 0))
    with pytest.raises(ConfigurationError, match=r"no complete rollout batch: .* 2 replicas"):
        run_config(flags(tmp_path / "runs", f"--load-rollouts={tmp_path}", "--train-iters=2"))


def test_a_batch_without_a_token_is_refused(tmp_path):
    batch = example()
    rows, length = batch.tokens.shape
    aborted = dataclasses.replace(
        batch,
        group_ids=torch.zeros_like(batch.group_ids),
        response_mask=torch.zeros_like(batch.response_mask),
        finish_reasons=torch.full_like(batch.finish_reasons, FINISH_REASONS.index("abort")),
    )
    write_rollouts(aborted, tmp_path, 0, 0)
    with pytest.raises(ValueError, match=r"no response of the batch of step-0000000-\S+ has a token: remove it$"):
        RecordedRollouts(tmp_path, length, rows, 1).read(0, 0, 1)


@pytest.mark.parametrize(
    ("flag", "is_taken"),
    [
        ("--loss-aggregation=token-mean", True),
        ("--loss-aggregation=seq-mean-token-mean", False),
        ("--loss-aggregation=seq-mean-token-sum", False),
        ("--advantage-estimator=optimal-token-baseline", False),
        ("--advantage-estimator=rloo", True),
    ],
)
def test_a_flag_that_counts_each_row_of_a_rollout_is_refused(tmp_path, flag, is_taken):
    config = run_config(flags(tmp_path, flag), engine=False)
    batch = example()
    rows = torch.arange(batch.num_sequences)
    _check_split_rollouts(dataclasses.replace(batch, rollout_ids=rows), config)
    split = dataclasses.replace(batch, group_ids=torch.zeros_like(rows), rollout_ids=torch.zeros_like(rows))
    with contextlib.nullcontext() if is_taken else pytest.raises(ValueError, match=flag.replace("=", " ")):
        _check_split_rollouts(split, config)
