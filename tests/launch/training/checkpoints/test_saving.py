"""Saving where it cannot work, what is kept of older checkpoints, and going on with other flags than before."""

import contextlib
import errno
import math
import os
import signal
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

from megatron_rc.launch.checkpoint_folders import TRACKER, iterations
from megatron_rc.launch.training.checkpoints import background
from megatron_rc.launch.training.checkpoints.pieces import Pieces
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch, share
from tests.support.training_runs import LIVE, agreed, equal, rows, run_training, small_files, weights_of, without_times

SMALL = ["--num-layers=2", "--lr=1e-3", "--micro-batch-size=8"]


def steps(words, count=1, save=True):
    """Train and save; the step that was reached and the numbers of the optimizer."""
    trainer = make_trainer(words)
    for index in range(count):
        trainer.update(trainer.prepare(share(trainer, index)), 0)
        if save:
            trainer.save()
    group = trainer.optimizer.param_groups[0]
    return trainer.iteration, [group["lr"], group.get("betas"), group.get("eps"), group["weight_decay"]]


def save_where_it_is_full(words):
    """Saves, then tries again on a disk that fills up in one file after the other; what each attempt said."""
    trainer = make_trainer(words)
    save = Path(trainer.config.checkpoints.save)
    trainer.save()
    sizes = {path.name: path.stat().st_size for path in save.rglob("*") if path.is_file()}
    before, said = content_of(save), []
    # Since megatron-core 0.19 what is common to all ranks lies with the rest.
    names = [name for name in ("common.pt", "manifest.json", ".metadata", "__0_0.distcp") if name in sizes]
    for name in names:
        with small_files(sizes[name] - 1):
            try:
                trainer.save()
            except RuntimeError as error:
                said.append(f"{type(error).__name__}: {error}")
        torch.distributed.barrier()
        assert content_of(save) == before
    assert len(said) == len(names) >= 3
    return said


def content_of(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_full_disk_is_one_sentence_on_all_ranks_and_harms_nothing(ranks, tmp_path):
    """Wherever it strikes: in the weights, in what rank 0 writes alone, in the list of files."""
    layout = Layout(tp=2)
    words = flags(tmp_path, *SMALL, f"--save={tmp_path}/save", *layout.flags())
    said = agreed(ranks.run(save_where_it_is_full, layout, words))
    for error in said:
        assert error.startswith(f"SaveError: --save {tmp_path}/save: checkpoint 0 could not be written (")
        assert "File too large" in error


def test_older_checkpoints_go_but_for_every_mth(ranks, tmp_path):
    words = flags(tmp_path, *SMALL, f"--save={tmp_path}/save", "--save-interval=1", "--grpo-iterations=1")
    (tmp_path / "save" / "iter_0000003.partial").mkdir(parents=True)
    ((reached, _),) = ranks.run(steps, Layout(), [*words, "--keep-last=2", "--save-retain-interval=2"], 4)
    assert reached == 4
    assert iterations(tmp_path / "save") == [2, 3, 4]
    assert (tmp_path / "save" / TRACKER).read_text() == "4"
    assert sorted(path.name for path in (tmp_path / "save").iterdir())[-1] == TRACKER
    assert len(list((tmp_path / "save").iterdir())) == 4


def poisoned_step(words):
    """One good step, then one whose gradient is NaN on rank 0; whether anything moved, and what was said."""
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

    trainer.accumulate, said = poison, None
    try:
        trainer.update(trainer.prepare(share(trainer, 1)), 0)
    except RuntimeError as error:
        said = str(error)
    same, saved = equal(weights, weights_of(trainer.chunks)), None
    try:
        trainer.save()
    except RuntimeError as error:
        saved = str(error)
    return same, said, trainer.iteration, saved


@pytest.mark.parametrize(
    ("layout", "more"),
    [(Layout(pp=2), []), (Layout(tp=2), ["--clip-grad=0"]), (Layout(dp=2), ["--use-distributed-optimizer"])],
    ids=["pp2", "tp2-unclipped", "dp2-distributed"],
)
def test_a_gradient_that_is_not_finite_is_not_stepped_on(ranks, tmp_path, layout, more):
    """The loss is finite; one rank has the bad number."""
    words = flags(tmp_path, *SMALL, *more, *layout.flags(), f"--save={tmp_path}/save")
    found = ranks.run(poisoned_step, layout, words)
    for same, said, reached, saved in found:
        assert same
        assert said == found[0][1]
        assert said.startswith("the gradient norm of step 2 is nan: the step was not made")
        assert (reached, saved) == (1, None)


def test_a_model_with_a_bad_weight_is_never_saved(ranks, tmp_path):
    layout = Layout(pp=2)
    words = flags(tmp_path, *SMALL, *layout.flags(), f"--save={tmp_path}/save", "--no-check-for-nan-in-loss-and-grad")
    found = ranks.run(poisoned_step, layout, words)
    for _, said, reached, saved in found:
        assert (said, reached) == (None, 2)
        assert saved == found[0][3]
        assert "is not finite after step 2: this model is not saved" in saved
    assert iterations(tmp_path / "save") == []


def test_a_background_save_goes_on_like_one_in_the_foreground(ranks, tmp_path):
    """The weights of the step it began at, although training went on; the metrics say how long it was waited for."""
    layout, folder = Layout(tp=2), tmp_path / "save"
    words = [*LIVE, *layout.flags()]
    save = [f"--save={folder}", f"--load={folder}", "--save-interval=1"]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for place, more in (
        (whole, ["--train-iters=3"]),
        (broken, ["--train-iters=2", "--async-save", *save]),
        (broken, ["--train-iters=3", "--keep-last=2", *save]),
    ):
        assert ranks.run(run_training, layout, flags(place, *words, *more)) == [None, None]
    assert iterations(folder) == [2, 3]
    assert without_times(broken) == without_times(whole)
    assert [row["step"] for row in rows(broken) if "perf/save_seconds" in row] == [2]


def save_in_background(words, spoil):
    """Begins to save, trains on, and looks until it is saved; what was said, and whether the old weights are there."""
    trainer = make_trainer(words)
    # The process ends itself: from here a signal could come after its work.
    is_killed = spoil == "killed" and torch.distributed.get_rank() == 0
    with mock.patch.object(Pieces, "write", end) if is_killed else contextlib.nullcontext():
        trainer.save()
    then = weights_of(trainer.chunks)
    trainer.update(trainer.prepare(recorded_batch(0)), 0)
    assert not equal(then, weights_of(trainer.chunks))
    try:
        with small_files(300) if spoil == "full" else contextlib.nullcontext():
            for _ in range(12_000):
                trainer.writer.look()
                if trainer.writer.pending is None:
                    break
                time.sleep(0.01)
        assert trainer.writer.pending is None
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    again = make_trainer([*words, f"--load={trainer.config.checkpoints.save}"])
    return again.iteration, equal(then, weights_of(again.chunks))


def end(_):
    os.kill(os.getpid(), signal.SIGKILL)


def save_where_no_process_begins_on_rank_1(words):
    """What was said of the save, and what is still under way."""
    trainer, no_memory = make_trainer(words), OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
    failing = mock.patch.object(background.ForkProcess, "start", side_effect=no_memory)
    with failing if torch.distributed.get_rank() == 1 else contextlib.nullcontext():
        try:
            trainer.save()
        except RuntimeError as error:
            return str(error), trainer.writer.pending


def test_a_save_whose_process_cannot_begin_on_one_rank_fails_on_all(ranks, tmp_path):
    """The other rank ends its process."""
    layout, folder = Layout(tp=2), tmp_path / "save"
    words = flags(tmp_path, *SMALL, f"--save={folder}", "--save-interval=2", "--async-save", *layout.flags())
    said, pending = agreed(ranks.run(save_where_no_process_begins_on_rank_1, layout, words))
    assert f"--save {folder}: checkpoint 0 could not be written (Cannot allocate memory)" in said
    assert pending is None
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("spoil", [None, "killed", "full"])
def test_a_background_save_is_whole_or_an_error_on_all_ranks(ranks, tmp_path, spoil):
    layout, folder = Layout(tp=2), tmp_path / "save"
    words = flags(tmp_path, *SMALL, f"--save={folder}", "--save-interval=2", "--async-save", *layout.flags())
    said = agreed(ranks.run(save_in_background, layout, words, spoil))
    if spoil is None:
        assert said == (0, True)
    else:
        assert said.startswith(f"SaveError: --save {folder}: checkpoint 0 could not be written (")
        assert {"killed": "the process that wrote for rank 0 ended by SIGKILL", "full": "File too large"}[spoil] in said
        assert list(folder.iterdir()) == []


def test_a_save_that_fails_on_the_way_ends_the_run_or_not(ranks, tmp_path):
    """In the background as well, where the failure is found when the next checkpoint is due."""
    layout = Layout(dp=2)
    for more in ([], ["--continue-after-failed-save"], ["--continue-after-failed-save", "--async-save"]):
        folder = tmp_path / f"save{len(more)}"
        words = [*LIVE, *layout.flags(), f"--save={folder}", "--save-interval=1", "--train-iters=3", *more]
        first, second = ranks.run(run_where_it_is_full_for_a_while, layout, flags(tmp_path / str(len(more)), *words))
        assert first == second
        if more:
            assert first is None
            assert iterations(folder) == [2, 3]
        else:
            assert "SaveError: " in first
            assert "checkpoint 1 could not be written" in first
            assert iterations(folder) == []


def run_where_it_is_full_for_a_while(words):
    """A disk that is full at the first checkpoint."""
    write = Pieces.write

    def full(pieces):
        if pieces.folder.name.startswith("iter_0000001"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(pieces.folder))
        return write(pieces)

    with mock.patch.object(Pieces, "write", full):
        return run_training(words)
