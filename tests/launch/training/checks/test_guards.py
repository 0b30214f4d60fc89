"""Conditions on metrics that end a run: how they are read, when they hold, and what the run then says."""

import pytest
import torch

from megatron_rc.launch.checkpoint_folders import iterations
from megatron_rc.launch.ending import GUARD, messages, messages_of_ranks
from megatron_rc.launch.errors import ConfigurationError, RunError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config.guards import Condition
from megatron_rc.launch.train_ppo import say_end
from megatron_rc.launch.training.checks.guards import Guards
from megatron_rc.launch.training.loop import train
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, rows

KL = "rollout_corr/k3_kl"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("rollout_corr/k3_kl > 0.5 for 5", (KL, ">", 0.5, 5)),
        ("grad_norm>=1e3", ("grad_norm", ">=", 1000.0, 1)),
        (" reward/mean<= -.5  for 2 ", ("reward/mean", "<=", -0.5, 2)),
        ("lr < +1e-8", ("lr", "<", 1e-8, 1)),
    ],
)
def test_conditions_are_read(text, parts):
    condition = Condition.parse(text)
    assert (condition.metric, condition.comparison, condition.limit, condition.steps) == parts
    assert condition.text == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{KL} = 0.5", "expected 'METRIC < NUMBER for STEPS', with <, <=, > or >="),
        (f"{KL} > 0.5 and lr < 1", "expected 'METRIC < NUMBER"),
        (f"{KL} > nan", "expected 'METRIC < NUMBER"),
        (f"{KL} > 0.5 for 0", "and 1 or more steps"),
        ("perf/save_seconds > 9", "does nothing without --save-interval: no step has perf/save_seconds"),
        ("perf/eval_seconds > 9", "does nothing without --eval-interval: no step has perf/eval_seconds"),
        ("eval/exact_match < 0.5", "reward/mean"),
    ],
)
def test_what_is_no_condition_is_refused_at_the_start(tmp_path, text, message):
    with pytest.raises(ConfigurationError, match=r"^--stop-if") as error:
        run_config(flags(tmp_path, "--stop-if", "lr < 1e-9", text))
    assert message in str(error.value)
    assert f"'{text}'" in str(error.value)


def test_a_flag_that_takes_several_values_may_be_repeated(tmp_path):
    config = run_config(flags(tmp_path, "--stop-if", "lr < 1", "--stop-if=lr > 2"))
    assert config.guards.stop_if == ("lr < 1", "lr > 2")


def verdicts(tmp_path, condition, values, metric=KL):
    guards = Guards(run_config(flags(tmp_path, "--stop-if", condition)))
    errors = [
        guards.step(step, {"grad_norm": 1.0, metric: value} if value is not None else {"lr": 0.1})
        for step, value in enumerate(values, start=1)
    ]
    return [None if error is None else str(error) for error in errors]


@pytest.mark.parametrize(
    ("values", "stops"),
    [
        ([0.6, 0.6, 0.6], [3]),
        ([0.6, 0.6, 0.5, 0.6, 0.6, 0.7], [6]),
        ([0.6, None, 0.6, 0.6], [4]),
        ([None, 0.6, float("nan"), float("inf")], [4]),
        ([0.6, 0.6], []),
    ],
    ids=str,
)
def test_a_condition_holds_in_so_many_steps_in_a_row(tmp_path, values, stops):
    """A step that was left out has no such metric: it neither counts nor begins anew."""
    sentences = verdicts(tmp_path, f"{KL} > 0.5 for 3", values)
    assert [step for step, sentence in enumerate(sentences, start=1) if sentence] == stops


@pytest.mark.parametrize(
    ("shares", "collapsed"), [((0.0, 0.0), True), ((0.5, 0.0), True), ((0.5, 0.25), False)], ids=str
)
def test_a_reward_that_falls_in_steps_without_signal_is_a_collapse(tmp_path, shares, collapsed):
    """Steps that were left out for that have no gradient, but rewards."""
    guards = Guards(run_config(flags(tmp_path, "--stop-if", "reward/mean < 0.05 for 2")))
    for step, share in enumerate(shares, start=1):
        error = guards.step(step, {"reward/mean": 0.0, "reward/nonzero_advantages": share})
    assert ("more prompts a step (--grpo-prompts-per-step)" in str(error)) == collapsed
    assert ("the policy gets worse: go on from an older checkpoint" in str(error)) != collapsed


# Metric, comparison and a word of the advice; a reward that is high enough is no policy that gets worse.
ADVICE = [
    (KL, ">=", "engine and trainer drift apart"),
    ("policy/reference_kl", "<", "the model that it began from"),
    ("rollout_corr/rollout_is_eff_sample_size", "<", "few tokens carry the weights"),
    ("rollout_corr/rollout_is_eff_sample_size", ">=", "see docs/metrics.md"),
    ("grad_norm", ">=", "lower --lr"),
    ("reward/mean", "<", "go on from an older checkpoint"),
    ("reward/mean", ">=", "see docs/metrics.md"),
    ("perf/tokens_per_second", "<", "see docs/metrics.md"),
]


@pytest.mark.parametrize(("metric", "comparison", "advice"), ADVICE)
def test_the_well_known_ones_have_advice_for_their_side(tmp_path, metric, comparison, advice):
    values = [0.1, 0.25] if comparison == "<" else [0.75, 0.5]
    *_, sentence = verdicts(tmp_path, f"{metric} {comparison} 0.5 for 2", values, metric)
    begin = (
        f"stopped by --stop-if '{metric} {comparison} 0.5 for 2' after step 2 ({metric} was {values[0]}, {values[1]}): "
    )
    assert sentence.startswith(begin)
    assert advice in sentence.removeprefix(begin)
    assert sentence.count("\n") == 0


def test_a_metric_that_no_step_has_ends_the_run_at_the_first(tmp_path):
    (left_out, arguments) = verdicts(tmp_path, "rollout_corr/k4_kl > 0.5", [None, 0.1])
    assert left_out is None
    assert arguments.startswith("--stop-if 'rollout_corr/k4_kl > 0.5': step 2 has no metric rollout_corr/k4_kl")
    assert arguments.endswith(KL)
    # So does one of earlier steps alone, such as of a loss that the run had before it was gone on with.
    guards = Guards(run_config(flags(tmp_path, "--stop-if", f"{KL} > 0.5 for 3")))
    guards.go_on([{"step": 1, "grad_norm": 1.0, KL: 0.1}], 1)
    assert f"step 2 has no metric {KL}" in str(guards.step(2, {"grad_norm": 1.0}))


def test_what_is_saved_at_the_guards_end_takes_no_older_checkpoints_place(ranks, tmp_path):
    """Also the time of a save can be looked at, which the first step does not have."""
    arguments = flags(
        tmp_path, *LIVE, f"--save={tmp_path}/save", "--save-interval=1", "--keep-last=1", "--train-iters=9"
    )
    ((error, code),) = ranks.run(error_and_code, Layout(), [*arguments, "--stop-if", "perf/save_seconds > 0 for 2"])
    assert code == 3
    assert error.startswith("stopped by --stop-if 'perf/save_seconds > 0 for 2' after step 3 (perf/save_seconds was ")
    assert error.endswith(f"; checkpoint 3 in {tmp_path}/save holds the steps so far")
    assert iterations(tmp_path / "save") == [2, 3]


def test_steps_in_a_row_are_counted_over_a_resume_and_anew_after_the_guards_end(ranks, tmp_path):
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    arguments = flags(tmp_path, *LIVE, *save, "--stop-if", "lr > 0 for 2")
    assert ranks.run(error_and_code, Layout(), [*arguments, "--train-iters=1"]) == [None]
    for step in (2, 4):
        ((error, code),) = ranks.run(error_and_code, Layout(), [*arguments, "--train-iters=9"])
        assert code == 3
        assert error.startswith(f"stopped by --stop-if 'lr > 0 for 2' after step {step} (")


def test_rows_of_steps_that_are_made_again_do_not_count(tmp_path):
    """A condition that is given twice counts once."""
    guards = Guards(run_config(flags(tmp_path, "--stop-if", "lr > 0 for 3", "lr > 0 for 3")))
    guards.go_on([{"step": step, "lr": rate} for step, rate in enumerate((0.1, 0.0, 0.1, 0.1, 0.1), 1)], 3)
    assert [guards.step(step, {"lr": 0.1}) is not None for step in (4, 5)] == [False, True]


def error_and_code(words):
    try:
        train(*configure(words, torch.distributed.get_world_size()))
    except RunError as error:
        return str(error), error.code


def test_all_ranks_stop_and_the_first_tells_why(ranks, tmp_path):
    layout = Layout(pp=2)
    arguments = flags(tmp_path, *LIVE, *layout.flags(), "--micro-batch-size=4", "--train-iters=5", "--stop-if")
    error, other = ranks.run(error_and_code, layout, [*arguments, "perf/update_seconds > 0 for 2", "lr < 0"])
    assert error[0].startswith("stopped by --stop-if 'perf/update_seconds > 0 for 2' after step 2 (")
    assert error[1] == 3
    assert other is None
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]
    error, other = ranks.run(error_and_code, layout, [*arguments, "reward/short > 2"])
    assert error[1] == 1
    assert error[0].startswith("--stop-if 'reward/short > 2': step 1 has no metric reward/short")
    assert other is None


def test_a_guard_has_its_own_exit_code(monkeypatch):
    """Told to the launcher; torchrun, which would start ranks that fail again, sees a rank that ends well."""
    monkeypatch.setenv("RANK", "0")
    with messages():
        assert say_end("stopped by --stop-if 'lr > 0' after step 2", GUARD) == 0
        (message,) = messages_of_ranks()
    assert (message.error, message.code) == ("stopped by --stop-if 'lr > 0' after step 2", 3)
