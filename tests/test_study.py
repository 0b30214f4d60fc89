"""The study: its page names its runs, they are made once, and the page has their measurements."""

import dataclasses
import itertools
import json
import math
import re
import subprocess
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml

from benchmarks.study import __main__ as command
from benchmarks.study import document, engine, pictures, queue, results, settings
from benchmarks.study.task import CountUp
from megatron_rc.launch.engines.registry import ENGINES, EngineInputs
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.flags import parser
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from megatron_rc.records.rollout import SamplingParams
from tests.support.paths import ROOT

RUNS = list(settings.all_runs())
# Flags of the study's launch file that differ from the default task's, and flags of each run.
LAYOUT = {"world-size", "tensor-model-parallel-size", "pipeline-model-parallel-size", "sequence-parallel"}
CORRECTION = {"rollout-correction-preset", "rollout-rs", "rollout-rs-threshold", "rollout-dtype", "task"}
OWN = {"cpu", "rollout-check-tolerance", "eval-interval", "eval-problems", "eval-answers", "rollout-dtype", "task"}


def test_the_runs():
    """45, three to compare them with, 16 without an entropy bonus, 27 of baselines; all train the default task."""
    assert len({run.name for run in settings.runs_of_baselines()}) == 27
    assert len(RUNS) == len({run.name for run in RUNS}) == 48
    assert sum(run.mismatch is settings.NONE for run in RUNS) == 3
    found = list(settings.runs_without_entropy())
    assert [run.name for run in found] == [run.name for run in RUNS[:16]]
    for run, other in zip(found, RUNS, strict=False):
        assert [flag for flag in run.flags if flag not in other.flags] == ["--grpo-entropy-term-weight=0"]
    ours, default = (
        yaml.safe_load((ROOT / "configs" / folder / "count_up.yaml").read_text()) for folder in ("study", "launch")
    )
    assert {**default, **{name: ours[name] for name in OWN}}.keys() - LAYOUT - CORRECTION == ours.keys() - CORRECTION
    assert all(ours[name] == value for name, value in default.items() if name not in LAYOUT | CORRECTION)


def test_every_run_can_start(monkeypatch, tmp_path):
    names = [f"study-{kind.name}" for kind in (settings.NONE, *settings.MISMATCHES)]
    for name in names:
        monkeypatch.setitem(ENGINES, name, ENGINES["transformers"])
    monkeypatch.setitem(parser._CHOICES, "rollout_engine", tuple(ENGINES))
    monkeypatch.chdir(ROOT)
    found = {}
    for run in RUNS[:16]:
        config, _ = configure([*run.flags, f"--runs-dir={tmp_path}", f"--run-name={run.name}"], 1)
        assert config.launch.on_cpu
        assert (config.training.seed, config.engine.rollout_engine) == (1, f"study-{run.mismatch.name}")
        found[run.mismatch.name, run.correction.name] = config
    assert len(found) == 16
    stale = {kind for (kind, _), config in found.items() if config.rollouts.rollout_staleness}
    assert stale == {"staleness"}
    for kind in settings.MISMATCHES:
        corrections = [found[kind.name, how.name].correction for how in (settings.UNCORRECTED, *settings.CORRECTIONS)]
        assert len(set(corrections)) == 5
        assert [one.rollout_is_apply for one in corrections[:2]] == [False, True]
        assert [one.bypass_mode for one in corrections] == [False] * 4 + [True]


# The engine.


@pytest.fixture
def made(tmp_path):
    """An engine of a tiny model with the task's tokens, by its mismatch."""
    task = CountUp(seed=0)
    model = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=task.text.size
    )
    launch = SimpleNamespace(runs_dir=str(tmp_path), run_name="", device=torch.device("cpu"))
    inputs = EngineInputs(SimpleNamespace(launch=launch), model, task.text.eos, task.text.pad, 0)

    def make(**mismatch):
        found = engine.StudyEngine(inputs, **mismatch)
        torch.manual_seed(0)
        exact = TransformersEngine(model, "fp32", task.text.eos, task.text.pad, launch.device)
        for parameter in exact.model.parameters():
            parameter.mul_(20)
        return found, exact

    return make


def weights_of(exact):
    return list(checkpoint_tensors(exact.model).items())


def test_a_rounded_engine_holds_rounded_linear_layers_and_the_exact_rest(made):
    weight = torch.tensor([[0.4, -0.2, 0.19, -0.21], [0.0, 0.0, 0.0, 0.0], [1.0, 0.6, -1.0, 0.4]])
    wanted = torch.tensor([[0.4, 0.0, 0.0, -0.4], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -1.0, 0.0]])
    assert torch.equal(engine.round_to_levels(weight, 1), wanted)
    assert (engine.round_to_levels(weight, 127) - weight).abs().max() <= 0.5 / 127
    found, exact = made(levels=1)
    found.load_weights(weights_of(exact), 4)
    held, given = checkpoint_tensors(found.sampler.model), dict(weights_of(exact))
    changed = {name for name in given if not torch.equal(held[name], given[name])}
    assert changed == {name for name in given if name.endswith("_proj.weight")}
    assert all(torch.equal(held[name], engine.round_to_levels(given[name], 1)) for name in changed)
    assert all(torch.equal(kept, given[name]) for name, kept in checkpoint_tensors(found.exact.model).items())
    assert found.version == 4


def test_the_temperature_grows_with_the_version_and_its_log_probs_are_those_of_what_was_sampled(made):
    found, exact = made(warming=0.01)
    found.load_weights(weights_of(exact), 70)
    exact.load_weights(weights_of(found.exact), 70)
    prompts, seed = [[3, 4], [5, 6]], 9
    warmer = SamplingParams(temperature=1.01**70)
    assert found.sample(prompts, SamplingParams(), 8, seed) == exact.sample(prompts, warmer, 8, seed)
    greedy = SamplingParams(top_k=1)
    assert found.sample(prompts, greedy, 8, seed) == exact.sample(prompts, greedy, 8, seed)


@torch.inference_mode()
def test_the_expected_reward_is_that_of_all_answers_that_begin_right(made):
    found, exact = made()
    found.load_weights(weights_of(exact), 0)
    task, total = CountUp(seed=0), 0.0
    for problem in task.problems(0, 100, held_out=True):
        tokens, chance = task.text.encode(problem), 1.0
        for length in range(len(problem.label) + 1):
            logits = exact.model(input_ids=torch.tensor([tokens])).logits[0, -1].double()
            right = [*task.text.tokens_of(problem.label), task.text.eos][length]
            likely = float(logits.softmax(-1)[right])
            earned = task.reward(prompt="", response=problem.label[:length], label=problem.label, record={})
            if length == len(problem.label):
                # The response is whole: it ends here, or goes on with something else and lacks the place of the end.
                total += chance * (likely + (1 - likely) * (earned - 1 / (length + 1)))
            else:
                total += chance * (1 - likely) * earned
            tokens, chance = [*tokens, right], chance * likely
    rows = [json.loads(line) for line in found._file.read_text().splitlines()]
    assert rows == [{"step": 0, "reward": pytest.approx(total / 100, rel=1e-5)}]
    assert total > 0.5


# The queue.


@pytest.fixture
def two_steps():
    """A short run without mismatch."""
    kind = dataclasses.replace(settings.NONE, flags=("--train-iters=2", "--eval-interval=2"))
    return dataclasses.replace(RUNS[0], mismatch=kind)


@pytest.mark.processes
def test_a_run_is_made_once_and_measured(tmp_path, two_steps):
    said = []
    queue.run_all([two_steps], tmp_path, 2, said.append)
    assert said[0] == "0 of 1 runs are finished, 1 to go, 2 at a time"
    assert said[1].startswith("1/1 none-uncorrected-1 finished, ")
    own = tmp_path / two_steps.name
    before = (own / queue.DONE).read_bytes()
    queue.run_all([two_steps], tmp_path, 2, said.append)
    assert said[2:] == ["1 of 1 runs are finished, 0 to go, 2 at a time"]
    assert (own / queue.DONE).read_bytes() == before
    (found,) = results.gather([two_steps], tmp_path)
    assert found.seconds > 1
    assert [step for step, _ in found.policy] == [0]
    rows = [json.loads(line) for line in (own / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        known = row["rollout_corr/rollout_is_raw_eff_sample_size"]
        assert results._value(row, "ess") == pytest.approx(known, abs=1e-9)


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (settings.GAVE_UP, "error: all is lost"),
        (2, "ended with code 2 \\(error: all is lost\\): see .*log.txt, then start again"),
        (4, "ended with code 4 "),
    ],
)
def test_an_error_of_the_training_is_a_result_and_every_other_ends_the_study(tmp_path, monkeypatch, code, outcome):
    def start(run, folder):
        (folder / run.name).mkdir()
        (folder / run.name / queue.LOG).write_text("step 1\nerror: all is lost\n\n")
        return subprocess.Popen(["sh", "-c", f"exit {code}"])

    monkeypatch.setattr(queue, "_start", start)
    if code == settings.GAVE_UP:
        queue.run_all(RUNS[:1], tmp_path, 1, lambda line: None)
        assert queue.finished(RUNS[0], tmp_path).error == outcome
    else:
        with pytest.raises(queue.StudyError, match=outcome):
            queue.run_all(RUNS[:1], tmp_path, 1, lambda line: None)
        assert queue.finished(RUNS[0], tmp_path) is None


def test_what_is_under_way_ends_with_the_study(tmp_path, monkeypatch):
    started = []

    def start(run, folder):
        (folder / run.name).mkdir()
        (folder / run.name / queue.LOG).touch()
        started.append(subprocess.Popen(["sh", "-c", "exit 2" if started else "sleep 60"]))
        return started[-1]

    monkeypatch.setattr(queue, "_start", start)
    with pytest.raises(queue.StudyError, match="it said nothing"):
        queue.run_all(RUNS[:3], tmp_path, 2, lambda line: None)
    assert [process.poll() for process in started] == [-15, 2]


# The measurements.


def finished_run(folder, run, flags=None, rewards=(0.1, 0.5), error=None):
    """The files of a run of 12 steps."""
    own = folder / run.name
    own.mkdir(parents=True)
    (own / queue.DONE).write_text(json.dumps({"flags": flags or run.flags, "seconds": 60.0, "error": error}))
    row = {"reward/mean": 0.25, "grad_norm": 2.0, "policy/entropy": 1.5}
    row |= {"rollout_corr/kl": 0.5, "rollout_corr/k3_kl": 0.25, "rollout_corr/chi2_token": 1.25}
    rows = [{"step": 0, "eval/reward": 0.0}, *({"step": step, **row} for step in range(1, 13))]
    rows[3] |= {"grad_norm": float("inf")}
    rows[11] |= {"reward/mean": 0.75}
    (own / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    policy = [{"step": 10 * number, "reward": reward} for number, reward in enumerate(rewards)]
    lines = [*policy, {"step": 15, "reward": 1.0}]
    (own / settings.POLICY_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in lines))


def test_gathering(tmp_path):
    finished_run(tmp_path, RUNS[1])
    (found,) = results.gather(RUNS[1:2], tmp_path)
    assert (found.mismatch, found.correction, found.seed, found.seconds) == ("rounding", "uncorrected", 1, 60.0)
    assert (found.policy, found.final, found.best) == ([(0, 0.1), (10, 0.5)], 0.5, 0.5)
    means = {"kl": 0.5, "ess": 0.25, "grad_norm": 2.0, "entropy": 1.5}
    assert found.curves == {"sampled": [0.25, 0.5], **{measure: [value] * 2 for measure, value in means.items()}}
    assert found.mean("sampled") == 0.375
    results.write([found], tmp_path / "study.json")
    assert results.read(tmp_path / "study.json") == [found]
    with pytest.raises(queue.StudyError, match="rounding-token_tis-1 is not finished: start the study again"):
        results.gather(RUNS[1:3], tmp_path)
    finished_run(tmp_path, RUNS[2], error="error: no memory")
    (tmp_path / RUNS[2].name / "metrics.jsonl").write_text("")
    with pytest.raises(queue.StudyError, match=r"token_tis-1 ended before .* \(error: no memory\)"):
        results.gather(RUNS[1:3], tmp_path)

    finished_run(tmp_path, RUNS[0], flags=["--lr=1"])
    with pytest.raises(queue.StudyError, match="none-uncorrected-1 was run with other flags"):
        queue.run_all(RUNS[:1], tmp_path, 1, lambda line: None)


def test_what_is_not_finite_is_left_out(tmp_path):
    finished_run(tmp_path, RUNS[1])
    path = tmp_path / RUNS[1].name / "metrics.jsonl"
    path.write_text(path.read_text().replace('"grad_norm": 2.0', '"grad_norm": NaN'))
    (found,) = results.gather(RUNS[1:2], tmp_path)
    assert found.curves["grad_norm"] == [None, None]
    assert math.isnan(found.mean("grad_norm"))


@pytest.mark.parametrize(
    ("rewards", "error", "said"),
    [
        ((0.1, 0.95), None, "sound"),
        ((0.1, 0.81), None, "sound"),
        ((0.9, 0.79), None, "degraded"),
        ((0.1, 0.2), None, "degraded"),
        ((0.9, 0.44), None, "collapsed"),
        ((0.1, 0.95), "error: all is lost", "collapsed"),
    ],
)
def test_verdicts(tmp_path, rewards, error, said):
    finished_run(tmp_path, RUNS[1], rewards=rewards, error=error)
    (found,) = results.gather(RUNS[1:2], tmp_path)
    assert results.verdict(found, reference=0.9) == said


@pytest.fixture
def outcomes(tmp_path):
    """Outcomes of all runs; each seed earns a twentieth more than the one before."""
    for run in RUNS:
        finished_run(tmp_path, run, rewards=(0.1, 0.6 + run.seed / 20))
    return results.gather(RUNS, tmp_path)


def test_the_table_and_the_figures_of_runs(outcomes, tmp_path):
    lines = document.table(outcomes).splitlines()
    assert len([line for line in lines if line.startswith("| ")]) == 1 + 16
    assert lines[2].startswith("| no mismatch | without correction | 0.70 (0.65 to 0.75) | 3 sound | 0.50 ")
    assert lines[-1].startswith(
        "48 runs, 2880 seconds of the processor together, 60 each: two at a time that is 24 min"
    )
    nothing = dataclasses.replace(outcomes[0], curves={measure: [None] for measure in results.MEASURES})
    assert document.table([nothing, *outcomes[1:]]).splitlines()[2].count("nan (") == 5, "which is no 0"
    page = tmp_path / "page.md"
    page.write_text(f"before\n{document.begin_of('study')}\nyesterday\n{document.END}\nafter\n")
    for _ in range(2):
        document.put_table(outcomes, page, "study")
    text = page.read_text()
    assert text.startswith(f"before\n{document.begin_of('study')}\n\n| mismatch |")
    assert text.endswith(f"two cores.\n\n{document.END}\nafter\n")
    assert "yesterday" not in text
    page.write_text("nothing\n")
    with pytest.raises(ValueError, match=r"page\.md .* <!-- the table of study\.json"):
        document.put_table(outcomes, page, "study")
    for draw in (pictures.draw_rewards, pictures.draw_measures):
        draw(outcomes, tmp_path / f"{draw.__name__}.png")
        assert (tmp_path / f"{draw.__name__}.png").stat().st_size > 10_000


# The committed files.


def committed(name="study"):
    return results.read(ROOT / "docs" / f"{name}.json")


SETS = {
    "study": RUNS,
    "study_entropy": list(settings.runs_without_entropy()),
    "study_baselines": list(settings.runs_of_baselines()),
}


@pytest.mark.parametrize("name", SETS)
def test_the_data_and_the_page_are_those_of_all_runs(name):
    assert [(one.mismatch, one.correction, one.seed) for one in committed(name)] == [
        (run.mismatch.name, run.correction.name, run.seed) for run in SETS[name]
    ]
    assert all(one.policy[-1][0] == 200 for one in committed(name))
    text = (ROOT / "docs" / "study.md").read_text()
    _, _, after = text.partition(f"{document.begin_of(name)}\n")
    assert after.partition(document.END)[0] == f"\n{document.table(committed(name))}\n"
    for picture in (f"{name}.png", f"{name}_measures.png") * (name != "study_baselines"):
        assert (ROOT / "docs" / picture).stat().st_size < 150_000


def of(mismatch, correction, name="study"):
    """The last rewards of all seeds."""
    return [one.final for one in committed(name) if (one.mismatch, one.correction) == (mismatch, correction)]


ALL = ("uncorrected", *(how.name for how in settings.CORRECTIONS))
BETTER = ("token_tis", "geo_rs_token_tis")


def prose(name):
    """The page without its tables, on one line."""
    return " ".join(re.sub(r"^\|.*$", "", (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE).split())


def words_of(name):
    return set(re.findall(r"\d\.\d\d", prose(name)))


def test_readme_and_the_page_have_the_mean_rewards():
    kinds = [*itertools.product(("staleness", "rounding"), ("uncorrected", *BETTER))]
    kinds += [("temperature", "uncorrected"), ("none", "uncorrected")]
    means = {kind: f"{sum(of(*kind)) / 3:.2f}" for kind in kinds}
    assert set(means.values()) <= words_of("docs/study.md")
    pairs = [("staleness", "uncorrected"), ("staleness", "token_tis")]
    pairs += [("rounding", "uncorrected"), ("rounding", "token_tis"), ("none", "uncorrected")]
    shown = [means[pair] for pair in pairs]
    shown += [f"{sum(of('temperature', how, 'study_baselines')) / 3:.2f}" for how in ("seq_tis", "seq_tis_weighted")]
    assert re.search(".*".join(map(re.escape, shown)), prose("README.md")), shown
    last = [of("temperature", how, "study_entropy")[0] for how in ("uncorrected", *BETTER)]
    assert {f"{reward:.2f}" for reward in last} <= words_of("docs/study.md")


def test_what_the_page_concludes():
    """How the corrections compare, with the entropy bonus in each of three seeds."""
    for mismatch in ("rounding", "staleness", "temperature"):
        for how in ALL[1:] if mismatch == "temperature" else BETTER:
            pairs = zip(of(mismatch, how), of(mismatch, "uncorrected"), strict=True)
            assert {corrected > plain for corrected, plain in pairs} == {mismatch != "temperature"}
        means = {how: sum(of(mismatch, how)) for how in ALL}
        assert min(means, key=means.get) == "bypass"
        assert means["seq_tis"] < means["uncorrected"]
    verdicts = [(one, results.verdict(one, results.reference_of(committed()))) for one in committed()]
    collapsed = [one for one, said in verdicts if said == "collapsed"]
    assert (len(collapsed), {one.mismatch for one in collapsed}) == (5, {"temperature"})
    sound = [one for one, said in verdicts if said == "sound" and one.mismatch in ("rounding", "staleness")]
    assert len(sound) == 3
    assert "uncorrected" not in {one.correction for one in (*collapsed, *sound)}
    assert not any(one.error for one in committed())


def test_what_the_page_concludes_without_an_entropy_bonus():
    last = {kind: of(*kind, "study_entropy")[0] for kind in itertools.product(("rounding", "staleness"), ALL)}
    for mismatch in ("rounding", "staleness"):
        usual = sum(of(mismatch, "token_tis")) / 3 - sum(of(mismatch, "uncorrected")) / 3
        assert 0 < last[mismatch, "token_tis"] - last[mismatch, "uncorrected"] < usual
    assert last["staleness", "geo_rs_token_tis"] < last["staleness", "uncorrected"]
    assert max(of("temperature", how, "study_entropy")[0] for how in ("seq_tis", "bypass")) < 0.3


def test_what_the_page_concludes_of_two_baselines():
    verdicts = {}
    for kind, how in [*((kind.name, "seq_tis") for kind in settings.MISMATCHES), ("temperature", "token_tis")]:
        group, weighted = (of(kind, name, "study_baselines") for name in (how, f"{how}_weighted"))
        verdicts[kind, how] = {after > before for before, after in zip(group, weighted, strict=True)}
        assert {f"{reward:.2f}" for reward in (*group, *weighted)} <= words_of("docs/study.md")
    assert verdicts == {
        ("rounding", "seq_tis"): {True},
        ("staleness", "seq_tis"): {True, False},
        ("temperature", "seq_tis"): {True},
        ("temperature", "token_tis"): {True, False},
    }
    data = committed("study_baselines")
    said = {one.correction: results.verdict(one, results.reference_of(data)) for one in data}
    assert (said["seq_tis"], said["seq_tis_weighted"]) == ("collapsed", "sound"), "the last ones are of temperature"
    norms = [one.mean("grad_norm") for one in data if one.correction == "token_tis_weighted"]
    assert f"gradient norm is {sum(norms) / 3:.0f} in the mean" in prose("docs/study.md")


def test_runs_of_another_engine_are_measured_by_their_evaluations(tmp_path, capsys):
    (run, *_) = runs = list(settings.hard_runs(tmp_path))
    assert len({run.name for run in runs}) == 3
    finished_run(tmp_path, run)
    (tmp_path / run.name / settings.POLICY_FILE).unlink()
    (found,) = results.gather([run], tmp_path)
    assert found.policy == [(0, 0.0)]
    command.tell_hard([found])
    assert "seed 1: 0.0% at step 0; means kl 0.5" in capsys.readouterr().out
