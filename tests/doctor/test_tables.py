"""Rows of metrics: names that mean the same, rows in another order, and numbers that are none."""

import math

import pytest

from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.report import UNUSABLE
from megatron_rc.doctor.tables import own_row
from tests.doctor.test_inputs import write_lines
from tests.doctor.test_other_programs import k3_of, report_of, steps, write_csv
from tests.support.tables import table

TRL = "sampling/sampling_logp_difference/mean"

# -- Two names for one metric of ours.

# What else stands in the row of a metric, and must not replace it.
OTHER_PARTS = """
train/sampling/sampling_logp_difference/mean | eval/sampling/sampling_logp_difference/mean | abs_log_ratio
train/sampling/sampling_logp_difference/mean | test/sampling/sampling_logp_difference/mean | abs_log_ratio
train/token_mult_prob_error | validation/token_mult_prob_error | mult_prob_error
is_masked/mean | ref_kl/is_masked/mean | rollout_rs_masked_fraction
rollout_corr/k3_kl | eval/rollout_corr/k3_kl | k3_kl
my run - train/mis_k3_kl | my run - eval/mis_k3_kl | k3_kl
"""


@table("of_training other fact", OTHER_PARTS)
def test_evaluation_and_distillation_replace_no_metric_of_training(of_training, other, fact):
    assert own_row({of_training: 0.8, other: 0.1}, "") == {fact: 0.8}
    assert own_row({other: 0.1, of_training: 0.8}, "") == {fact: 0.8}
    assert own_row({other: 0.1}, "") == {}


def test_trls_evaluation_in_a_csv_and_on_tensorboard(tmp_path):
    """The engine is far off in training; the evaluation has other settings and is near."""
    from torch.utils.tensorboard import SummaryWriter

    rows = steps(10, **{f"train/{TRL}": 0.4, f"eval/{TRL}": 0.01})
    with SummaryWriter(str(tmp_path / "board")) as writer:
        for row in rows:
            for name in (f"train/{TRL}", f"eval/{TRL}"):
                writer.add_scalar(name, row[name], row["step"])
    for path in (write_csv(tmp_path / "m.csv", rows), tmp_path / "board"):
        report = report_of(path)
        assert [verdict["name"] for verdict in report["verdicts"]] == ["precision"]
        assert report["facts"]["abs_log_ratio"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("rollout_corr/k3_kl", "actor/rollout_corr/k3_kl"),
        ("a - rollout_corr/k3_kl", "b - rollout_corr/k3_kl"),
        ("train/mis_rs_mask_fraction_low", "other/mis_rs_mask_fraction_low"),
        ("a - mis_rs_mask_fraction_low", "b - mis_rs_mask_fraction_low"),
        ("math/is_masked/mean", "code/is_masked/mean"),
    ],
)
def test_two_names_of_one_metric_are_refused(tmp_path, capsys, first, second):
    """The last one of a row won before, or the two were added up."""
    for path in (
        write_csv(tmp_path / "m.csv", steps(3, **{first: 0.3, second: ""})),
        write_lines(tmp_path / "m.jsonl", steps(3, **{first: 0.3, second: 0.1})),
    ):
        assert main([str(path)]) == UNUSABLE
        message = capsys.readouterr().err
        assert message.startswith(str(path))
        assert repr(first) in message
        assert repr(second) in message


def test_of_two_names_of_a_metric_that_only_describes_the_run_the_first_counts():
    row = {"train/token_mult_prob_error": 1.01, "train/grad_norm": 1.0, "grad_norm": 2.0}
    assert own_row(row, "")["grad_norm"] == 1.0


def test_slimes_masks_by_weights_and_by_rejection_are_not_added_up():
    """``tis_mode: mask`` and ``use_rs`` with the same bounds reject the same tokens."""
    row = {f"train/mis_{kind}_mask_fraction_{side}": 0.15 for kind in ("tis", "rs") for side in ("low", "high")}
    assert own_row(row, "") == {"rollout_is_masked_fraction": 0.3, "rollout_rs_masked_fraction": 0.3}


# -- verl's comparison without a token.


@pytest.mark.parametrize("run", ["", "run-7 - "])
@pytest.mark.parametrize("invalid", [0, 0.0, "0", "0.0"])
def test_verls_invalid_comparison_is_left_out(run, invalid):
    row = {
        f"{run}training/rollout_probs_diff_valid": invalid,
        f"{run}training/rollout_probs_diff_mean": "NaN",
        f"{run}training/rollout_actor_probs_pearson_corr": 0.0,
        f"{run}critic/score/mean": 0.5,
    }
    assert own_row(row, "") == {"reward": 0.5}
    valid = own_row(row | {f"{run}training/rollout_probs_diff_valid": "1.0"}, "")
    assert valid.keys() == {"reward", "probs_diff_mean", "probs_correlation"}


def test_a_healthy_export_of_verl_with_invalid_steps(tmp_path):
    rows = [
        {
            "Step": step,
            "run-7 - training/rollout_probs_diff_valid": int(step % 5 > 0),
            "run-7 - training/rollout_probs_diff_mean": 0.002 if step % 5 else "NaN",
        }
        for step in range(20)
    ]
    report = report_of(write_csv(tmp_path / "m.csv", rows))
    assert report["exit_code"] == 0
    assert not report["notes"]


def test_a_run_in_which_verl_compared_nothing_is_unknown(tmp_path, capsys):
    names = ("training/rollout_probs_diff_valid", "training/rollout_probs_diff_mean")
    assert main([str(write_csv(tmp_path / "m.csv", steps(10, **dict.fromkeys(names, 0.0))))]) == UNUSABLE
    assert "rollout_probs_diff_valid is 0" in capsys.readouterr().err


# -- The order of the rows.

RISING = k3_of([1e-4 + 3e-4 * step for step in range(1, 61)])


@pytest.mark.parametrize(
    "key",
    [lambda step: -step, lambda step: str(step), lambda step: step * 37 % 61],
    ids=["newest first", "as text", "mixed"],
)
def test_rows_in_another_order_are_refused(tmp_path, capsys, key):
    """k3 rises to nine times its limit; read backwards the run begins far off and ends healthy."""
    rows = sorted(RISING, key=lambda row: key(row["step"]))
    assert main([str(write_lines(tmp_path / "m.jsonl", rows))]) == UNUSABLE
    assert "sort them" in capsys.readouterr().err
    assert main([str(write_lines(tmp_path / "m.jsonl", RISING))]) == 1


@pytest.mark.parametrize(
    "ranges",
    [
        (range(10, 400, 10), range(300, 500, 10), range(400, 600, 10), range(555, 1200, 5)),
        (range(10, 101, 10), range(81, 131)),
    ],
    ids=["often", "at other steps"],
)
def test_resumed_runs_are_in_order(tmp_path, ranges):
    """Each resume repeats steps; the last one logs at more of them."""
    rows = [{"step": step, "rollout_corr/k3_kl": 5e-4} for parts in ranges for step in parts]
    assert main([str(write_lines(tmp_path / "m.jsonl", rows))]) == 0


# -- NaN.


def test_a_share_that_is_nan_is_unknown(tmp_path):
    near = {"rollout_corr/k3_kl": 5e-4, "rollout_corr/rollout_rs_masked_fraction": 0.01}
    rows = [{"step": step, **near} for step in range(5)]
    rows += [{"step": step, **dict.fromkeys(near, math.nan)} for step in range(5, 30)]
    report = report_of(write_lines(tmp_path / "m.jsonl", rows))
    assert [verdict["name"] for verdict in report["verdicts"]] == ["precision"]
    assert "rollout_rs_masked_fraction" not in report["facts"]
    assert "inf%" not in str(report)
