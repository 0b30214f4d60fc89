"""The page and the picture of a run: they show what its files hold, whatever that is, and many rows cost seconds."""

import json
import math
import sys
import time

import pytest

from megatron_rc.launch import report
from megatron_rc.launch.training.reporting import history as reporting_history
from megatron_rc.launch.training.reporting import run_page
from megatron_rc.launch.training.reporting.history import MOST_ROWS
from megatron_rc.launch.training.reporting.panels import page_charts, picture_charts
from megatron_rc.launch.training.reporting.run_page import draw_run, history_of
from megatron_rc.launch.training.reporting.series import NUM_STRETCHES
from tests.drawing.test_page import HOSTILE, Reader
from tests.support.made_runs import drifting_run

RC = "rollout_corr/"
SETTINGS = """# python 3.11 · megatron-rc 0.1.0

# -- launch
run-name: a $ run

# -- training
train-iters: 60
# metric-prefix: rollout_corr/
"""


def made_rows(steps, with_weights=True, evaluations=0):
    """Rows as a run writes them."""
    for step in range(1, steps + 1):
        row = {"step": step, "reward/mean": step / steps, f"{RC}kl": 1e-3 / step, f"{RC}k3_kl": 1e-4}
        row |= {f"{RC}log_ratio_p{percent}": (int(percent) - 50) / 100 for percent in ("01", "25", "50", "75", "99")}
        row |= {f"{RC}rollout_rs_masked_fraction": 0.05, "perf/update_seconds": 1.5, "perf/update_share": 1.0}
        if with_weights:
            row |= {f"{RC}rollout_is_eff_sample_size": 0.9, f"{RC}rollout_is_raw_mean": 1.0}
            row |= {f"{RC}rollout_is_raw_min": 0.01, f"{RC}rollout_is_raw_max": 9.0}
        yield row
        if evaluations and step % evaluations == 0:
            yield {"step": step, "eval/exact_match": 0.5, "eval/pass@1": 0.5, "eval/pass@16": 0.9}


def run_folder(folder, rows, settings=SETTINGS):
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "config.yaml").write_text(settings)
    return folder


def drawn(folder, ending=None):
    """The page's HTML, after the run was drawn."""
    draw_run(folder, *history_of(folder), ending)
    return (folder / "report.html").read_text(encoding="utf-8")


@pytest.fixture
def without_charts(monkeypatch):
    """Drawing takes a second; most tests look at words alone."""
    monkeypatch.setattr(run_page, "page_charts", lambda series: [])
    monkeypatch.setattr(run_page, "picture_of", lambda name, charts: b"")


def curves_of(charts):
    """{label: [(step, value)]} of all curves, as matplotlib draws them."""
    from matplotlib.figure import Figure

    curves = {}
    for chart in charts:
        axes = Figure().subplots()
        chart.draw(axes)
        curves |= {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    return curves


def test_the_page_has_the_curves_the_numbers_the_settings_and_the_end(tmp_path):
    folder = run_folder(tmp_path / "run", made_rows(60, evaluations=10))
    text = drawn(folder, "finished at step 60, saved to ckpt")
    reader = Reader(text)
    assert reader.addresses == []
    assert "script" not in reader.tags
    text = "\n".join(reader.texts)
    for part in (
        "a $ run",
        "After step 60: finished at step 60, saved to ckpt",
        "60 of 60",
        "python 3.11",
        "train-iters",
    ):
        assert part in text
    history, _ = history_of(folder)
    charts = page_charts(history.series)
    assert reader.tags.count("svg") == len(charts) == 6
    curves = curves_of(charts)
    assert curves["mean reward"] == [[step, step / 60] for step in range(1, 61)]
    assert curves["right in 16 tries, held out"] == [[step, 0.9] for step in range(10, 61, 10)]
    assert {value for _, value in curves["rejected tokens"]} == {0.05}
    assert (folder / "summary.png").read_bytes().startswith(b"\x89PNG")


def test_weights_are_on_a_logarithmic_axis_and_without_weights_there_are_ratios(tmp_path):
    from matplotlib.figure import Figure

    history, _ = history_of(run_folder(tmp_path, made_rows(5)))
    *_, weights = picture_charts(history.series)
    axes = Figure().subplots()
    weights.draw(axes)
    assert axes.get_yscale() == "log"
    corners = axes.collections[0].get_paths()[0].vertices
    assert (corners[:, 1].min(), corners[:, 1].max()) == (0.01, 9.0)
    history, _ = history_of(run_folder(tmp_path, made_rows(5, with_weights=False)))
    *_, ratios = picture_charts(history.series)
    assert ratios.title == "Ratios of tokens, log ρ"


def test_files_of_evaluations_have_curves_by_their_names(tmp_path):
    rows = [{"step": 2, "eval/aime/exact_match": 0.1, "eval/aime/pass@16": 0.3, "eval/math.500/exact_match": 0.7}]
    history, _ = history_of(run_folder(tmp_path, rows))
    curves = curves_of(chart for chart in page_charts(history.series) if chart.title.startswith("Right answers"))
    assert curves == {"aime": [[2, 0.1]], "math.500": [[2, 0.7]]}


def test_metrics_under_another_prefix_are_found(tmp_path):
    rows = ({name.replace(RC, "mismatch/mismatch_"): value for name, value in row.items()} for row in made_rows(3))
    folder = run_folder(tmp_path, rows, "metric-prefix: mismatch/\n")
    history, _ = history_of(folder)
    assert history.series[f"{RC}kl"].values[0] == 1e-3
    assert history.facts["k3_kl"] == 1e-4


def test_what_is_no_number_is_left_out_and_counted(tmp_path):
    rows = list(made_rows(4))
    rows[1]["reward/mean"] = math.nan
    rows[2]["reward/mean"] = math.inf
    history, _ = history_of(run_folder(tmp_path, rows))
    reward = page_charts(history.series)[0]
    assert reward.note.endswith("NaN or infinite: 2.")
    assert curves_of([reward])["mean reward"] == [[1, 0.25], [4, 1.0]]


def test_a_long_run_is_drawn_in_stretches_that_keep_every_extreme(tmp_path):
    rows = list(made_rows(5000))
    rows[1234][f"{RC}kl"] = 77.0
    rows[4321][f"{RC}kl"] = -5.0
    history, _ = history_of(run_folder(tmp_path, rows))
    assert history.thinning == 1
    curve = history.series[f"{RC}kl"].as_curve("KL")
    assert len(curve.x) == NUM_STRETCHES
    assert (max(curve.high), min(curve.low)) == (77.0, -5.0)
    assert curve.y[-1] == pytest.approx(sum(row[f"{RC}kl"] for row in rows[-5000 // NUM_STRETCHES :]) / 17, rel=1e-2)


# Rows of the run, rows that are read of them, and the seconds that reading and drawing may take.
LONG_RUNS = [
    (10_000, 1_000, 10),
    pytest.param(100_000, MOST_ROWS, 20, marks=pytest.mark.long),
]


@pytest.mark.parametrize(("steps", "most", "limit"), LONG_RUNS)
def test_many_rows_cost_seconds(tmp_path, monkeypatch, capsys, steps, most, limit):
    """With the 120 metrics of a real row. The times are those of this process alone; other processes do not count."""
    monkeypatch.setattr(reporting_history, "MOST_ROWS", most)
    filler = {f"metric/{number}": 1 / (number + 3) for number in range(105)}
    rows = (row | filler for row in made_rows(steps, evaluations=steps // 100))
    folder = run_folder(tmp_path, rows)
    begun = time.process_time()
    history, settings = history_of(folder)
    draw_run(folder, history, settings, "finished")
    seconds = time.process_time() - begun
    with capsys.disabled():
        sys.stderr.write(f" [{seconds:.1f} s for {steps} rows] ")
    assert seconds < limit
    assert history.num_steps == steps
    assert len(history.series["reward/mean"].steps) <= most + 20
    assert len(history.series["eval/exact_match"].steps) == 100, "evaluations are few, and all of them are drawn"
    assert history.last_rows[-1]["step"] == steps
    assert history.last_rows[0]["step"] == steps - 9
    assert (folder / "report.html").stat().st_size < 1_000_000


@pytest.mark.usefixtures("without_charts")
def test_the_doctors_verdicts_have_the_steps_at_which_they_came_and_went(tmp_path):
    rows = list(made_rows(200))
    for row in rows[80:120]:
        row[f"{RC}k3_kl"] = 0.5
    folder = run_folder(tmp_path, rows)
    history, _ = history_of(folder)
    (precision,) = [finding for finding in history.findings if finding.verdict.rule.name == "precision"]
    assert 80 < precision.since <= 100
    assert 120 < precision.until <= 140
    text = drawn(folder)
    assert f"<td>step {precision.since}</td><td>step {precision.until}</td>" in text
    assert "as close as rounding" in text, "at the end"


@pytest.mark.usefixtures("without_charts")
def test_a_drift_is_found(tmp_path):
    rows, _ = drifting_run(3)
    text = drawn(run_folder(tmp_path, rows))
    assert "policies that drift apart" in text
    assert "<td>the end</td>" in text


@pytest.mark.usefixtures("without_charts")
def test_names_and_answers_of_any_kind_stay_text(tmp_path):
    folder = run_folder(tmp_path / "run", made_rows(2))
    (folder / "eval").mkdir()
    answers = [
        {"prompt": [{"role": "user", "content": HOSTILE}], "response": HOSTILE, "label": {"a": 1}, "reward": 0.5},
        {"prompt": 3, "response": "x" * 5000, "reward": 1e400, "error": "half \ud800"},
    ]
    lines = [*map(json.dumps, answers), "[1]", '"text"', "{broken", ""]
    (folder / "eval" / "step-0000002.jsonl").write_text("\n".join(lines))
    (folder / "eval" / "step-0000003.jsonl").write_text("")
    reader = Reader(drawn(folder, HOSTILE))
    text = "\n".join(reader.texts)
    assert "script" not in reader.tags
    assert f"After step 2: {HOSTILE}" in text
    assert f"user: {HOSTILE}" in text
    assert "x" * 2000 + " … 3000 more characters" in text
    assert "The first 2 of eval/step-0000002.jsonl." in text


@pytest.mark.parametrize("text", [None, "", "{broken", '{"step": 1'])
def test_a_run_without_a_step_has_a_page(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert "After step 0: failed: no engine" in drawn(tmp_path, "failed: no engine")
    assert not (tmp_path / "summary.png").exists()


@pytest.mark.usefixtures("without_charts")
@pytest.mark.parametrize("settings", [b"\xff\xfe", b"a: [", b"a: " + b"[" * 1000, b"x: 2026-99-99"], ids=range(4))
def test_settings_that_cannot_be_read_are_left_out(tmp_path, settings):
    folder = run_folder(tmp_path / "my_run", made_rows(2))
    (folder / "config.yaml").write_bytes(settings)
    assert "<title>my_run</title>" in drawn(folder)


@pytest.mark.usefixtures("without_charts")
def test_the_command_draws_a_run_and_keeps_what_the_run_said_of_its_end(tmp_path, capsys):
    folder = run_folder(tmp_path, made_rows(3))
    drawn(folder, 'failed: "x" </script>')
    report.main([str(folder)])
    assert capsys.readouterr().out == f"report {tmp_path}/report.html\npicture {tmp_path}/summary.png\n"
    assert "After step 3: failed: &quot;x&quot; &lt;/script&gt;" in (folder / "report.html").read_text()
    # The run goes on, and nobody knows yet how it ends.
    assert "After step" not in drawn(run_folder(tmp_path, made_rows(4)))


@pytest.mark.usefixtures("without_charts")
def test_a_page_that_cannot_be_written_ends_the_command_with_1(tmp_path, capsys):
    folder = run_folder(tmp_path, made_rows(3))
    (folder / "report.html.partial").mkdir()
    with pytest.raises(SystemExit) as end:
        report.main([str(folder)])
    assert end.value.code == 1
    message = f"error: {folder}/report.html could not be written (Is a directory): make room, or copy {folder}\n"
    assert capsys.readouterr().err == message


def test_metrics_that_cannot_be_read_are_named(tmp_path, capsys):
    """Reading this file of the system is an input/output error, for every user."""
    (tmp_path / "metrics.jsonl").symlink_to("/proc/self/mem")
    with pytest.raises(SystemExit) as end:
        report.main([str(tmp_path)])
    assert end.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/metrics.jsonl could not be read (Input/output error)\n"


@pytest.mark.usefixtures("without_charts")
def test_answers_that_cannot_be_read_are_left_out(tmp_path):
    folder = run_folder(tmp_path, made_rows(2))
    (folder / "eval" / "step-0000002.jsonl").mkdir(parents=True)
    (folder / "eval" / "step-0000001.jsonl").write_text('{"prompt": "4 + 4", "response": "8"}')
    assert "4 + 4" in drawn(folder)


NO_METRICS = "holds no metrics.jsonl that can be read: name"
REFUSED = {
    "nowhere": f"nowhere {NO_METRICS} the folder of a run, as runs/count_up\n",
    "file": f"file {NO_METRICS}",
    "": "the following arguments are required: RUN",
}


@pytest.mark.parametrize("folder", REFUSED)
def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys, monkeypatch, folder):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit) as end:
        report.main(folder.split())
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: {REFUSED[folder]}")
