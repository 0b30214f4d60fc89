"""Where the responses of a run ended: equal on all ranks, and as the records and the losses of the run say."""

import dataclasses
import itertools
import math
from collections import defaultdict
from unittest import mock

import pytest
import torch

from megatron_rc.launch.rollouts.recorded import write_rollouts
from megatron_rc.records.rollout import FINISH_REASONS
from tests.support.ranks import Layout
from tests.support.recorded_training import SEQUENCES, flags, recorded_batch
from tests.support.training_runs import LIVE, agreed, rows, run_training

pytestmark = pytest.mark.ranks
LOW, HIGH, LIMIT = 0.5, 2.5, 0.45
BAD_STEP = 3
DROPPED = 9
MINI_BATCHES = 2


def recorded(index):
    """A recorded batch in which some responses were cut off, and one was dropped."""
    batch = recorded_batch(index)
    finish_reasons = torch.zeros(SEQUENCES, dtype=torch.int64)
    finish_reasons[[1, 7, 12]] = FINISH_REASONS.index("length")
    finish_reasons[DROPPED] = FINISH_REASONS.index("abort")
    is_dropped = torch.arange(SEQUENCES) == DROPPED
    mask = batch.response_mask & ~is_dropped.unsqueeze(1)
    return dataclasses.replace(batch, finish_reasons=finish_reasons, response_mask=mask)


def train(words):
    """A run in which the last rank has an infinite gradient in one step.

    Returns the account in this rank's rows; and for each token of this rank's losses the step, the sample and log ρ.
    """
    from megatron_rc.launch.training.loop import _Run
    from megatron_rc.launch.training.trainer import Trainer

    reported = []
    log_ratios = []
    loss = Trainer._loss
    accumulate = Trainer.accumulate
    report_step = _Run._report_step
    is_last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1

    def spoilt(trainer, *args):
        metrics = accumulate(trainer, *args)
        if is_last and trainer.iteration == BAD_STEP:
            next(iter(trainer.chunks[0].parameters())).main_grad.fill_(math.inf)
        return metrics

    def recorded_loss(trainer, scale, model, local, output):
        train = output[0].detach() if local.train_log_probs is None else local.train_log_probs
        log_ratio = train - local.rollout_log_probs
        samples = local.layout.expand(local.sequence_ids)
        mask = local.response_mask
        for sample, value in zip(samples[mask].tolist(), log_ratio[mask].tolist(), strict=True):
            log_ratios.append((trainer.iteration, sample, value))
        return loss(trainer, scale, model, local, output)

    def watched(run, row, outcome):
        reported.append({name: value for name, value in row.items() if name.startswith("selection/")})
        return report_step(run, row, outcome)

    with (
        mock.patch.object(Trainer, "accumulate", spoilt),
        mock.patch.object(Trainer, "_loss", recorded_loss),
        mock.patch.object(_Run, "_report_step", watched),
    ):
        assert run_training(words) is None
    return reported, log_ratios


def is_accepted(log_ratios, low=LOW, high=HIGH):
    """Whether a response of these log-ratios has an accepted token with a weight, by plain loops."""
    ratios = [math.exp(value) for value in log_ratios]
    terms = [ratio - 1 - value for ratio, value in zip(ratios, log_ratios, strict=True)]
    in_bounds = [low <= ratio <= high for ratio in ratios]
    return any(in_bounds) and sum(terms) / len(terms) <= LIMIT


@pytest.mark.parametrize(
    ("layout", "more", "bounds"),
    [
        (Layout(pp=2, dp=2), [], ()),
        (Layout(cp=2, dp=2), ["--rl-use-sequence-packing", "--bypass-mode"], ()),
        # Outside of these bounds a weight is 0.
        (Layout(dp=2), ["--rollout-is-mode=mask", "--rollout-is-threshold=0.9_1.1"], (0.9, 1.1)),
    ],
    ids=["decoupled", "bypass", "weights"],
)
def test_each_response_of_a_run_ends_in_one_place(ranks, tmp_path, layout, more, bounds):
    for index in range(2):
        write_rollouts(recorded(index), tmp_path / "given", 2 * index, 0)
    arguments = [
        *LIVE,
        *layout.flags(),
        "--global-batch-size=8",
        "--micro-batch-size=4",
        "--train-iters=4",
        "--lr=1e-3",
    ]
    arguments += [
        "--bad-steps=skip",
        "--overlong=mask",
        "--rollout-is-threshold=1.5",
        "--rollout-rs=token_k1,seq_mean_k3",
    ]
    arguments += [f"--rollout-rs-threshold={LOW}_{HIGH},{LIMIT}", f"--load-rollouts={tmp_path}/given"]
    arguments += ["--grpo-entropy-term-weight=0.1"]
    results = ranks.run(train, layout, flags(tmp_path, *arguments, *more))
    reported = agreed([rows_of_rank for rows_of_rank, _ in results])
    log_ratios = defaultdict(list)
    for step, sample, value in itertools.chain.from_iterable(of_rank for _, of_rank in results):
        log_ratios[step, sample].append(value)

    assert [len(row) for row in reported] == [0, len(reported[1]), 0, len(reported[1])]
    ends_seen = set()
    for index in range(2):
        step = MINI_BATCHES * index
        batch = recorded(index)
        expected = dict.fromkeys(("trained", "bad", "replaced", "overlong", "rejected", "skipped"), 0)
        for row in range(SEQUENCES):
            # Each replica has 8 rows, of which the first 4 are in the first mini-batch.
            step_of_row = step + row % 8 // 4
            if row == DROPPED:
                end = "bad"
            elif batch.finish_reasons[row] == FINISH_REASONS.index("length"):
                end = "overlong"
            elif step_of_row == BAD_STEP:
                end = "skipped"
            else:
                end = "trained" if is_accepted(log_ratios[step_of_row, row], *bounds) else "rejected"
            expected[end] += 1
        metrics = {name.removeprefix("selection/"): value for name, value in reported[step + 1].items()}
        assert {name: metrics[name] for name in expected} == expected
        assert (metrics["started"], metrics["finished"]) == (SEQUENCES, SEQUENCES - 1)
        assert metrics["inclusion"] == expected["trained"] / SEQUENCES
        ends_seen |= {name for name, count in expected.items() if count}
    assert ends_seen == {"trained", "bad", "overlong", "rejected", "skipped"}
    assert [name in row for row in rows(tmp_path) for name in ("selection/started",)] == [False, True, False, True]


@pytest.mark.parametrize(
    "rule",
    [
        ["--rollout-rs=token_k2", "--rollout-rs-threshold=1e-12"],
        ["--rollout-rs=token_k2", "--rollout-rs-threshold=1e-12", "--bypass-mode"],
        # A weight of 0 rejects too.
        [*("--rollout-is-mode=mask", "--rollout-is-threshold=0.999999_1.000001"), "--rollout-rs-threshold=9_9,9"],
    ],
    ids=["decoupled", "bypass", "weights"],
)
def test_a_step_without_an_accepted_token_rejects_its_responses(ranks, tmp_path, rule):
    write_rollouts(recorded(0), tmp_path / "given", 0, 0)
    arguments = [*LIVE, "--train-iters=1", f"--load-rollouts={tmp_path}/given", "--max-skipped-steps=9"]
    ranks.run(run_training, Layout(), flags(tmp_path, *arguments, *rule))
    (row,) = rows(tmp_path)
    ends = [row[f"selection/{name}"] for name in ("started", "bad", "rejected", "skipped", "trained")]
    assert ends == [16, 1, 15, 0, 0]
    assert row["selection/prompts_without"] == 1
