"""Bounds by staleness: what the table means, by hand; what stands where nothing counts; what is refused."""

import dataclasses
import math

import pytest
import torch

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.parallel import ParallelGroups
from tests.support.correction_cases import clear_batch, sizes
from tests.support.correction_comparison import config_of, correct, numbers
from tests.support.recorded_training import flags, run_config

TABLE = "1:2,4:0.5"
MASK = torch.ones(1, 6, dtype=torch.bool)
ZEROS = torch.full((1, 6), -30.0, dtype=torch.float64)


def ratios(*values):
    """log π_train, where log π_rollout is ``ZEROS``."""
    return ZEROS + torch.tensor([values], dtype=torch.float64).log()


def at_ages(train, config, *ages):
    versions = 9 - torch.tensor([ages])
    return correct_rollouts(train, ZEROS, MASK, config, policy_versions=versions, current_version=9, max_staleness=9)


def test_token_weights_have_the_bound_of_their_own_age():
    config = RolloutCorrectionConfig(rollout_is="token", rollout_is_threshold=2.0, rollout_staleness_scale=TABLE)
    result = at_ages(ratios(9, 9, 9, 9, 9, 0.1), config, 0, 1, 3, 4, 9, 4)
    assert result.weights[0].tolist() == pytest.approx([2, 4, 4, math.sqrt(2), math.sqrt(2), 0.1])
    metrics = result.metrics()
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(4)
    assert metrics["rollout_corr/rollout_is_min"] == pytest.approx(0.1)


def test_token_criteria_have_the_bounds_of_their_own_age():
    fields = {"rollout_is": None, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2"}
    config = RolloutCorrectionConfig(**fields, rollout_staleness_scale=TABLE)
    result = at_ages(ratios(3, 3, 0.3, 0.3, 0.6, 1.3), config, 0, 1, 1, 0, 5, 5)
    assert result.mask[0].tolist() == [False, True, True, False, False, True]
    fields |= {"rollout_rs": "token_k2", "rollout_rs_threshold": 0.5}
    config = RolloutCorrectionConfig(**fields, rollout_staleness_scale=TABLE)
    log_ratio = torch.tensor([[0.9, 1.1, 1.3, 1.5, 0.6, 0.8]])
    assert at_ages(ZEROS + log_ratio, config, 0, 0, 2, 2, 4, 4).mask[0].tolist() == [True, False] * 3


@pytest.mark.parametrize(("ages", "kept"), [((0,) * 6, False), ((0, 0, 1, 0, 0, 0), True), ((4, 1, 0, 0, 0, 0), False)])
def test_a_sequence_is_as_old_as_its_oldest_token(ages, kept):
    fields = {"rollout_is": None, "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": 2.0}
    config = RolloutCorrectionConfig(**fields, rollout_staleness_scale=TABLE)
    assert at_ages(ratios(*[3] * 6), config, *ages).mask.tolist() == [[kept] * 6]


def test_tokens_that_do_not_count_have_no_age():
    """Versions in the padding may be anything, and a bad token's is not looked at."""
    batch, _ = clear_batch("token by staleness")
    versions = batch.sides["policy_versions"]
    for other in (-1000, 10**6):
        sides = batch.sides | {"policy_versions": torch.where(batch.mask, versions, other)}
        found, want = (correct("token by staleness", dataclasses.replace(batch, sides=s)) for s in (sides, batch.sides))
        assert torch.equal(numbers(found), numbers(want))
        assert torch.equal(found.mask, want.mask)
        assert torch.equal(found.weights, want.weights)


def test_a_table_that_nothing_reaches_changes_nothing():
    batch, _ = clear_batch("token by staleness")
    config, plain = (
        dataclasses.replace(config_of("token by staleness"), rollout_staleness_scale=table) for table in ("99:3", None)
    )
    found, want = (
        correct_rollouts(batch.train, batch.rollout, batch.mask, one, **batch.sides, **sizes(batch))
        for one in (config, plain)
    )
    assert torch.equal(found.mask, want.mask)
    torch.testing.assert_close(found.weights, want.weights, rtol=1e-14, atol=0)
    # Bounds by staleness have no quantiles of token weights.
    of_weights = {f"rollout_corr/rollout_is_p{percent}" for percent in (25, 50, 75)}
    wanted = {name: value for name, value in want.metrics().items() if name not in of_weights}
    assert found.metrics() == pytest.approx(wanted, rel=1e-12)


BASE = {"rollout_is": "token"}


@pytest.mark.parametrize(
    ("scale", "fields", "message"),
    [
        (2.0, {}, "must be a comma list of staleness:factor"),
        ("", {}, "must be a comma list of staleness:factor"),
        (TABLE, {"rollout_is": "prefix"}, "use the levels token, sequence or geometric"),
        (TABLE, {"rollout_is": "turn"}, "use the levels token, sequence or geometric"),
        (TABLE, {"rollout_rs": "turn_sum_k2", "rollout_rs_threshold": 1}, "turn_sum_k2 tests turns"),
        ("1:2,", {}, "'' is not staleness:factor"),
        ("1:2:3", {}, "'1:2:3' is not staleness:factor"),
        ("0:2", {}, "'0:2' must begin with a staleness of 1 or more"),
        ("1_0:2", {}, "'1_0:2' must begin"),
        ("1:0", {}, "the factor of '1:0' must be a finite positive number"),
        ("1:nan", {}, "the factor of '1:nan' must be"),
        ("4:2,1:1.5", {}, "each staleness once, in ascending order"),
        ("1:2", {"rollout_is": None}, "does nothing without bounds"),
        ("1:2", {"rollout_rs": "group_mean_k1", "rollout_rs_threshold": 2}, "'1:2': group_mean_k1"),
    ],
)
def test_tables_that_cannot_work_are_refused(scale, fields, message):
    with pytest.raises(ValueError, match=message) as caught:
        RolloutCorrectionConfig(**BASE | fields, rollout_staleness_scale=scale)
    assert str(caught.value).startswith("rollout_staleness_scale=")


def test_without_versions_it_is_an_error_on_every_stage():
    config = RolloutCorrectionConfig(**BASE, rollout_staleness_scale=TABLE)
    with pytest.raises(ValueError, match=r"needs the versions of the weights: pass policy_versions= and current_v"):
        correct_rollouts(ZEROS, ZEROS, MASK, config)
    bypass = dataclasses.replace(config, bypass_mode=True)
    for one in (config, bypass):
        correction = RolloutCorrection(one, ParallelGroups(), loss=PolicyLossConfig())
        with pytest.raises(ValueError, match="needs the versions of the weights"):
            correction.plan(PlanInputs(None if one.bypass_mode else ZEROS, ZEROS, MASK))


def test_a_table_in_words_in_files_and_as_a_flag(tmp_path):
    path = tmp_path / "correction.yaml"
    path.write_text("rollout_is: token\nrollout_staleness_scale: 1:0.8\n")
    config = RolloutCorrectionConfig.from_yaml(path)
    assert config.rollout_staleness_scale == "1:0.8"
    assert "in nats: times 0.8 from a staleness of 1 on" in config.describe()
    assert RolloutCorrectionConfig.from_dict(config.to_dict()) == config


def test_the_launcher_asks_for_rollouts_of_that_age(tmp_path):
    scale = "--rollout-staleness-scale=2:1.5,4:2"
    assert run_config(flags(tmp_path, scale, "--rollout-staleness=4")).correction.staleness_scale.steps == (2, 4)
    for limit in ([], ["--rollout-staleness=2"]):
        with pytest.raises(ConfigurationError, match=r"a staleness of 4, .*--rollout-staleness allows [02]:"):
            run_config(flags(tmp_path, scale, *limit))
    (tmp_path / "step-0000000-replica-0000.safetensors").touch()
    recorded = [f"--load-rollouts={tmp_path}", "--train-iters=2"]
    with pytest.raises(ConfigurationError, match="needs rollouts whose versions are steps of this run"):
        run_config(flags(tmp_path, scale, *recorded))
    run_config(flags(tmp_path, scale, *recorded, "--rollout-staleness=4"))
