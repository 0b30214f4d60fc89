"""An objective that is added as CONTRIBUTING says: one object. Everything else follows."""

import argparse
import dataclasses

import pytest
import torch

from examples.custom_objective import GOOD_ONLY as GOOD
from megatron_rc import (
    PolicyLossConfig,
    RolloutCorrectionConfig,
    add_rollout_correction_args,
    policy_loss,
    policy_loss_config_from_args,
    rollout_correction_config_from_args,
)
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.loss.objectives import OBJECTIVES, Objective, TokenLoss, define


def tight(terms):
    """The ratio clipped to [1 - low, 1], which nothing else does."""
    ratio, _ = terms.ratios()
    clipped = ratio.clamp(1 - terms.clip_low, 1)
    return TokenLoss(-terms.advantages * clipped, low=ratio < clipped, high=ratio > clipped)


TIGHT = Objective(
    "tight", "no ratio above 1", tight, weighed_in_bypass=False, by_sequence=True, clips=True, takes_dual_clip=False
)


@pytest.fixture(autouse=True)
def added():
    """What a line each at the end of ``loss/objectives.py`` would do."""
    define(GOOD, TIGHT)
    yield
    del OBJECTIVES["good_only"], OBJECTIVES["tight"]


def draw():
    """(log π_θ, log π_rollout, advantages, mask)."""
    generator = torch.Generator().manual_seed(0)
    rollout = -2 * torch.rand(4, 6, generator=generator, dtype=torch.float64) - 1
    theta = rollout + 0.5 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 6, generator=generator) < 0.8
    return theta, rollout, torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64), mask


def test_flags_and_words_know_it():
    parser = add_rollout_correction_args(argparse.ArgumentParser(exit_on_error=False))
    assert "good_only" in " ".join(parser.format_help().split())
    arguments = ["--rollout-correction-preset=pg_is", "--loss-type=good_only"]
    config = rollout_correction_config_from_args(parser.parse_args(arguments))
    assert (config.loss_type, config.applies_weights) == ("good_only", True)
    assert "positive advantage" in config.describe().splitlines()[0]
    assert policy_loss_config_from_args(argparse.Namespace(policy_loss="tight")).algorithm == "tight"
    launcher = " ".join(build_parser().format_help().split())
    assert f"{{{','.join(OBJECTIVES)}}}" in launcher
    assert list(OBJECTIVES)[-2:] == ["good_only", "tight"]
    for make in (lambda: PolicyLossConfig(algorithm="tighter"), lambda: RolloutCorrectionConfig(loss_type="tighter")):
        with pytest.raises(ValueError, match=r"='tighter' is unknown: use one of .*good_only, tight"):
            make()


def test_what_it_takes_is_asked_of_it():
    with pytest.raises(ValueError, match=r"dual_clip=3\.0 does nothing with algorithm='good_only'"):
        PolicyLossConfig(algorithm="good_only", dual_clip=3.0)
    assert not RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="tight").applies_weights
    normalised = {"rollout_is": "token", "rollout_is_batch_normalize": True, "bypass_mode": True}
    assert RolloutCorrectionConfig(**normalised, loss_type="good_only").applies_weights
    with pytest.raises(ValueError, match=r"applies no weights: drop it, or use loss_type=.*'good_only'"):
        RolloutCorrectionConfig(**normalised, loss_type="tight")


def test_one_of_sequences_that_clips_is_measured():
    theta, old, advantages, mask = draw()
    objective = policy_loss(theta, old, advantages, mask, algorithm="tight", clip_low=0.1)
    mean = torch.where(mask, theta - old, 0).sum(1, keepdim=True) / mask.sum(1, keepdim=True)
    ratio = mean.exp().expand(4, 6)
    want = torch.where(mask, -advantages.unsqueeze(1) * ratio.clamp(0.9, 1), 0.0)
    torch.testing.assert_close(objective.per_token, want, rtol=1e-9, atol=1e-12)
    sums = objective.statistics.sums.tolist()
    assert sums[3:6] == [float((mask & (ratio < 0.9)).sum()), float((mask & (ratio > 1)).sum()), 0.0]
    assert sum(sums[3:5]) > 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"name": "Good Only"}, "name"),
        ({"weighed_in_bypass": None}, "weighed_in_bypass"),
        ({"clips": True}, "clips=True"),
        ({"loss": tight}, "clips=False"),
        ({"loss": lambda terms: TokenLoss((terms.log_probs + 1).abs().sqrt())}, "gradient"),
        ({"loss": lambda terms: terms.log_probs}, "TokenLoss"),
    ],
)
def test_one_that_does_not_fit_together_cannot_be_defined(changed, named):
    with pytest.raises(ValueError, match=f"objective '.*{named}"):
        dataclasses.replace(GOOD, **changed)


def test_one_of_whole_sequences_says_so():
    """Else its slices would not be compared with the CP group."""

    def centred(terms):
        return TokenLoss(-terms.advantages * (terms.log_probs - terms.sequences.mean(terms.log_probs)))

    with pytest.raises(ValueError, match="define the objective with whole_sequences=True"):
        dataclasses.replace(GOOD, loss=centred)
    dataclasses.replace(GOOD, loss=centred, whole_sequences=True)


def test_a_name_stands_for_one_objective():
    with pytest.raises(ValueError, match="'tight' is defined already"):
        define(TIGHT)
