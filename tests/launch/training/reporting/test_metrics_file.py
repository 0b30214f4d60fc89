"""metrics.jsonl: whenever a run is killed, no row is lost and none is there twice; none stays in memory."""

import json
import os
import signal
import tracemalloc
from unittest import mock

import pytest

from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.training.reporting import reporter as reporter_module
from megatron_rc.launch.training.reporting.metrics_file import MetricsFile, last_evaluation, read_rows, read_thinned
from megatron_rc.launch.training.reporting.reporter import Reporter
from tests.support.ranks import Layout
from tests.support.recorded_training import flags
from tests.support.training_runs import LIVE, run_training

ROWS = [{"step": step, "reward/mean": step / 10} for step in range(1, 8)]


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write(path, iteration, *rows):
    file = MetricsFile(path, iteration)
    for row in rows:
        file.write(row)


@pytest.fixture
def written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, *ROWS)
    return path


def test_steps_that_are_made_again_take_their_place_with_the_first_row(written):
    file = MetricsFile(written, 5)
    assert steps_in(written) == [1, 2, 3, 4, 5, 6, 7], "a run that is killed now has lost nothing"
    file.write({"step": 6, "again": 1})
    assert [row.get("again") for row in read_rows(written)] == [None] * 5 + [1]
    file.write({"step": 7})
    assert steps_in(written) == [1, 2, 3, 4, 5, 6, 7]
    assert os.listdir(written.parent) == ["metrics.jsonl"]


def removed(path):
    path.unlink()


def removed_with_its_folder(path):
    path.unlink()
    path.parent.rmdir()


def replaced(path):
    """As by an editor, which writes a new file and renames it."""
    path.with_suffix(".new").write_text(path.read_text())
    path.with_suffix(".new").rename(path)


@pytest.mark.parametrize(
    ("lose", "kept"),
    [(removed, []), (removed_with_its_folder, []), (replaced, [1, 2])],
    ids=["removed", "with its folder", "replaced"],
)
def test_rows_go_on_in_a_file_that_is_there(tmp_path, lose, kept):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.mkdir()
    file = MetricsFile(path, 0)
    for step in (1, 2):
        file.write({"step": step})
    lose(path)
    for step in (3, 4):
        file.write({"step": step})
    assert steps_in(path) == [*kept, 3, 4]
    lose(path)
    for step in (5, 6):
        file.write({"step": step})
    assert steps_in(path) == [*([1, 2, 3, 4] if kept else []), 5, 6]


def test_the_last_evaluation_is_found(tmp_path):
    path = tmp_path / "metrics.jsonl"
    assert last_evaluation(path, 98) == -1
    write(path, 0, *({"step": step, "eval/reward" if step % 10 == 0 else "x": step} for step in range(1, 99)))
    assert [last_evaluation(path, step) for step in (98, 89, 9)] == [90, 80, -1]


CUT_OFF = '{"step": 8, "rew'
BROKEN = ["", "null", "[1]", '{"step": "8"}', '{"reward/mean": 1}', "\ufffd", "[" * 99999, CUT_OFF]


@pytest.mark.parametrize("line", BROKEN, ids=range(len(BROKEN)))
def test_lines_that_are_no_rows_are_left_out(written, line):
    with written.open("a") as file:
        file.write(line if line == CUT_OFF else f"{line}\n")
    assert [row["step"] for row in read_rows(written)] == [1, 2, 3, 4, 5, 6, 7]
    write(written, 8, {"step": 9})
    assert steps_in(written) == [1, 2, 3, 4, 5, 6, 7, 9]


def test_rows_are_appended_and_what_is_no_number_is_left_out_of_one(written):
    before = written.stat().st_ino
    times = written.stat().st_mtime
    write(written, 7, {"step": 8})
    assert steps_in(written) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert written.stat().st_ino == before, "nothing had to go, so the file was not written anew"
    with written.open("a") as file:
        file.write('{"reward/mean":null,"note":"by hand","step":9,"grad_norm":0.5}\n')
    assert list(read_rows(written))[-1] == {"step": 9, "grad_norm": 0.5}
    write(written, 9, {"step": 10})
    assert steps_in(written) == list(range(1, 11))
    # Older files are kept side by side.
    for _ in range(3):
        write(written, 0, {"step": 1})
        os.utime(written, (times, times))
    kept = sorted(path.name for path in written.parent.iterdir())
    assert len(kept) == 4
    assert sum("-2.jsonl" in name for name in kept) == 1


def test_a_file_that_cannot_be_read_ends_a_resumed_run(ranks, tmp_path):
    """One that can be opened."""
    folder = tmp_path / "run"
    arguments = flags(tmp_path, *LIVE, f"--save={tmp_path}/save", f"--load={tmp_path}/save")
    assert ranks.run(run_training, Layout(), [*arguments, "--train-iters=1"]) == [None]
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/proc/self/mem")
    (message,) = ranks.run(run_training, Layout(), [*arguments, "--train-iters=2"])
    assert message.startswith(f"ConfigurationError: the metrics in {folder} cannot be ")
    assert "(Input/output error): " in message


def test_many_rows_are_thinned_but_not_the_last_ones_and_no_evaluation(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, 0, *({"step": step, "eval/reward" if step == 38 else "x": step} for step in range(1, 101)))
    every, rows = read_thinned(path, 25, last=3)
    assert every == 4
    assert [row["step"] for row in rows] == [*range(1, 38, 4), 38, *range(41, 98, 4), 98, 99, 100]
    every, rows = read_thinned(path, 100, last=3)
    assert (every, len(list(rows))) == (1, 100)
    every, rows = read_thinned(tmp_path / "nothing", 25, last=3)
    assert (every, list(rows)) == (1, [])


@pytest.mark.parametrize("made", [0, 1, 4])
def test_a_killed_process_leaves_whole_rows(written, made):
    process = os.fork()
    if not process:
        file = MetricsFile(written, 5)
        for step in range(6, 6 + made):
            file.write({"step": step})
        os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL
    assert steps_in(written) == [1, 2, 3, 4, 5, *(range(6, 6 + made) if made else (6, 7))]


def test_what_the_reporter_keeps_does_not_grow(tmp_path, capsys):
    """200 metrics a step, as a run with many criteria has."""
    config, _ = configure(flags(tmp_path, "--run-name=run", "--log-interval=1000000", "--train-iters=1000"), 1)
    reporter = Reporter(config, 0)
    tracemalloc.start()
    try:
        sizes = []
        for step in range(1, 101):
            reporter.step(step, {f"metric/{number}": step + number / 7 for number in range(200)})
            if step in (20, 100):
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert (sizes[1] - sizes[0]) / 80 < 100, "bytes a step"
    # The picture, whose library takes seconds to load, is none of it.
    with mock.patch.object(reporter_module, "draw_run"):
        reporter.close("finished")
    assert "finished after" in capsys.readouterr().err
