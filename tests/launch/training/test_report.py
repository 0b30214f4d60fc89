"""What a run tells TensorBoard and Weights & Biases."""

import importlib.machinery
import os
import subprocess
import sys
import types

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megatron_rc.launch.training.report import Reporter
from tests.support.paths import ROOT
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


FULL = """
import resource, signal, sys
from pathlib import Path
from megatron_rc.launch.training.report import Reporter
from tests.support.paths import ROOT
from tests.support.recorded_training import flags, run_config

words = flags(Path(sys.argv[1]), "--run-name=run", "--train-iters=100", "--log-interval=1")
reporter = Reporter(run_config(words), 0)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
for step in range(1, 100):
    reporter.step(step, {f"metric/{number}": 0.5 for number in range(20)})
    if reporter.error:
        break
print(step, reporter.error)
reporter.__exit__(ValueError)
"""


def test_files_that_can_grow_no_more_are_one_sentence(tmp_path):
    """At the error's end the picture cannot be written either, which hides nothing."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    step, _, error = done.stdout.partition(" ")
    assert 2 < int(step) < 99
    assert error.startswith(f"the metrics in {tmp_path}/run cannot be written (File too large): make room, or choose")
    assert "failed after step" in done.stderr
    assert done.stderr.endswith(f"picture {tmp_path}/run/summary.png could not be written (File too large)\n")
