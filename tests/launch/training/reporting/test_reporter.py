"""A run's folder: what is written there, and what becomes of disks that cannot be written to."""

import pytest

from megatron_rc.launch.training.reporting.reporter import Reporter
from megatron_rc.launch.training.reporting.run_page.page import page_data
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, run_training, small_files

METRICS = {"reward/mean": 0.25, "rollout_corr/kl": 0.01}


def test_a_folder_that_cannot_be_written_is_one_error_on_all_ranks(ranks, tmp_path):
    """A file lies where TensorBoard's folder is to be."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_text("")
    layout = Layout(tp=2)
    first, second = ranks.run(run_training, layout, flags(tmp_path, *LIVE, *layout.flags(), "--train-iters=2"))
    assert first == second
    assert first.startswith(f"AgreedError: the metrics in {tmp_path}/run cannot be written (")


@pytest.mark.parametrize(("iteration", "left"), [(0, 0), (2, 1)])
def test_a_new_run_gives_the_errors_of_an_older_one_another_name(tmp_path, iteration, left):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "reward-errors.jsonl").write_text("{}\n")
    Reporter(run_config(flags(tmp_path, "--run-name=run", "--train-iters=3")), iteration).close("done")
    assert len(list((tmp_path / "run").glob("reward-errors.jsonl"))) == left
    assert len(list((tmp_path / "run").glob("reward-errors*.jsonl"))) == 1


@pytest.fixture
def full():
    """No file of this process can grow beyond 16,000 bytes."""
    with small_files(16_000):
        yield


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_disk_that_fills_up_under_tensorboard_alone_is_told(tmp_path, capsys, full):
    """As an error of the step at which TensorBoard, which writes by a thread, says so, and in a line at the end."""
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", "--train-iters=99")), 0)
    reporter.board.writer.add_text("words", "x" * 20_000)
    with pytest.raises(OSError, match="File too large"):
        flush_again_and_again(reporter.board.writer)
    reporter.step(1, METRICS)
    assert reporter.error is not None
    assert "cannot be written (File too large)" in reporter.error
    reporter.close("failed", code=1)
    said = capsys.readouterr().err
    assert f"TensorBoard's files in {reporter.board.writer.log_dir} are incomplete (File too large)" in said


def flush_again_and_again(board):
    """The thread's error comes with a later call."""
    for _ in range(100):
        board.flush()


def test_files_that_can_grow_no_more_are_one_sentence(tmp_path, capsys, full):
    """The picture cannot be written either, which does not hide why the run ends."""
    # TensorBoard gets nothing: the thread that it writes in would end with the same error, in the tests that follow.
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", "--log-interval=1000")), 0)
    for step in range(1, 100):
        reporter.step(step, {f"metric/{number}": 0.5 for number in range(20)})
        if reporter.error:
            break
    assert 2 < step < 99
    assert reporter.error == (
        f"the metrics in {tmp_path}/run cannot be written (File too large): make room, or choose another --runs-dir"
    )
    reporter.__exit__(ValueError)
    said = capsys.readouterr().err
    assert "failed after step" in said
    assert said.endswith(f"picture {tmp_path}/run/summary.png could not be written (File too large)\n")


EVERY_2 = "--doctor-interval=2"


@pytest.mark.parametrize("more", [EVERY_2, f"{EVERY_2} --metric-prefix=mine/", f"{EVERY_2} --bypass-mode", ""])
def test_the_doctor_speaks_where_it_is_asked_and_the_metrics_are(tmp_path, capsys, more):
    prefix = "mine/" if "mine/" in more else "rollout_corr/"
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", "--train-iters=4", *more.split())), 0)
    for step in (1, 2, 3, 4):
        reporter.step(step, {f"{prefix}k3_kl": 0.1})
    reporter.close("finished")
    said = capsys.readouterr().err
    assert said.count("doctor after") == (1 if more else 0)
    told = said.count("doctor after step 2: policies that differ by more than rounding (precision): ")
    assert told == (1 if more else 0)


def test_a_page_that_cannot_be_made_is_one_line(tmp_path, capsys):
    """Whatever lies in the run's folder: the run ends as it would have. One that fails at its start has a page."""
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=run", "--train-iters=1")), 0)
    reporter.step(1, METRICS)
    (tmp_path / "run" / "eval" / "step-0000001.jsonl").mkdir(parents=True)
    reporter.close("finished")
    said = capsys.readouterr().err
    assert f"report {tmp_path}/run/report.html could not be written (Is a directory)\npicture " in said
    reporter = Reporter(run_config(flags(tmp_path, "--run-name=failed", "--train-iters=1")), 0)
    reporter.__exit__(ValueError, ValueError("no <engine>"))
    assert capsys.readouterr().err.endswith(f"failed after step 0\nreport {tmp_path}/failed/report.html\n")
    assert page_data(tmp_path / "failed")["ending"] == "failed after step 0: no <engine>"
