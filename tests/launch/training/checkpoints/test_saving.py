"""Saving: in the background, on a full disk, by a rank that dies, and what stays of older checkpoints."""

import errno
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from megatron_rc.launch.checkpoint_folders import TRACKER, iteration_folder, iterations
from megatron_rc.launch.training.checkpoints import save as saving
from megatron_rc.launch.training.checkpoints.checksums import MANIFEST
from megatron_rc.launch.training.checkpoints.find import checked_checkpoint
from tests.support.forked import launch_forked
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags, make_trainer, recorded_batch, share
from tests.support.runs import finish
from tests.support.training_runs import LIVE, agreed, equal, rows, run_training, small_files, weights_of, without_times

SMALL = ["--num-layers=2", "--lr=1e-3", "--micro-batch-size=8"]
TWO = Layout(tp=2)


def steps(words, count=1, save=True):
    """Train and save; return the step that was reached and the numbers of the optimizer."""
    trainer = make_trainer(words)
    for index in range(count):
        trainer.update(trainer.prepare(share(trainer, index)), 0)
        if save:
            trainer.save()
    group = trainer.optimizer.param_groups[0]
    return trainer.iteration, [group["lr"], group.get("betas"), group.get("eps"), group["weight_decay"]]


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def save_where_it_is_full(words):
    """Save, then try again on a disk that fills up in one file after the other; return the errors."""
    trainer = make_trainer(words)
    save = Path(trainer.config.checkpoints.save)
    trainer.save()
    sizes = {path.name: path.stat().st_size for path in save.rglob("*") if path.is_file()}
    before = content_of(save)
    errors = []
    # Since megatron-core 0.19 what is common to all ranks lies with the rest.
    names = [name for name in ("common.pt", MANIFEST, ".metadata", "__0_0.distcp") if name in sizes]
    for name in names:
        with small_files(sizes[name] - 1), pytest.raises(saving.SaveError) as failure:
            trainer.save()
        errors.append(str(failure.value))
        torch.distributed.barrier()
        assert content_of(save) == before
    assert len(names) >= 3
    return errors


def test_a_full_disk_is_one_sentence_on_all_ranks_and_harms_nothing(ranks, tmp_path):
    """Wherever it strikes: in the weights, in what rank 0 writes alone, in the checksums."""
    arguments = flags(tmp_path, *SMALL, f"--save={tmp_path}/save", *TWO.flags())
    for error in agreed(ranks.run(save_where_it_is_full, TWO, arguments)):
        assert error.startswith(f"--save {tmp_path}/save: checkpoint 0 could not be written (")
        assert "File too large" in error or "a file could not be written, as on a full disk" in error

    # Every file of the checkpoint has a checksum.
    names = {path.name for path in iteration_folder(tmp_path / "save", 0).iterdir()}
    listed = (iteration_folder(tmp_path / "save", 0) / MANIFEST).read_text()
    assert {"metadata.json", ".metadata", "__0_0.distcp", "__1_0.distcp", "settings.json", "progress.json"} <= names
    assert [name for name in names if name != MANIFEST and f'"{name}"' not in listed] == []


def test_older_checkpoints_go_but_for_every_mth(ranks, tmp_path):
    arguments = flags(tmp_path, *SMALL, f"--save={tmp_path}/save", "--save-interval=1", "--grpo-iterations=1")
    (tmp_path / "save" / "iter_0000003.partial").mkdir(parents=True)
    ((reached, _),) = ranks.run(steps, Layout(), [*arguments, "--keep-last=2", "--save-retain-interval=2"], 4)
    assert reached == 4
    assert iterations(tmp_path / "save") == [2, 3, 4]
    assert (tmp_path / "save" / TRACKER).read_text() == "4"
    assert len(list((tmp_path / "save").iterdir())) == 4


def poisoned_step(words):
    """Make one good step, then one whose gradient is NaN on rank 0, and save.

    Returns:
        Whether the second step moved nothing, its error, the number of steps, and the error of the save.
    """
    trainer = make_trainer(words)
    trainer.update(trainer.prepare(share(trainer, 0)), 0)
    weights = weights_of(trainer.chunks)
    accumulate = trainer.accumulate

    def poison(prepared, mini_batch):
        metrics = accumulate(prepared, mini_batch)
        if torch.distributed.get_rank() == 0:
            for parameter in trainer.chunks[0].parameters():
                parameter.main_grad.fill_(math.nan)
        return metrics

    trainer.accumulate = poison
    step_error = save_error = None
    try:
        trainer.update(trainer.prepare(share(trainer, 1)), 0)
    except RuntimeError as error:
        step_error = str(error)
    is_same = equal(weights, weights_of(trainer.chunks))
    try:
        trainer.save()
    except RuntimeError as error:
        save_error = str(error)
    return is_same, step_error, trainer.iteration, save_error


@pytest.mark.parametrize(
    ("layout", "more"),
    [(Layout(pp=2), []), (Layout(tp=2), ["--clip-grad=0"]), (Layout(dp=2), ["--use-distributed-optimizer"])],
    ids=["pp2", "tp2-unclipped", "dp2-distributed"],
)
def test_a_gradient_that_is_not_finite_is_not_stepped_on(ranks, tmp_path, layout, more):
    """The loss is finite; one rank has the bad number."""
    arguments = flags(tmp_path, *SMALL, *more, *layout.flags(), f"--save={tmp_path}/save")
    results = ranks.run(poisoned_step, layout, arguments)
    is_same, step_error, reached, save_error = agreed(results)
    assert is_same
    assert step_error.startswith("the gradient norm of step 2 is nan: the step was not made")
    assert (reached, save_error) == (1, None)


def test_a_model_with_a_bad_weight_is_never_saved(ranks, tmp_path):
    arguments = flags(tmp_path, *SMALL, f"--save={tmp_path}/save", "--no-check-for-nan-in-loss-and-grad")
    ((_, step_error, reached, save_error),) = ranks.run(poisoned_step, Layout(), arguments)
    assert (step_error, reached) == (None, 2)
    assert "is not finite after step 2: this model is not saved" in save_error
    assert iterations(tmp_path / "save") == []


def save_in_background(words):
    """Begin to save, train on until it is saved; return whether the checkpoint has the weights of its beginning."""
    trainer = make_trainer(words)
    trainer.save()
    weights_then = weights_of(trainer.chunks)
    trainer.update(trainer.prepare(recorded_batch(0)), 0)
    assert not equal(weights_then, weights_of(trainer.chunks))
    while trainer.writer.pending is not None:
        trainer.writer.look()
        time.sleep(0.01)
    torch.distributed.barrier()  # rank 0 gives the name
    again = make_trainer([*words, f"--load={trainer.config.checkpoints.save}"])
    return again.iteration, equal(weights_then, weights_of(again.chunks))


def test_a_background_save_has_the_weights_of_its_beginning(ranks, tmp_path):
    arguments = flags(tmp_path, *SMALL, f"--save={tmp_path}/save", "--save-interval=2", "--async-save", *TWO.flags())
    assert ranks.run(save_in_background, TWO, arguments) == [(0, True)] * 2


def run_where_it_is_full_for_a_while(words):
    """A run whose last rank has no room for the first checkpoint."""
    write = FileSystemWriter.write_data
    is_last_rank = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def full(writer, plan, planner):
        if "iter_0000001" in str(writer.path) and is_last_rank:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(writer.path))
        return write(writer, plan, planner)

    with mock.patch.object(FileSystemWriter, "write_data", full):
        return run_training(words)


def test_a_save_that_fails_on_the_way_ends_the_run(ranks, tmp_path):
    layout = Layout(dp=2)
    arguments = [*LIVE, *layout.flags(), f"--save={tmp_path}/save", "--save-interval=1", "--train-iters=2"]
    error = agreed(ranks.run(run_where_it_is_full_for_a_while, layout, flags(tmp_path, *arguments)))
    assert error.startswith(f"SaveError: --save {tmp_path}/save: checkpoint 1 could not be written (")
    assert [row["step"] for row in rows(tmp_path)] == [1]
    assert iterations(tmp_path / "save") == []


def test_a_save_that_fails_on_the_way_does_not_end_a_run_that_continues(ranks, tmp_path):
    """On one rank, which all hear of; in the background as well, where the failure is found later."""
    layout = Layout(dp=2)
    for more in ([], ["--async-save"]):
        folder = tmp_path / f"save{len(more)}"
        arguments = [*LIVE, *layout.flags(), f"--save={folder}", "--save-interval=1", "--train-iters=2"]
        arguments += ["--continue-after-failed-save", *more]
        run_folder = tmp_path / str(len(more))
        assert ranks.run(run_where_it_is_full_for_a_while, layout, flags(run_folder, *arguments)) == [None, None]
        assert iterations(folder) == [2]


def save_in_folder_of_rank(words, folder):
    """Save as on machines that do not share ``--save``; return the error."""
    trainer = make_trainer([*words, f"--save={folder}/{torch.distributed.get_rank()}"])
    with pytest.raises(saving.SaveError) as failure:
        trainer.save()
    torch.distributed.barrier()
    return str(failure.value)


def test_a_folder_that_the_machines_do_not_share_is_refused(ranks, tmp_path):
    """A checkpoint of which each machine has a part could not be loaded."""
    errors = ranks.run(save_in_folder_of_rank, TWO, flags(tmp_path, *SMALL, *TWO.flags()), str(tmp_path))
    for error in errors:
        assert "rank 0 does not see __1_0.distcp of another rank: give a folder that all machines share" in error
    assert iterations(tmp_path / "0") == []


def save_without_memory(words):
    """Save where rank 1 has no memory for its state, before the ranks compare theirs."""
    trainer = make_trainer(words)
    state = saving.Kept.state

    def state_of_rank(kept, **options):
        if torch.distributed.get_rank() == 1:
            raise MemoryError("no memory for the state")
        return state(kept, **options)

    with mock.patch.object(saving.Kept, "state", state_of_rank):
        trainer.save()


def test_a_rank_that_cannot_make_its_state_ends_at_once(ranks, tmp_path):
    """Rather than when the other rank's wait for it is over, with an error of that wait."""
    began = time.monotonic()
    with pytest.raises(RankFailure, match="MemoryError: no memory for the state"):
        ranks.run(save_without_memory, TWO, flags(tmp_path, *SMALL, f"--save={tmp_path}/save", *TWO.flags()))
    assert time.monotonic() - began < 40


def stand_still(writer, plan, planner):
    """Write nothing for longer than the test waits."""
    time.sleep(30)


def save_where_a_file_stands_still(words):
    """Save to a file system that does not answer; return the error and the seconds until it came."""
    trainer = make_trainer(words)
    trainer.writer._timeout = timedelta(seconds=1)
    began = time.monotonic()
    with (
        mock.patch.object(FileSystemWriter, "write_data", stand_still),
        mock.patch.object(saving, "_GRACE_SECONDS", 1.0),
        pytest.raises(saving.SaveError) as failure,
    ):
        trainer.save()
    return str(failure.value), time.monotonic() - began


def test_a_file_system_that_stands_still_ends_the_save(ranks, tmp_path):
    arguments = flags(tmp_path, *SMALL, f"--save={tmp_path}/save")
    ((error, seconds),) = ranks.run(save_where_a_file_stands_still, Layout(), arguments)
    assert "the writing of checkpoint 0 has stood still" in error
    assert "--distributed-timeout-minutes" in error
    assert seconds < 15


@pytest.mark.processes
def test_a_rank_that_dies_while_saving_loses_nothing_that_was_saved(ranks, tmp_path):
    """Its half checkpoint is ignored by the next start, which takes the steps of a run that nobody killed."""
    folder = tmp_path / "save"
    arguments = [*LIVE, *TWO.flags(), "--train-iters=2"]
    files = [f"--save={folder}", f"--load={folder}", "--save-interval=1"]
    killed = ["--nproc-per-node=2", *flags(tmp_path / "killed", *arguments, *files)]
    code, _, errors = finish(launch_forked(tmp_path, killed, "tests.support.dies_while_saving"))
    assert code == 1, errors
    assert (folder / "iter_0000002.partial").is_dir()
    assert iterations(folder) == [1]
    assert checked_checkpoint(folder) == (1, iteration_folder(folder, 1))

    assert ranks.run(run_training, TWO, flags(tmp_path / "killed", *arguments, *files)) == [None, None]
    assert iterations(folder) == [1, 2]
    assert not (folder / "iter_0000002.partial").exists()
    assert ranks.run(run_training, TWO, flags(tmp_path / "whole", *arguments)) == [None, None]
    assert without_times(tmp_path / "killed") == without_times(tmp_path / "whole"), "to the last digit"
