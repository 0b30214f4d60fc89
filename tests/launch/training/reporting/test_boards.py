"""What TensorBoard and Weights & Biases get: sections, histograms, the settings; and what becomes of their failures."""

import glob
import importlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar import layout_pb2

from megatron_rc.launch.ending import FOLDER
from megatron_rc.launch.training.reporting.boards import WandB, import_wandb, in_section
from megatron_rc.launch.training.reporting.reporter import Reporter
from megatron_rc.measures.histogram import Distribution
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, rows, run_training

METRICS = {"reward/mean": 0.25, "rollout_corr/kl": 0.01, "rollout_corr/log_ratio_p50": 0.0, "grad_norm": 0.5}
LOG_RATIO = {"rollout_corr/log_ratio": Distribution([-1.0, 0.0, 2.0], [3.0, 1.0])}


def events_of(folder):
    (board,) = (folder / "run" / "tensorboard").iterdir()
    return EventAccumulator(str(board), size_guidance={"histograms": 0}).Reload()


def text_of(events, name):
    (results,) = events.Tensors(name)
    return results.tensor_proto.string_val[0]


def test_tensorboard_has_sections_and_histograms_of_a_real_run(ranks, tmp_path):
    timers = ("--log-timers-to-tensorboard", "--timing-log-level=1")
    arguments = flags(tmp_path, *LIVE, "--train-iters=2", *timers)
    assert ranks.run(run_training, Layout(dp=2), arguments) == [None, None]
    events = events_of(tmp_path)
    row, names = rows(tmp_path)[-1], {name for row in rows(tmp_path) for name in row} - {"step"}
    # Names with a section are as they were.
    shown = ("reward/mean", "optimizer/grad_norm", "optimizer/lr", "timers/iteration-time")
    shown += ("timers/forward-backward-share",)
    named = ("reward/mean", "grad_norm", "lr", "iteration-time", "forward-backward-share")
    assert tuple(map(in_section, named)) == shown
    for name in shown:
        assert [event.step for event in events.Scalars(name)] == [1, 2]
    sections = {name.partition("/")[0] for name in events.Tags()["scalars"]}
    of_rollouts = {"reward", "rollout", "selection", "rollout_corr"}
    assert sections == of_rollouts | {"policy", "loss", "optimizer", "perf", "timers"}
    assert set(events.Tags()["scalars"]) == {in_section(name) for name in names if not re.search(r"_p\d\d$", name)}
    tokens, sequences = (row[f"rollout_corr/num_{name}"] for name in ("tokens", "sequences"))
    counted = {
        "rollout_corr/log_ratio": tokens,
        "rollout_corr/rollout_is": tokens,
        "rollout_corr/rollout_is_seq": sequences,
        "reward/rewards": 16,
        "rollout/response_lengths": 16,
    }
    assert set(events.Tags()["histograms"]) == set(counted)
    for name, number in counted.items():
        assert [event.step for event in events.Histograms(name)] == [1, 2]
        value = events.Histograms(name)[-1].histogram_value
        assert value.num == pytest.approx(number)
        assert sum(value.bucket) == pytest.approx(number)
        assert value.min < value.max
    edges = events.Histograms("rollout_corr/log_ratio")[-1].histogram_value
    assert edges.min <= row["rollout_corr/log_ratio_p01"] <= row["rollout_corr/log_ratio_p99"] <= edges.max
    assert b"rollout-is: token" in text_of(events, "config/text_summary")
    layout = layout_pb2.Layout.FromString(text_of(events, "custom_scalars__config__"))
    charts = {chart.title: chart.multiline.tag for category in layout.category for chart in category.chart}
    # As TensorBoard looks for them: from the first letter of a name on.
    lines = {
        title: any(re.match(tag, in_section(name)) for tag in tags for name in names) for title, tags in charts.items()
    }
    assert lines == dict.fromkeys(lines, True)
    assert len(lines) == 9


@pytest.mark.parametrize("more", [(), ("--bypass-mode",)])
def test_a_step_that_is_left_out_has_the_histograms_of_its_correction(ranks, tmp_path, more):
    arguments = flags(
        tmp_path, *LIVE, "--train-iters=1", "--rollout-rs=token_k2", "--rollout-rs-threshold=1e-12", *more
    )
    (message,) = ranks.run(run_training, Layout(), arguments)
    assert "no token was accepted" in message
    events = events_of(tmp_path)
    assert {"rollout_corr/log_ratio", "rollout_corr/rollout_is", "reward/rewards"} <= set(events.Tags()["histograms"])
    assert "rollout_corr/log_ratio_p50" not in events.Tags()["scalars"]


@pytest.fixture(scope="module")
def offline(tmp_path_factory):
    """The real package without a network; its settings and its cache are its own."""
    folder = tmp_path_factory.mktemp("wandb")
    names = {"WANDB_MODE": "offline", "WANDB_CONFIG_DIR": str(folder), "WANDB_CACHE_DIR": str(folder)}
    with mock.patch.dict(os.environ, names):
        yield


def records_of(folder):
    """[(kind, record)] of each run of Weights & Biases in a folder: files of LevelDB's log format."""
    from wandb.proto import wandb_internal_pb2

    for path in sorted(glob.glob(f"{folder}/wandb/offline-run-*/*.wandb")):
        with open(path, "rb") as file:
            data = file.read()
            whole = b""
            at = 7
            results = []
        while at + 7 <= len(data):
            if 32768 - at % 32768 < 7:
                at += 32768 - at % 32768
                continue
            _, length, kind = struct.unpack_from("<IHB", data, at)
            whole = whole + data[at + 7 : at + 7 + length]
            at = at + 7 + length
            if kind in (1, 4):
                record = wandb_internal_pb2.Record.FromString(whole)
                whole = b""
                kind = record.WhichOneof("record_type")
                results.append((kind, getattr(record, kind)))
        yield results


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A repository with one commit, which is the working directory; this checkout may be an archive, without one."""
    folder = tmp_path_factory.mktemp("repository")
    git = ["git", "-C", str(folder), "-c", "user.name=user", "-c", "user.email=user@localhost"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=first"], check=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.fixture(scope="module")
def logged(offline, repository, tmp_path_factory):
    """A run that fails after two steps, and goes on until Weights & Biases fails.

    Returns:
        (records of both, what was said of it, the run's folder).
    """
    folder = tmp_path_factory.mktemp("runs")
    arguments = flags(folder, "--run-name=run", "--wandb-project=sums", "--wandb-entity=us", "--log-interval=2")
    first = Reporter(run_config(arguments), 0)
    first.step(1, METRICS, LOG_RATIO)
    first.step(2, METRICS, LOG_RATIO)
    first.__exit__(ValueError)
    then = Reporter(run_config(arguments), 2)
    then.step(4, METRICS)
    # What a lost service does: the library raises at each call.
    then.wandb.finish(0)
    with mock.patch.object(Reporter, "say") as say:
        then.step(6, METRICS)
        then.step(8, METRICS)
    message = [call.args[0] for call in say.call_args_list]
    then.close("finished")
    return list(records_of(folder / "run")), message, folder / "run"


def of_kind(records, kind):
    return [record for one, record in records if one == kind]


def history(record):
    """The values by name; what has parts, by name and part."""
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.item}


@pytest.mark.processes
def test_weights_and_biases_get_flags_and_versions_sections_and_histograms(logged, repository):
    (first, _), *_ = logged
    run = of_kind(first, "run")[0]
    assert (run.project, run.entity, run.display_name) == ("sums", "us", "run")
    config = {item.key: json.loads(item.value_json) for item in run.config.update}
    assert (config["lr"], config["seed"], config["rollout_is"], config["grpo_iterations"]) == (0.02, 1234, "token", 2)
    assert config["versions"]["torch"]
    commit = subprocess.run(["git", "-C", repository, "rev-parse", "HEAD"], check=True, capture_output=True, text=True)
    recorded = {"folder": str(repository), "commit": commit.stdout.strip(), "has_changes": False}
    assert recorded in config["repositories"]
    (row,) = of_kind(first, "history")
    assert row.step.num == 2, "by --log-interval"
    values = history(row)
    assert {values[in_section(name)] for name in METRICS} == set(METRICS.values())
    parts = {"_type": "histogram", "values": [3, 1], "bins": [-1, 0, 2]}
    whole = values.get("rollout_corr/log_ratio")
    assert parts == (whole or {part: values[f"rollout_corr/log_ratio/{part}"] for part in parts})


@pytest.mark.processes
def test_a_run_that_goes_on_goes_on_in_weights_and_biases_whose_failure_costs_a_line(logged):
    (first, then), message, folder = logged
    assert [record.exit_code for record in of_kind(first, "exit")] == [1], "it failed"
    begun = of_kind(first, "run")[0].run_id
    resumed = of_kind(then, "run")[0].run_id
    assert begun == resumed == (folder / "wandb-id.txt").read_text().strip()
    assert [record.step.num for record in of_kind(then, "history")] == [4]
    (line,) = message
    assert re.match(r"--wandb-project sums failed \(\w+: .+\): the run goes on .* metrics\.jsonl ", line)
    steps = [json.loads(row)["step"] for row in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 4, 6, 8]


@pytest.mark.processes
def test_weights_and_biases_that_are_disabled_are_told(offline, tmp_path):
    forget = importlib.import_module("wandb").teardown
    forget()  # it reads the mode once a process
    with mock.patch.dict(os.environ, WANDB_MODE="disabled"):
        disabled = WandB(run_config(flags(tmp_path, "--wandb-project=sums")), tmp_path, 0)
    disabled.log(1, METRICS, LOG_RATIO)
    disabled.finish(0)
    forget()
    assert "WANDB_MODE" in disabled.place


def run_without_a_key(words, folder):
    """A run that would ask a server that it has no key for."""
    nowhere = {"WANDB_MODE": "online", "WANDB_CONFIG_DIR": folder, "NETRC": f"{folder}/netrc", "HOME": folder}
    known = {name: value for name, value in os.environ.items() if name != "WANDB_API_KEY"}
    with mock.patch.dict(os.environ, known | nowhere, clear=True):
        return run_training(words)


def test_weights_and_biases_that_cannot_begin_end_the_run(offline, ranks, tmp_path):
    arguments = flags(tmp_path, *LIVE, "--wandb-project=sums", "--train-iters=2")
    (message,) = ranks.run(run_without_a_key, Layout(), arguments, str(tmp_path))
    assert re.match(r"ConfigurationError: --wandb-project sums failed \(UsageError: .*API key.*\): ", message)


def test_temporary_folders_of_wandb_lie_in_the_launchers(tmp_path, monkeypatch):
    """A stand-in that makes one when it is imported, as wandb does; a rank that is killed would leave it behind."""
    (tmp_path / "wandb.py").write_text("import tempfile\nmade = tempfile.mkdtemp()\n")
    folder = tmp_path / "launcher"
    folder.mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setenv(FOLDER, str(folder))
    before = tempfile.gettempdir()
    import_wandb()
    assert Path(sys.modules.pop("wandb").made).parent == folder
    assert tempfile.gettempdir() == before
