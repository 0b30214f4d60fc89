"""The picture of a run: what it shows of runs of every kind, and that nothing in it lies over anything else."""

import itertools
import json
import math

import pytest

from megatron_rc.launch.training.reporting.picture import draw_run, figure_of
from megatron_rc.launch.training.reporting.series import usual_names
from megatron_rc.launch.training.reporting.terminal import line

PREFIX = "rollout_corr/"


def run(steps=60, scale=1.0, weights=True, rejection=True, evaluations=0):
    """Rows as a run writes them."""
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "reward/mean": scale * step / steps, f"{PREFIX}kl": 1e-3 / step, f"{PREFIX}k3_kl": 1e-3}
        row |= {
            f"{PREFIX}log_ratio_p{percent}": (int(percent) - 50) / 100 for percent in ("01", "25", "50", "75", "99")
        }
        if weights:
            row |= {f"{PREFIX}rollout_is_eff_sample_size": 0.9}
            row |= {f"{PREFIX}rollout_is_raw_{name}": value for name, value in RAW.items()}
        if rejection:
            row |= {f"{PREFIX}rollout_rs_masked_fraction": 0.05}
        rows.append(row)
        if evaluations and step % evaluations == 0:
            rows.append({"step": step, "eval/exact_match": 0.5, "eval/reward": 0.4} | PASSED)
    return rows


PASSED = {"eval/pass@1": 0.5, "eval/pass@2": 0.6, "eval/pass@16": 0.9}
RAW = {"min": 0.5, "max": 1.5, "mean": 1.0, "std": 0.1}
RUNS = {
    "usual": run(),
    "evaluated": run(evaluations=10),
    "one-step": run(steps=1),
    "without-weights": run(weights=False),
    "without-rejection": run(rejection=False),
    "measured-alone": run(weights=False, rejection=False),
    "large-rewards": run(scale=-12345.678),
    "not-finite": [*run(steps=3), {"step": 4, "reward/mean": math.nan, f"{PREFIX}kl": math.inf}],
    "evaluation-alone": [{"step": 1, "eval/exact_match": 0.5}],
    "empty": [],
}


def labels(axis):
    return axis.get_legend_handles_labels()[1]


@pytest.mark.parametrize("name", RUNS)
def test_nothing_lies_over_anything_else(name):
    """Names, titles, labels and the numbers at the axes, of all four parts."""
    figure = figure_of(RUNS[name], "a_run_with_a_long_name_0.9_1.1")
    figure.draw_without_rendering()
    texts = [figure._suptitle]
    for axis in figure.axes:
        low, high = axis.get_ylim()
        assert low < high
        # Numbers outside the limits have places too, and are not drawn.
        numbers = [tick.label1 for tick in axis.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
        texts += [axis.title, axis.xaxis.label, axis.yaxis.offsetText, *numbers]
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts if text.get_text()]
    assert len(boxes) > 20
    for (one, here), (other, there) in itertools.combinations(boxes, 2):
        assert not here.overlaps(there), (one, other)
    assert all(figure.bbox.containsx(box.x0) and figure.bbox.containsx(box.x1) for _, box in boxes)


def test_what_each_part_shows():
    reward, kl, shares, weights = figure_of(RUNS["evaluated"], "sums").axes
    right = ["right answers, held out", "mean reward, held out", "right in 16 tries, held out"]
    assert labels(reward) == ["mean reward", *right]
    assert labels(kl) == ["KL", "k3"]
    assert labels(shares) == ["ESS", "rejected tokens"]
    assert labels(weights) == ["smallest to largest", "mean ± std"]
    assert [list(line.get_ydata()[:2]) for line in shares.lines] == [[0.9, 0.9], [0.05, 0.05]]
    assert list(reward.lines[1].get_xdata()) == [10, 20, 30, 40, 50, 60]
    # Runs without weights show the ratios, and name missing measurements.
    weights = figure_of(RUNS["without-weights"], "sums").axes[3]
    assert weights.get_title() == "Ratios of tokens, log ρ"
    assert [line.get_ydata()[0] for line in weights.lines] == [-0.49, -0.25, 0, 0.25, 0.49]
    shares = figure_of(RUNS["measured-alone"], "sums").axes[2]
    assert [text.get_text() for text in shares.texts] == ["nothing measured"]


@pytest.mark.parametrize(("rewards", "curves"), [([0.25, 0.5], 0), ([0.25, 0.5 + 1e-12], 0), ([0.25, 0.625], 1)])
def test_a_held_out_reward_that_is_the_share_of_right_answers_is_drawn_once(rewards, curves):
    rows = [
        {"step": step, "eval/reward": reward, "eval/exact_match": right}
        for step, (reward, right) in enumerate(zip(rewards, [0.25, 0.5], strict=True))
    ]
    drawn = labels(figure_of([*rows, {"step": 3, "reward/mean": 0.5}], "sums").axes[0])
    assert drawn.count("right answers, held out") == 1
    assert drawn.count("mean reward, held out") == curves


def test_the_name_is_no_formula(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in RUNS["usual"]))
    draw_run(tmp_path, "a $ run_of $\\x")
    assert (tmp_path / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert figure_of([], "a $ run")._suptitle.get_text() == "a $ run"


@pytest.mark.parametrize(
    ("values", "limits"),
    [
        ([0.0, 0.4, 0.9], (-0.02, 1.02)),
        ([0.01, 0.05], (-0.0025, 0.052)),
        ([-1.0, 1.0], (-1.1, 1.1)),
        ([math.nan, 2.0, 4.0, math.inf], (1.9, 4.1)),
    ],
)
def test_the_reward_axis_fits_the_data(values, limits):
    rows = [{"step": step, "reward/mean": value} for step, value in enumerate(values)]
    assert figure_of(rows, "sums").axes[0].get_ylim() == pytest.approx(limits)


@pytest.mark.parametrize(
    ("prefix", "kl"), [("mismatch/", "mismatch/mismatch_kl"), ("own/", "own/kl"), (PREFIX, f"{PREFIX}kl")]
)
def test_metrics_under_another_prefix_are_shown(prefix, kl):
    row = {"reward/mean": 0.5, kl: 0.25, f"{prefix}rollout_is_eff_sample_size": 0.75}
    words = line(1, 2, usual_names(row, prefix), seconds=1.0, left=1.0, columns=100)
    assert words.split()[:5] == ["1/2", "0.5", "0.25", "0.750", "-"]
