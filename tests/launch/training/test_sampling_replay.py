"""Runs on truncated rollouts: the engine's kept tokens in the trainer, from the first token to the metrics."""

import pytest

from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags
from tests.support.training_runs import LIVE, rows, run_training

RUN = [*LIVE, "--train-iters=2", "--rollout-is=token", "--rollout-rs=none", "--init-method-std=0.3"]
RUN += ["--rollout-dtype=fp32", "--grpo-entropy-term-weight=0.1"]
NUCLEUS = ["--rollout-top-p=0.8", "--rollout-top-k=20"]


def outcome(ranks, folder, layout, *more):
    """(the run's only error or None, its metrics)."""
    arguments = flags(folder, *RUN, *more, *layout.flags())
    arguments = [word for word in arguments if not word.startswith("--rollout-rs-threshold")]
    (error,) = set(ranks.run(run_training, layout, arguments))
    return error, [] if error else rows(folder)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(), ["--rollout-min-p=0.05", "--grpo-kl-beta=0.01"]),
        (Layout(tp=2, sp=True), ["--fused-linear-log-probs"]),
        (Layout(pp=2), ["--bypass-mode", "--loss-type=reinforce"]),
        (Layout(cp=2, dp=2), ["--rl-use-sequence-packing"]),
    ],
    ids=str,
)
def test_equal_weights_give_equal_log_probs(ranks, tmp_path, layout, more):
    error, results = outcome(ranks, tmp_path, layout, *NUCLEUS, *more)
    assert error is None
    assert len(results) == 2
    for row in results:
        assert row["rollout_corr/k3_kl"] < 1e-7
        assert row["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert row["rollout/sync_error"] < 1e-4
        assert row["grad_norm"] > 0


def test_without_replay_the_check_of_the_engine_fails(ranks, tmp_path):
    """The trainer's log-probs are lower by the logarithm of the kept probability."""
    error, _ = outcome(ranks, tmp_path / "stopped", Layout(), *NUCLEUS, "--allow-truncated-sampling")
    assert "the rollout engine and the trainer disagree by" in error
    wide = ["--allow-truncated-sampling", "--rollout-check-tolerance=5"]
    error, results = outcome(ranks, tmp_path / "run", Layout(), *NUCLEUS, *wide)
    assert error is None
    assert all(0.6 < row["rollout_corr/rollout_is_mean"] < 0.97 for row in results)


def test_recorded_supports_train_as_the_sampled_ones_did(ranks, tmp_path):
    record = f"--save-rollouts={tmp_path}/rollouts"
    load = f"--load-rollouts={tmp_path}/rollouts"
    _, written = outcome(ranks, tmp_path / "first", Layout(), *NUCLEUS, record)
    error, read = outcome(ranks, tmp_path / "again", Layout(), *NUCLEUS, load)
    assert error is None
    for one, other in zip(written, read, strict=True):
        for name in ("loss/total", "grad_norm", "policy/entropy"):
            assert other[name] == pytest.approx(one[name], rel=1e-5, abs=1e-9), name
    with pytest.raises(RankFailure, match=r"were sampled at top_p 0\.8, --rollout-top-p is 1\.0: set it alike"):
        outcome(ranks, tmp_path / "other", Layout(dp=2), load)
