"""Bounds by staleness: tokens that do not count have no age; what is refused; the flag and the file."""

import dataclasses

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups
from tests.support.correction_cases import clear_batch
from tests.support.correction_comparison import correct, numbers
from tests.support.recorded_training import flags, run_config

TABLE = "1:2,4:0.5"
MASK = torch.ones(1, 6, dtype=torch.bool)
ZEROS = torch.full((1, 6), -30.0, dtype=torch.float64)


def test_tokens_that_do_not_count_have_no_age():
    """Versions in the padding may be anything, and a bad token's is not looked at."""
    batch, _ = clear_batch("token by staleness")
    versions = batch.sides["policy_versions"]
    for filler in (-1000, 10**6):
        sides = batch.sides | {"policy_versions": torch.where(batch.mask, versions, filler)}
        filled, want = (
            correct("token by staleness", dataclasses.replace(batch, sides=s)) for s in (sides, batch.sides)
        )
        assert torch.equal(numbers(filled), numbers(want))
        assert torch.equal(filled.mask, want.mask)
        assert torch.equal(filled.weights, want.weights)


BASE = {"rollout_is": "token"}


@pytest.mark.parametrize("scale", [2.0, "1:2,", "0:2", "1:nan", "4:2,1:1.5"])
def test_tables_that_cannot_be_read_are_refused(scale):
    with pytest.raises(ValueError, match=f"^rollout_staleness_scale={scale!r}"):
        RolloutCorrectionConfig(**BASE, rollout_staleness_scale=scale)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"rollout_is": None}, "rollout_is"),
        ({"rollout_is": "prefix"}, "prefix"),
        ({"rollout_rs": "turn_sum_k2", "rollout_rs_threshold": 1}, "turn_sum_k2"),
        ({"rollout_rs": "group_mean_k1", "rollout_rs_threshold": 2}, "group_mean_k1"),
    ],
)
def test_bounds_without_an_age_of_their_own_have_no_table(fields, named):
    with pytest.raises(ValueError, match=f"^rollout_staleness_scale={TABLE!r}.*{named}"):
        RolloutCorrectionConfig(**BASE | fields, rollout_staleness_scale=TABLE)


def test_without_versions_it_is_an_error_on_every_stage():
    config = RolloutCorrectionConfig(**BASE, rollout_staleness_scale=TABLE)
    with pytest.raises(ValueError, match=r"rollout_staleness_scale=.*policy_versions=.*current_version="):
        correct_rollouts(ZEROS, ZEROS, MASK, config)
    bypass = dataclasses.replace(config, bypass_mode=True)
    for config_of_mode in (config, bypass):
        correction = RolloutCorrection(config_of_mode, ParallelGroups(), loss=PolicyLossConfig())
        with pytest.raises(ValueError, match=r"rollout_staleness_scale=.*policy_versions="):
            correction.plan(PlanInputs(None if config_of_mode.bypass_mode else ZEROS, ZEROS, MASK))


def test_the_launcher_asks_for_rollouts_of_that_age(tmp_path):
    scale = "--rollout-staleness-scale=2:1.5,4:2"
    assert run_config(flags(tmp_path, scale, "--rollout-staleness=4")).correction.staleness_scale.steps == (2, 4)
    for limit in ([], ["--rollout-staleness=2"]):
        with pytest.raises(ConfigurationError, match=r"4.*--rollout-staleness"):
            run_config(flags(tmp_path, scale, *limit))
    (tmp_path / "step-0000000-replica-0000.safetensors").touch()
    recorded = [f"--load-rollouts={tmp_path}", "--train-iters=2"]
    with pytest.raises(ConfigurationError, match="--rollout-staleness-scale"):
        run_config(flags(tmp_path, scale, *recorded))
    run_config(flags(tmp_path, scale, *recorded, "--rollout-staleness=4"))
