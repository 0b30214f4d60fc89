"""A run's folder: what is written there, and that nothing fails a run that has ended."""

import builtins
import os
import re

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.training.reporting import run_page
from megatron_rc.launch.training.reporting.reporter import Reporter
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, run_training, small_files

METRICS = {"reward/mean": 0.25, "rollout_corr/kl": 0.01}


def reporter_of(folder, *words, iteration=0):
    return Reporter(run_config(flags(folder, "--run-name=run", *words)), iteration)


def test_a_folder_that_cannot_be_written_ends_the_run(ranks, tmp_path):
    """A file lies where TensorBoard's folder is to be."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("")
    (error,) = ranks.run(run_training, Layout(), flags(tmp_path, *LIVE, "--train-iters=2"))
    assert error.startswith(f"ConfigurationError: the metrics in {tmp_path}/run cannot be written (")


@pytest.mark.parametrize(("iteration", "left"), [(0, 0), (2, 1)])
def test_a_new_run_gives_the_errors_of_an_older_one_another_name(tmp_path, iteration, left):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "reward-errors.jsonl").write_text("{}\n")
    reporter_of(tmp_path, "--train-iters=3", iteration=iteration).close("done")
    assert len(list((tmp_path / "run").glob("reward-errors.jsonl"))) == left
    assert len(list((tmp_path / "run").glob("reward-errors*.jsonl"))) == 1


def test_the_word_about_the_checkpoint_comes_before_the_report(tmp_path, capsys):
    reporter = reporter_of(tmp_path, "--train-iters=1")
    reporter.step(1, METRICS)
    capsys.readouterr()
    reporter.close("finished at step 1, saved to ckpt")
    reporter.close("a second time")
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert re.fullmatch(r"finished at step 1, saved to ckpt after \d+ s", lines[0])
    assert lines[-3:] == [
        f"metrics {tmp_path}/run/metrics.jsonl",
        f"report {tmp_path}/run/report.html",
        f"picture {tmp_path}/run/summary.png",
    ]
    assert "After step 1: finished at step 1, saved to ckpt, after " in (tmp_path / "run" / "report.html").read_text()


@pytest.fixture
def full():
    """No file of this process can grow beyond 16,000 bytes."""
    with small_files(16_000):
        yield


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_under_tensorboard_alone_is_told(tmp_path, capsys, full):
    """As an error of the step at which TensorBoard, which writes by a thread, says so, and in a line at the end."""
    reporter = reporter_of(tmp_path, "--train-iters=99")
    reporter.board.writer.add_text("words", "x" * 20_000)
    with pytest.raises(OSError, match="File too large"):
        flush_again_and_again(reporter.board.writer)
    with pytest.raises(ConfigurationError, match=r"cannot be written \(File too large\)"):
        reporter.step(1, METRICS)
    reporter.close("failed", code=1)
    message = capsys.readouterr().err
    assert f"TensorBoard's files in {reporter.board.writer.log_dir} are incomplete (File too large)" in message


def flush_again_and_again(board):
    """The thread's error comes with a later call."""
    for _ in range(100):
        board.flush()


def test_files_that_can_grow_no_more_are_one_sentence(tmp_path, capsys, full):
    """The report cannot be written either, which does not hide why the run ends."""
    # TensorBoard gets nothing: the thread that it writes in would end with the same error, in the tests that follow.
    reporter = reporter_of(tmp_path, "--log-interval=1000")
    arguments = (
        f"the metrics in {tmp_path}/run cannot be written (File too large): make room, or choose another --runs-dir"
    )
    with pytest.raises(ConfigurationError, match=re.escape(arguments)):
        write_until_full(reporter)
    reporter.__exit__(ValueError)
    message = capsys.readouterr().err.splitlines()
    assert message[-1].endswith("run/report.html and summary.png could not be written (File too large)")
    assert any(line.startswith("failed after step") for line in message)


def write_until_full(reporter):
    for step in range(1, 100):
        reporter.step(step, {f"metric/{number}": 0.5 for number in range(20)})


def without_matplotlib(monkeypatch):
    real_import = builtins.__import__

    def fails_for_matplotlib(name, *others):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return real_import(name, *others)

    monkeypatch.setattr(builtins, "__import__", fails_for_matplotlib)


def with_a_damaged_folder(monkeypatch):
    os.makedirs(os.path.join(os.getcwd(), "run", "report.html.partial"))


def with_a_full_disk(monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_page.page, "write_page", fails)


@pytest.mark.parametrize(
    ("break_it", "why"),
    [
        (without_matplotlib, "drawing needs matplotlib, which is not installed: pip install matplotlib"),
        (with_a_damaged_folder, "Is a directory"),
        (with_a_full_disk, "No space left on device"),
    ],
)
def test_a_report_that_cannot_be_made_is_one_line(tmp_path, capsys, monkeypatch, break_it, why):
    """The run ends as it would have."""
    monkeypatch.chdir(tmp_path)
    reporter = reporter_of(tmp_path, "--train-iters=1")
    reporter.step(1, METRICS)
    break_it(monkeypatch)
    reporter.close("finished")
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == f"{tmp_path}/run/report.html and summary.png could not be written ({why})"
    assert f"metrics {tmp_path}/run/metrics.jsonl" in lines


def test_the_last_evaluation_fails_no_run_but_an_earlier_one_does(tmp_path, capsys):
    """It follows the last save."""
    reporter = reporter_of(tmp_path, "--train-iters=4")
    reporter.step(1, METRICS)
    reporter.metrics.path.unlink()
    reporter.metrics.path.symlink_to("/dev/full")
    answers = {"eval/exact_match": 0.5, "eval/pass@1": 0.5, "eval/reward": 0.5}
    with pytest.raises(ConfigurationError, match="No space left"):
        reporter.evaluation(2, answers)
    reporter.evaluation(4, answers)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith(f"the metrics in {tmp_path}/run cannot be written (No space left on device)")
    assert lines[-2].startswith("step 4/4  held out: 50.0%")
    reporter.metrics.path.unlink()
    reporter.close("finished")


def test_a_run_that_fails_at_its_start_has_a_page_with_the_reason(tmp_path, capsys):
    reporter = reporter_of(tmp_path, "--train-iters=1")
    reporter.__exit__(ValueError, ValueError("no <engine>"))
    assert capsys.readouterr().err.endswith(f"failed after step 0\nreport {tmp_path}/run/report.html\n")
    assert "After step 0: failed after step 0: no &lt;engine&gt;, after" in (tmp_path / "run/report.html").read_text()


EVERY_2 = "--doctor-interval=2"


@pytest.mark.parametrize("more", [EVERY_2, f"{EVERY_2} --metric-prefix=mine/", f"{EVERY_2} --bypass-mode", ""])
def test_the_doctor_speaks_where_it_is_asked_and_the_metrics_are(tmp_path, capsys, more):
    prefix = "mine/" if "mine/" in more else "rollout_corr/"
    reporter = reporter_of(tmp_path, "--train-iters=4", *more.split())
    for step in (1, 2, 3, 4):
        reporter.step(step, {f"{prefix}k3_kl": 0.1})
    reporter.close("finished")
    message = capsys.readouterr().err
    assert message.count("doctor after") == (1 if more else 0)
    told = message.count("doctor after step 2: policies that differ by more than rounding (precision): ")
    assert told == (1 if more else 0)
