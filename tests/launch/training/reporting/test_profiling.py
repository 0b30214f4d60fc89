"""Traces of optimizer steps, in the run's folder."""

import gzip
import json

import pytest

from megatron_rc.launch.training.loop import _check_start
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, run_training, run_until_signal

STEP_2 = ["--profile", "--profile-step-start=1", "--profile-step-end=2"]
TP2 = ["--tensor-model-parallel-size=2"]


def test_the_ranks_that_are_named_record_the_steps_that_are(ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, *TP2, "--train-iters=3", *STEP_2, "--profile-ranks", "1")
    assert ranks.run(run_training, Layout(tp=2), arguments) == [None, None]
    (trace,) = (tmp_path / "run" / "profile").iterdir()
    assert trace.name == "rank1-steps2-2.json.gz"
    with gzip.open(trace, "rt") as opened:
        names = [event.get("name", "") for event in json.load(opened)["traceEvents"]]
    assert any("backward" in name.lower() for name in names)
    assert len([name for name in names if name.startswith("Optimizer.step")]) == 1


def test_a_trace_that_cannot_be_written_is_one_sentence(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    (error,) = ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=3", *STEP_2))
    trace = f"{tmp_path}/run/profile/rank0-steps2-2.json.gz"
    assert error.startswith(f"ConfigurationError: --profile: {trace} could not be written")


def test_a_trace_that_cannot_be_written_at_the_end_fails_no_run(ranks, tmp_path):
    """A signal ends the run within the recording; its steps are saved."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").touch()
    arguments = flags(tmp_path, *LIVE, f"--save={tmp_path}/save", "--train-iters=9", "--profile")
    arguments += ["--profile-step-start=1", "--profile-step-end=9"]
    assert ranks.run(run_until_signal, Layout(), arguments, 3) == [True]


def test_a_resumed_run_whose_steps_lie_behind_is_refused(tmp_path):
    config = run_config(flags(tmp_path, "--train-iters=8", *STEP_2), engine=False)
    with pytest.raises(ValueError, match="--profile-step-end 2: checkpoint 2"):
        _check_start(config, 2)
