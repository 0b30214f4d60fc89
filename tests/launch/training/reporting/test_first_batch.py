"""The warning of a run whose geometric bounds reject most of its first batch."""

import math
import re

import pytest

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.launch.training.reporting.first_batch import warn_of_bounds
from megatron_rc.launch.training.reporting.reporter import Reporter
from tests.support.made_faults import Setting, made
from tests.support.recorded_training import flags, run_config

GEO = RolloutCorrectionConfig.decoupled_geo_rs()


def metrics_of(config):
    batch = made(None, 3, Setting(sequences=256, length=48, vocab=64))
    names = ("old_log_probs", "rollout_log_probs", "response_mask")
    return correct_rollouts(*(batch[name] for name in names), config).metrics()


def test_the_bounds_of_the_warning_reject_about_five_percent():
    metrics = metrics_of(GEO)
    assert metrics["rollout_corr/rollout_rs_seq_mean_k1_masked_fraction"] > 0.5
    warning = warn_of_bounds(metrics, GEO)
    assert "0.999_1.001" in warning
    assert "--rollout-rs-threshold" in warning
    (bounds,) = re.findall(r"; (\S+) would reject", warning)
    wider = RolloutCorrectionConfig.decoupled_geo_rs(bounds)
    results = metrics_of(wider)
    assert 0.02 < results["rollout_corr/rollout_rs_seq_mean_k1_seq_masked_fraction"] < 0.08
    assert warn_of_bounds(results, wider) is None
    assert warn_of_bounds({"rollout_corr/kl": 0.0}, RolloutCorrectionConfig.decoupled_token_is()) is None


@pytest.mark.parametrize(
    ("mean", "std"), [(-9990.0, 3.0), (0.0, 900.0), (9990.0, 0.5), (0.1, 0.0), (math.nan, math.nan)], ids=str
)
def test_policies_that_no_bounds_fit_get_none(mean, std):
    name = "rollout_corr/rollout_rs_seq_mean_k1"
    metrics = {f"{name}_masked_fraction": 0.9, f"{name}_seq_mean": mean, f"{name}_seq_std": std}
    warning = warn_of_bounds(metrics, GEO)
    assert "megatron_rc.doctor" in warning
    assert "would reject" not in warning


@pytest.mark.parametrize(("mean", "std"), [(3.9, 0.2), (-3.9, 0.2), (0.0, 2e-5), (2.0, 1.0)])
def test_proposed_bounds_can_be_given(mean, std):
    name = "rollout_corr/rollout_rs_seq_mean_k1"
    metrics = {f"{name}_masked_fraction": 0.9, f"{name}_seq_mean": mean, f"{name}_seq_std": std}
    (bounds,) = re.findall(r"; (\S+) would reject", warn_of_bounds(metrics, GEO))
    lower, upper = map(float, bounds.split("_"))
    assert math.log(lower) == pytest.approx(-mean - 1.96 * std, rel=0.1, abs=1e-6)
    assert math.log(upper) == pytest.approx(-mean + 1.96 * std, rel=0.1, abs=1e-6)
    RolloutCorrectionConfig.decoupled_geo_rs(bounds)


@pytest.mark.parametrize("iteration", [0, 2])
def test_a_run_warns_once_after_its_first_step(tmp_path, capsys, iteration):
    arguments = "--train-iters=4 --rollout-rs=seq_mean_k1 --rollout-rs-threshold=0.999_1.001 --metric-prefix=mine/"
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", *arguments.split())), iteration)
    metrics = {name.replace("rollout_corr/", "mine/"): value for name, value in metrics_of(GEO).items()}
    for step in (1, 2):
        reporter.step(iteration + step, metrics)
    reporter.close("finished")
    assert capsys.readouterr().err.count("warning: the bounds 0.999_1.001") == 1
