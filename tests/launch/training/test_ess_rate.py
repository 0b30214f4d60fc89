"""The learning rate by the effective sample size of the responses: the same on every rank, for one step alone."""

import math

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.launch.errors import ConfigurationError
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, run_config, save_initial, share

LR = 0.02
SMALL = ("--num-layers=2", "--micro-batch-size=8")
ADVANCED = ("--lr-ess-scaling=sqrt", "--lr-ess-base=0.8", "--optimizer=sgd")
MODES = {
    "decoupled": (),
    "bypass": ("--rollout-is-threshold=8", "--bypass-mode", "--loss-type=reinforce"),
}


def ess_of(train, rollout, mask):
    """(Σ w)² / (n Σ w²) of w = Π ρ in loops."""
    weights = [
        math.exp(math.fsum(float(a[t]) - float(b[t]) for t in range(len(valid)) if valid[t]))
        for a, b, valid in zip(train, rollout, mask, strict=True)
        if any(valid)
    ]
    return math.fsum(weights) ** 2 / (len(weights) * math.fsum(weight * weight for weight in weights))


def two_steps(words):
    """On each rank: the steps' metrics, the rates between them, and the tokens that this rank scored first."""
    trainer = make_trainer(words)
    trainer.keeps_log_probs = True
    prepared = trainer.prepare(share(trainer, 0))
    steps = []
    local = prepared.batch.local
    for number in range(2):
        before = [parameter.detach().clone() for chunk in trainer.chunks for parameter in chunk.parameters()]
        metrics = trainer.update(prepared, 0).metrics
        after = [parameter.detach() for chunk in trainer.chunks for parameter in chunk.parameters()]
        metrics["moved"] = float(sum((a - b).square().sum() for a, b in zip(after, before, strict=True)).sqrt())
        metrics["next"] = {group["lr"] for group in trainer.optimizer.param_groups}
        if number == 0 and trainer.config.launch.world_size == 1:
            scored = torch.cat(trainer.kept_log_probs)
            metrics["ess"] = ess_of(scored, local.rollout_log_probs, local.response_mask)
        steps.append(metrics)
    return steps


@pytest.fixture(scope="module")
def start(ranks, tmp_path_factory):
    """Folder with the checkpoint that every layout starts from."""
    folder = tmp_path_factory.mktemp("rates")
    ranks.run(save_initial, Layout(), flags(folder, *SMALL, f"--save={folder}/first"))
    return folder


@pytest.mark.parametrize("mode", MODES)
def test_every_layout_has_the_rate_of_its_formula(ranks, start, mode):
    arguments = flags(start, *ADVANCED, *MODES[mode], *SMALL, f"--load={start}/first", "--finetune")
    (alone,) = ranks.run(two_steps, Layout(), arguments)
    first, second = alone
    assert first["lr_ess"] == pytest.approx(first["ess"], rel=1e-5)
    assert 0.02 < first["lr_ess"] < 0.75  # the rate is another one
    for step in alone:
        assert step["lr_ess_factor"] == pytest.approx(math.sqrt(step["lr_ess"] / 0.8), rel=1e-12)
        assert step["lr"] == pytest.approx(LR * step["lr_ess_factor"], rel=1e-12)
        assert step["next"] == {LR}  # schedule and checkpoints keep the rate
    # SGD's first step, before it has momentum.
    assert first["moved"] == pytest.approx(first["lr"] * min(1.0, first["grad_norm"]), rel=1e-4)
    # The plan is of the rollout batch, a correction in the loss of each step.
    assert (first["lr_ess"] == second["lr_ess"]) == (mode == "decoupled")
    for layout in (Layout(cp=2, pp=2), Layout(dp=2, tp=2)):
        for rank in ranks.run(two_steps, layout, [*arguments, *layout.flags()]):
            for got, want in zip(rank, alone, strict=True):
                assert got["next"] == {LR}
                for name in ("lr_ess", "lr_ess_factor", "lr"):
                    assert got[name] == pytest.approx(want[name], rel=1e-4), (layout, name)


def test_the_effective_sample_size_is_its_formula():
    generator = torch.Generator().manual_seed(1)
    rollout = -3 * torch.rand(9, 12, generator=generator, dtype=torch.float64) - 1
    train = rollout + 0.2 * torch.randn(9, 12, generator=generator, dtype=torch.float64)
    mask = torch.rand(9, 12, generator=generator) < 0.7
    mask[4] = False
    for fields in (
        {"rollout_is": None},
        {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 1.1},
    ):
        result = correct_rollouts(train, rollout, mask, RolloutCorrectionConfig(**fields))
        assert result.sequence_eff_sample_size == pytest.approx(ess_of(train, rollout, mask), rel=1e-12)
    same = correct_rollouts(rollout, rollout, mask, RolloutCorrectionConfig())
    assert same.sequence_eff_sample_size == pytest.approx(1, abs=1e-15)
    assert correct_rollouts(train, rollout, mask & False, RolloutCorrectionConfig()).sequence_eff_sample_size == 0


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_the_factor_lies_between_zero_and_one(tmp_path, rule, power):
    """Also for a size that rounding has made negative."""
    schedule = run_config(flags(tmp_path, f"--lr-ess-scaling={rule}", "--lr-ess-base=0.5"), engine=False).schedule
    for share_of_base, want in ((-0.7446, 0.0), (0.0, 0.0), (0.125, 0.25**power), (0.5, 1.0), (1.1, 1.0)):
        assert schedule.ess_factor(share_of_base) == pytest.approx(want, rel=1e-15)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lr-ess-scaling=cube"], "--lr-ess-scaling"),
        (["--lr-ess-scaling=sqrt", "--lr-ess-base=0"], "--lr-ess-base"),
        (["--lr-ess-scaling=sqrt", "--lr-ess-base=1.5"], "--lr-ess-base"),
    ],
)
def test_settings_that_mean_nothing_are_refused(tmp_path, words, message):
    with pytest.raises(ConfigurationError, match=message):
        run_config(flags(tmp_path, *words), engine=False)


def test_the_base_alone_does_nothing_and_is_named(tmp_path, caplog):
    config = run_config(flags(tmp_path, "--lr-ess-base=0.5"), engine=False)
    assert config.schedule == run_config(flags(tmp_path), engine=False).schedule
    assert "--lr-ess-base 0.5 (needs --lr-ess-scaling)" in caplog.text
