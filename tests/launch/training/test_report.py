"""What a run tells TensorBoard and Weights & Biases."""

import importlib.machinery
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rc.launch.training.report import Reporter
from tests.support.recorded_training import flags, run_config

METRICS = {"reward/mean": 0.25, "rollout_corr/kl": 0.01}


@pytest.fixture
def wandb(monkeypatch):
    """Stands for the package, which is in an extra of its own; tells what it was called with."""
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)
    module.calls = []

    def record(name):
        return lambda *args, **kwargs: module.calls.append((name, args, kwargs))

    def init(**kwargs):
        record("init")(**kwargs)
        return types.SimpleNamespace(log=record("log"), finish=record("finish"))

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_weights_and_biases_get_the_flags_and_the_versions(tmp_path, wandb):
    words = flags(tmp_path, "--run-name=run", "--wandb-project=sums", "--log-interval=2", "--train-iters=2")
    reporter = Reporter(run_config(words), 0)
    reporter.step(1, METRICS)
    reporter.step(2, METRICS)
    reporter.close("finished")
    (start, *logged, end) = wandb.calls
    assert start[2] | {"config": None} == {
        "project": "sums",
        "name": "run",
        "dir": str(tmp_path / "run"),
        "config": None,
    }
    config = start[2]["config"]
    assert (config["lr"], config["seed"], config["rollout_is"], config["grpo_iterations"]) == (0.02, 1234, "token", 2)
    assert config["versions"]["torch"]
    assert {"commit", "has_changes", "folder"} == config["repositories"][0].keys()
    assert logged == [("log", (METRICS,), {"step": 2})], "by --log-interval"
    assert end == ("finish", (), {"exit_code": 0})


def test_weights_and_biases_hear_of_a_failure(tmp_path, wandb, capsys):
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", "--wandb-project=sums")), 0)
    reporter.step(1, METRICS)
    reporter.__exit__(ValueError)
    assert wandb.calls[-1] == ("finish", (), {"exit_code": 1})
    assert "failed after step 1 " in capsys.readouterr().err


def test_tensorboard_has_every_metric_by_step(tmp_path):
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", "--train-iters=3")), 0)
    for step in (1, 2, 3):
        reporter.step(step, METRICS)
    reporter.close("finished")
    (folder,) = (tmp_path / "run" / "tensorboard").iterdir()
    events = EventAccumulator(str(folder)).Reload()
    assert set(events.Tags()["scalars"]) == set(METRICS)
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2, 3]
