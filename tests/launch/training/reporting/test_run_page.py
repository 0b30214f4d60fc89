"""The HTML page of a run: its data are those of the run's files, whatever these hold, and it is small."""

import json
import math

import pytest
import yaml

from megatron_rc.doctor.series import OVER_THE_RUN
from megatron_rc.launch import report
from megatron_rc.launch.training.reporting.run_page.page import page_data, write_page
from megatron_rc.launch.training.reporting.run_page.verdict import FULL_NAMES
from megatron_rc.launch.training.reporting.series import MOST, STRETCHES
from tests.launch.training.reporting.test_picture import run
from tests.replay.test_page import Reader
from tests.support.made_runs import drifting_run

HOSTILE = "</script><script>alert(1)</script><!-- \u2028 @DATA@ @STYLE@ \ud800 ${x} `"
SETTINGS = """# python 3.11 · megatron-rc 0.1.0
# To repeat this run, in {home}: python -m megatron_rc.launch --nproc-per-node 4 --config runs/run/config.yaml
# Flags behind a # were not given: they have their default, or follow from other flags.

# -- launch
run-name: {name}

# -- parallelism
tensor-model-parallel-size: 2
# context-parallel-size: 1

# -- training
train-iters: 60

# -- checkpoints
save: ckpt

# -- rollouts
save-rollouts: rec
save-log-probs: true

# -- rollout correction
rollout-is: token
rollout-is-threshold: 2.0
rollout-rs: token_k1
rollout-rs-threshold: 0.9_1.1
# metric-prefix: rollout_corr/
"""


def made(folder, rows, name="run"):
    """The folder of a run with these rows."""
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    quoted = yaml.safe_dump(name, allow_unicode=True, width=10**9).partition("\n")[0]
    (folder / "config.yaml").write_text(SETTINGS.format(home=folder, name=quoted), encoding="utf-8")
    return folder


def shown(folder, ending=None):
    """The data that a browser finds in the page."""
    reader = Reader(write_page(folder, ending).read_text(encoding="utf-8"))
    assert reader.addresses == []
    return json.loads(reader.data, parse_constant=pytest.fail)


def curve(data, label):
    (found,) = [one for panel in data["panels"] for one in panel["curves"] if one["label"] == label]
    return found


def test_curves_and_tiles_are_the_metrics(tmp_path):
    rows = run(evaluations=10)
    weights = {"min": 0.5, "p25": 0.8, "p50": 1.0, "p75": 1.2, "max": 1.5}
    rows[-2] |= {f"rollout_corr/rollout_is_{name}": value for name, value in weights.items()}
    rows[-2] |= {"rollout_corr/log_ratio_p05": -0.45, "rollout_corr/log_ratio_p95": 0.45}
    data = shown(made(tmp_path, rows), "finished at step 60")
    steps = [row for row in rows if "reward/mean" in row]
    reward = curve(data, "mean reward")
    assert reward["steps"] == list(range(1, 61))
    assert reward["values"] == pytest.approx([row["reward/mean"] for row in steps], rel=1e-4)
    assert curve(data, "right in 16 tries, held out") == {
        "label": "right in 16 tries, held out",
        "steps": [10, 20, 30, 40, 50, 60],
        "values": [0.9] * 6,
    }
    assert curve(data, "rejected tokens")["values"] == [0.05] * 60
    assert "Right answers by file, shares" not in [panel["title"] for panel in data["panels"]]
    tiles = {tile["label"]: (tile["value"], tile["note"]) for tile in data["tiles"]}
    assert tiles["optimizer steps"] == ("60 of 60", "")
    assert tiles["mean reward"] == ("0.0167 → 0.925", "first step → mean of the last 10 steps; best 1 at step 60")
    assert tiles["right answers, held out"] == ("50.0% → 50.0%", "first evaluation → last, after step 60")
    assert tiles["rejected tokens"][0] == "5.00%"
    assert (data["name"], data["layout"], data["ending"]) == ("run", "TP 2", "finished at step 60")
    ratios, spread = data["histograms"]
    assert ratios["edges"] == pytest.approx([-0.49, -0.45, -0.25, 0, 0.25, 0.45, 0.49])
    assert ratios["shares"] == pytest.approx([0.04, 0.2, 0.25, 0.25, 0.2, 0.04])
    assert spread["edges"] == pytest.approx([math.log(weight) for weight in weights.values()])


def test_files_of_evaluations_have_curves_by_their_names(tmp_path):
    rows = run(evaluations=10)
    for row in rows:
        if "eval/reward" in row:
            row |= {"eval/aime/exact_match": 0.1, "eval/aime/pass@16": 0.3, "eval/math.500/exact_match": 0.7}
    (panel,) = [panel for panel in shown(made(tmp_path, rows))["panels"] if panel["title"].startswith("Right answers")]
    assert {one["label"]: one["values"] for one in panel["curves"]} == {"aime": [0.1] * 6, "math.500": [0.7] * 6}


def test_settings_and_what_else_is_there_are_those_of_the_folder(tmp_path):
    folder = made(tmp_path, run(steps=3))
    (tmp_path / "ckpt" / "iter_0000002").mkdir(parents=True)
    (tmp_path / "reward-errors.jsonl").write_text("{}\n")
    data = shown(folder)
    assert ["training", "train-iters", "60"] in data["settings"]["given"]
    assert "context-parallel-size" not in [name for _, name, _ in data["settings"]["given"]]
    assert data["settings"]["made_with"][0] == "python 3.11 · megatron-rc 0.1.0"
    assert data["settings"]["correction"][1:3] == [
        "token weights w_t = ρ_t, truncated at 2",
        "rejects tokens whose ρ_t is outside [0.9, 1.1] (token_k1)",
    ]
    notes = " ".join(data["notes"])
    assert "of step 2." in notes
    assert f"python -m megatron_rc.replay {tmp_path}/rec --preset decoupled_token_is --html {tmp_path}" in notes
    assert f"could not be scored are in {tmp_path}/reward-errors.jsonl" in notes
    # Metrics under another prefix are found.
    made(
        folder, [{name.replace("rollout_corr/", "mine/"): value for name, value in row.items()} for row in run(steps=2)]
    )
    text = (folder / "config.yaml").read_text().replace("# metric-prefix: rollout_corr/", "metric-prefix: mine/")
    (folder / "config.yaml").write_text(text)
    data = shown(folder)
    assert curve(data, "ESS")["values"] == [0.9, 0.9]
    assert data["doctor"]["numbers"]


@pytest.mark.parametrize("steps", [MOST + 1, 10_000])
def test_thinned_curves_keep_every_extreme(tmp_path, steps):
    rows = run(steps=steps)
    rows[steps // 3]["rollout_corr/kl"], rows[steps // 2]["rollout_corr/kl"] = 77.0, -5.0
    data = shown(made(tmp_path, rows))
    kl = curve(data, "KL")
    assert len(kl["steps"]) == STRETCHES
    assert (max(kl["high"]), min(kl["low"])) == (77.0, -5.0)
    high = kl["high"].index(77.0)
    assert kl["first"][high] <= steps // 3 + 1 <= kl["last"][high]
    assert kl["first"][0] == 1
    assert kl["last"][-1] == steps
    assert [after - 1 for after in kl["first"][1:]] == kl["last"][:-1]
    means = [row["rollout_corr/kl"] for row in rows[: kl["last"][0]]]
    assert kl["values"][0] == pytest.approx(sum(means) / len(means), rel=1e-4)
    assert (tmp_path / "report.html").stat().st_size < 1_000_000


def test_what_is_no_number_is_a_gap_and_is_counted_and_phases_are_stacked(tmp_path):
    rows = run(steps=5)
    rows[1]["reward/mean"], rows[2]["reward/mean"], rows[4]["reward/mean"] = math.nan, math.inf, math.nan
    rows[4]["rollout_corr/log_ratio_p50"] = math.nan
    for row in rows:
        row["perf/update_seconds"] = 1.5
    rows[1]["perf/eval_seconds"] = 3.0
    data = shown(made(tmp_path, rows[:4]))
    assert curve(data, "mean reward")["values"] == [0.2, None, None, 0.8]
    assert data["panels"][0]["note"].endswith(" NaN or infinite: 2.")
    assert "0.2 → 0.5" in [tile["value"] for tile in data["tiles"]]
    # Phases are stacked over the same steps.
    (panel,) = [panel for panel in data["panels"] if panel["stacked"]]
    assert [(one["label"], one["steps"], one["values"]) for one in panel["curves"]] == [
        *(("eval", [1, 2, 3, 4], [0, 3, 0, 0]), ("update", [1, 2, 3, 4], [1.5] * 4))
    ]
    assert shown(made(tmp_path, rows))["histograms"] == []


def test_names_and_texts_of_any_kind_stay_texts(tmp_path):
    folder = made(tmp_path, run(steps=2), name=HOSTILE.replace("\ud800", ""))
    (folder / "eval").mkdir()
    answers = [
        {"prompt": [{"role": "user", "content": HOSTILE}], "response": HOSTILE, "label": {"a": 1}, "reward": 0.5},
        {"prompt": 3, "response": "x" * 5000, "reward": 1e400, "error": HOSTILE},
    ]
    lines = [*map(json.dumps, answers), "[1]", '"text"', "{broken", ""]
    (folder / "eval" / "step-0000002.jsonl").write_text("\n".join(lines))
    (folder / "eval" / "step-0000001.jsonl").write_text("")
    path = write_page(folder, HOSTILE)
    text = path.read_text(encoding="utf-8")
    reader = Reader(text)
    # The page's own two, and no other: the data end where they are to.
    assert reader.tags.count("script") == 2
    assert text.count("alert(1)</script>") == 0
    data = json.loads(reader.data)
    assert (data["name"], data["ending"]) == (HOSTILE.replace("\ud800", ""), HOSTILE)
    first, second = data["answers"]["rows"]
    assert first == {"prompt": f"user: {HOSTILE}", "response": HOSTILE, "label": "{'a': 1}", "reward": 0.5, "error": ""}
    assert second["response"] == "x" * 2000 + " … 3000 more characters"
    assert (second["prompt"], second["reward"], second["error"]) == ("3", None, HOSTILE)
    assert (data["answers"]["file"], data["answers"]["files"]) == ("eval/step-0000002.jsonl", 2)


@pytest.mark.parametrize("text", [None, "", "{broken", '{"step": 1'])
def test_a_run_without_a_step_has_a_page(tmp_path, text):
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    data = shown(tmp_path, "failed: no engine")
    assert data["panels"] == data["histograms"] == []
    assert data["doctor"] is data["answers"] is None
    assert [tile["value"] for tile in data["tiles"]] == ["0"]
    assert data["ending"] == "failed: no engine"


def test_a_page_of_the_same_steps_keeps_what_the_run_said_of_its_end(tmp_path, capsys):
    folder = made(tmp_path, run(steps=3))
    write_page(folder, 'failed: "x" </script>')
    report.main([str(folder)])
    assert capsys.readouterr().out == f"report {tmp_path}/report.html\n"
    assert page_data(folder)["ending"] == 'failed: "x" </script>'
    # The run goes on, and nobody knows yet how it ends.
    made(tmp_path, run(steps=4))
    assert shown(folder)["ending"] == ""
    (folder / "report.html").write_bytes(b'<script type="application/json" id="data">\xff[</script>')
    assert shown(folder)["ending"] == ""
    (folder / "report.html.partial").mkdir()
    with pytest.raises(SystemExit) as end:
        report.main([str(folder)])
    assert end.value.code == 1
    said = f"error: {folder}/report.html could not be written (Is a directory): make room, or copy {folder}\n"
    assert capsys.readouterr().err == said


DEEP, NO_DATE = b"a: " + b"[" * 1000, b"x: 2026-99-99"
ODD = [b"\xff\xfe", b"rollout-rs: python:os:system\n", b"a: [", b"- 1\n", b"x: y: z", DEEP, NO_DATE]


@pytest.mark.parametrize("settings", ODD, ids=range(len(ODD)))
def test_settings_that_cannot_be_read_are_left_out(tmp_path, settings):
    folder = made(tmp_path, run(steps=2))
    (folder / "config.yaml").write_bytes(settings)
    data = shown(folder)
    assert not any("system" in line for line in data["settings"]["correction"])
    assert data["name"] == tmp_path.name
    assert len(curve(data, "mean reward")["values"]) == 2


@pytest.mark.parametrize(("k3", "wrong"), [(1e-4, False), (0.5, True)])
def test_the_doctor_speaks_of_it_and_of_a_drift(tmp_path, k3, wrong):
    rows = [row | {"rollout_corr/k3_kl": k3} for row in run(steps=12)]
    doctor = shown(made(tmp_path, rows))["doctor"]
    assert doctor["is_wrong"] is wrong
    assert bool(doctor["verdicts"]) is wrong
    assert ["k3", f"{k3:.3g} nats a token"] in doctor["numbers"]
    if wrong:
        assert "two different policies" in doctor["words"]
        rows, _ = drifting_run(3)
        verdicts = shown(made(tmp_path, rows))["doctor"]["verdicts"]
        assert any("since step" in verdict["words"] for verdict in verdicts)
    assert set(FULL_NAMES) == set(OVER_THE_RUN), "it gets all that it looks at over a run"


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
