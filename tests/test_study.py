"""The study: its page names its runs, they are made once, and the page has their measurements."""

import dataclasses
import functools
import json
import math
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace

import pytest
import torch
import transformers
import yaml

from benchmarks.study import comparison, document, engine, late, pictures, queue, results, settings, trainer
from benchmarks.study.design import LATE_FILE, POLICY_FILE, Mismatch
from benchmarks.study.task import CountUp
from megatron_rc.launch.engines.registry import ENGINES, EngineInputs
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.flags import parser
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rollouts.evaluation import sampling_of
from megatron_rc.launch.rollouts.samples import GoodSamples
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from megatron_rc.records.rollout import SamplingParams
from tests.launch.tasks.test_text import tokenizer_folder
from tests.support.paths import ROOT
from tests.support.runs import wait_for

RUNS = list(settings.runs_of(settings.BLOCKS.values()))
MAIN = settings.MAIN.runs
# Settings of its launch file that are not the default task's: engine, correction, evaluation, processes.
OWN = """cpu eval-answers eval-interval eval-problems micro-batch-size pipeline-model-parallel-size
    rollout-check-tolerance rollout-correction-preset rollout-dtype rollout-rs rollout-rs-threshold sequence-parallel
    task tensor-model-parallel-size world-size""".split()


def test_the_study_trains_the_default_task():
    ours, default = (
        yaml.safe_load((ROOT / "configs" / folder / "count_up.yaml").read_text()) for folder in ("study", "launch")
    )
    assert sorted(name for name in {*ours, *default} if ours.get(name) != default.get(name)) == OWN


@pytest.fixture
def study_engines(monkeypatch):
    """The names of the study's engines as choices of ``--rollout-engine``."""
    for kind in settings.ENGINES:
        monkeypatch.setitem(ENGINES, f"study-{kind.name}", ENGINES["transformers"])
    monkeypatch.setitem(parser._CHOICES, "rollout_engine", tuple(ENGINES))
    # A parser with these engines for this test alone: others of the process may have made the launcher's already.
    monkeypatch.setattr(parser, "PARSER", parser.build_parser(with_megatron=False))


def test_a_run_of_a_language_model_can_start(monkeypatch, tmp_path, study_engines):
    """With the sums of its example and a tiny model."""
    monkeypatch.chdir(tmp_path)
    for folder in ("configs", "examples"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    runpy.run_path("examples/smollm2_sums.py")["main"]("sums")
    model = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=300
    )
    transformers.AutoModelForCausalLM.from_config(model).save_pretrained(tmp_path / "model")
    tokenizer_folder(tmp_path / "model")
    for name, engine_name in (("smollm2", "transformers"), ("smollm2_int8", "study-int8")):
        run = next(run for run in RUNS if run.setting.name == name)
        # One byte is one token; the real tokenizer has several in one.
        more = ["--load-hf=model", "--runs-dir=runs", f"--run-name={run.name}", "--seq-length=512"]
        config, _ = configure([*run.flags, *more], 1)
        assert config.launch.on_cpu
        assert config.training.seed == run.seed
        assert config.engine.rollout_engine == engine_name
        # Evaluations are told apart from rollouts by this.
        assert sampling_of(config).top_k == 1
        assert config.rollouts.sampling.top_k != 1


def test_every_run_can_start(monkeypatch, tmp_path, study_engines):
    monkeypatch.chdir(ROOT)
    configured = set()
    for run in (run for run in RUNS if not run.setting.needs_model):
        assert f"study-{run.mismatch.name}" in ENGINES
        # One of each setting, and of the mismatches that differ in more than their engine's name.
        kinds = {run.setting.name, (run.mismatch.staleness, run.mismatch.more_flags)}
        if kinds <= configured:
            continue
        configured |= kinds
        config, _ = configure([*run.flags, f"--runs-dir={tmp_path}", f"--run-name={run.name}"], 1)
        assert config.launch.on_cpu
        assert (config.training.seed, config.engine.rollout_engine) == (run.seed, f"study-{run.mismatch.name}")


# The engine.


@pytest.fixture
def made(tmp_path):
    """An engine of a tiny model with the task's tokens, by its mismatch."""
    task = CountUp(seed=0)
    model = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=task.text.size
    )
    launch = SimpleNamespace(runs_dir=str(tmp_path), run_name="", device=torch.device("cpu"))

    def make(task_name="", **mismatch):
        config = SimpleNamespace(
            launch=launch,
            replays_rollouts=False,
            task=SimpleNamespace(task=task_name),
            rollouts=SimpleNamespace(sequences=NUM_LATE),
            engine=SimpleNamespace(rollout_url=None, rollout_engine="study", rollout_dtype="int8"),
            guards=SimpleNamespace(bad_samples="drop"),
            model=SimpleNamespace(vocab_size=task.text.size),
            correction=SimpleNamespace(bad_log_probs="error"),
        )
        inputs = EngineInputs(config, model, task.text, 0)
        trainer.register(Mismatch("test", "", mismatch))
        study_engine = ENGINES.pop("study-test").make(inputs)
        study_engine.config = config  # for tests of the launcher's part
        torch.manual_seed(0)
        exact = TransformersEngine(model, "fp32", task.text.ends, task.text.pad, launch.device)
        for parameter in exact.model.parameters():
            parameter.mul_(20)
        return study_engine, exact

    return make


def weights_of(exact):
    return list(checkpoint_tensors(exact.model).items())


def test_a_rounded_engine_holds_rounded_linear_layers_and_the_exact_rest(made):
    weight = torch.tensor([[0.4, -0.2, 0.19, -0.21], [0.0, 0.0, 0.0, 0.0], [1.0, 0.6, -1.0, 0.4]])
    expected = torch.tensor([[0.4, 0.0, 0.0, -0.4], [0.0, 0.0, 0.0, 0.0], [1.0, 1.0, -1.0, 0.0]])
    assert torch.equal(engine.round_to_levels(weight, 1), expected)
    assert (engine.round_to_levels(weight, 127) - weight).abs().max() <= 0.5 / 127
    study_engine, exact = made(levels=1)
    study_engine.load_weights(weights_of(exact), 4)
    rounded_weights = checkpoint_tensors(study_engine.sampler.model)
    exact_weights = dict(weights_of(exact))
    changed = {name for name in exact_weights if not torch.equal(rounded_weights[name], exact_weights[name])}
    assert changed == {name for name in exact_weights if name.endswith("_proj.weight")}
    assert all(torch.equal(rounded_weights[name], engine.round_to_levels(exact_weights[name], 1)) for name in changed)
    assert all(
        torch.equal(tensor, exact_weights[name])
        for name, tensor in checkpoint_tensors(study_engine.exact.model).items()
    )
    assert study_engine.version == 4


@torch.inference_mode()
def test_the_expected_reward_is_that_of_all_answers_that_begin_right(made):
    study_engine, exact = made()
    study_engine.load_weights(weights_of(exact), 0)
    task = CountUp(seed=0)
    total = 0.0
    total_right = 0.0
    for problem in task.problems(0, 100, held_out=True):
        tokens = task.text.encode(problem)
        chance = 1.0
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
            tokens = [*tokens, right]
            chance = chance * likely
        total_right += chance
    rows = [json.loads(line) for line in study_engine.policy_file.read_text().splitlines()]
    right_share = pytest.approx(total_right / 100, rel=1e-5)
    assert rows == [{"step": 0, "reward": pytest.approx(total / 100, rel=1e-5), "right": right_share}]
    assert total > 0.5


def test_an_engine_evaluates_the_exact_weights_and_samples_with_rounded_ones(made):
    int8_engine, exact = made(**settings.INT8.engine)
    int8_engine.load_weights(weights_of(exact), 2)
    rounded = TransformersEngine(exact.model.config, "int8", exact.ends, exact.pad, torch.device("cpu"))
    rounded.load_weights(weights_of(exact), 2)
    samples = int8_engine.sample(PROMPTS, SamplingParams(), 6, seed=3)
    assert samples == rounded.sample(PROMPTS, SamplingParams(), 6, seed=3)
    assert samples != exact.sample(PROMPTS, SamplingParams(), 6, seed=3)
    # The most likely tokens of rounded weights are the same here, so the rounded weights are made useless.
    for parameter in int8_engine.sampler.model.parameters():
        parameter.zero_()
    greedy = SamplingParams(top_k=1)
    assert int8_engine.sample(PROMPTS, greedy, 6, seed=3) == exact.sample(PROMPTS, greedy, 6, seed=3)
    assert int8_engine.version == 2


# Late responses.


def test_times_grow_with_the_length_and_the_closed_form_is_their_distribution():
    noise = late.normal_noise(20_000, seed=7)
    assert noise == late.normal_noise(20_000, seed=7)
    assert noise[:3] != late.normal_noise(3, seed=8)
    assert late.time_of(10, 0.0) == 4
    assert late.time_of(5, 1.0) == pytest.approx(2 * math.exp(0.3))

    # A large batch of four lengths, of which 55 % finish first.
    lengths = [1, 4, 7, 10] * 5000
    chances = late.chances_in_time(lengths[:4], share=0.55)
    assert sum(chances) / len(chances) == pytest.approx(0.55, abs=1e-9)
    times = [late.time_of(length, z) for length, z in zip(lengths, noise, strict=True)]
    limit = sorted(times)[11_000 - 1]
    for index, length in enumerate(lengths[:4]):
        normal = 0.5 * (1 + math.erf(math.log(limit * 10 / (4 * length)) / 0.3 / math.sqrt(2)))
        assert chances[index] == pytest.approx(normal, abs=0.015)
        share = sum(time <= limit for time in times[index::4]) / 5000
        assert share == pytest.approx(normal, abs=0.015)


def test_a_batch_of_late_responses_has_as_many_optimizer_steps_as_its_launch_file():
    flags = yaml.safe_load((ROOT / "configs" / "study" / "count_up.yaml").read_text())
    responses = flags["grpo-prompts-per-step"] * flags["grpo-group-size"]
    assert flags["grpo-iterations"] * responses / flags["global-batch-size"] == late.STEPS_OF_A_BATCH
    assert CountUp(seed=0).max_response_length == late.LONGEST


NUM_LATE = 64
NUM_IN_TIME = 35
PROMPTS = [[3 + index % 10, 4] for index in range(NUM_LATE)]


@pytest.fixture
def late_engine(made):
    """A late engine with weights of some versions, by its policy; None: the study's engine."""

    def make(policy, versions=(0,)):
        made_engine, exact = made(late=policy) if policy else made()
        for version in versions:
            for parameter in exact.model.parameters():
                parameter.mul_(0.9)
            made_engine.load_weights(weights_of(exact), version)
        return made_engine

    return make


def sampled(made_engine, prompts=PROMPTS, seed=5):
    return made_engine.sample(prompts, SamplingParams(), late.LONGEST, seed)


def times_of(samples):
    noise = late.normal_noise(len(samples), seed=5)
    return [late.time_of(len(sample.token_ids), z) for sample, z in zip(samples, noise, strict=True)]


def batch_rows(late_engine):
    return [json.loads(line) for line in late_engine.policy_file.with_name(LATE_FILE).read_text().splitlines()]


def test_waiting_samples_what_the_exact_engine_samples(late_engine):
    waiting = late_engine("wait")
    waited = sampled(waiting)
    exact = sampled(late_engine(None))
    assert [(sample.token_ids, sample.log_probs) for sample in waited] == [
        (sample.token_ids, sample.log_probs) for sample in exact
    ]
    assert {sample.fault for sample in waited} == {None}
    (row,) = batch_rows(waiting)
    assert row == {
        "step": 0,
        "expected/shortest": 1.0,
        "expected/longest": 1.0,
        "batch_time": pytest.approx(max(times_of(waited))),
    }


def test_dropping_leaves_out_what_is_late_and_tells_the_expected_rates(late_engine):
    waited = sampled(late_engine("wait"))
    dropping = late_engine("drop")
    dropped = sampled(dropping)
    assert [sample.token_ids for sample in dropped] == [sample.token_ids for sample in waited]
    times = times_of(waited)
    is_late = [sample.fault is not None for sample in dropped]
    # 55 % of 64 responses, rounded down: the 35 that finish first.
    assert sorted(range(NUM_LATE), key=lambda index: times[index])[:NUM_IN_TIME] == sorted(
        (index for index in range(NUM_LATE) if not is_late[index]), key=lambda index: times[index]
    )
    lengths = [len(sample.token_ids) for sample in waited]
    chances = sorted(zip(lengths, late.chances_in_time(lengths, NUM_IN_TIME / NUM_LATE), strict=True))
    (row,) = batch_rows(dropping)
    quarter = NUM_LATE // 4
    assert row["expected/shortest"] == pytest.approx(sum(chance for _, chance in chances[:quarter]) / quarter)
    assert row["expected/longest"] == pytest.approx(sum(chance for _, chance in chances[-quarter:]) / quarter)
    assert row["batch_time"] == pytest.approx(sorted(times)[NUM_IN_TIME - 1])
    assert {sample.fault for sample in sampled(dropping, PROMPTS[:20])} == {None}, "an evaluation is never late"

    # The launcher drops them, and keeps their lengths for its account.
    good_samples = GoodSamples(dropping.config, dropping, CountUp(seed=0).text.ends, replica=0)
    used = good_samples(PROMPTS, SamplingParams(), late.LONGEST, 5)
    assert [not sample.token_ids for sample in used] == is_late
    bad_lengths = [sample.bad_lengths for sample in used]
    expected = [(length,) if late else () for length, late in zip(lengths, is_late, strict=True)]
    assert bad_lengths == expected


def test_dropping_at_random_leaves_out_as_many_whatever_their_length(late_engine):
    waited = sampled(late_engine("wait"))
    dropping = late_engine("drop_random")
    dropped = sampled(dropping)
    is_late = [sample.fault is not None for sample in dropped]
    assert is_late.count(False) == NUM_IN_TIME
    shortest_late = min(len(sample.token_ids) for sample in dropped if sample.fault)
    assert shortest_late == min(len(sample.token_ids) for sample in dropped), "short responses are dropped as well"
    (row,) = batch_rows(dropping)
    assert row["expected/shortest"] == row["expected/longest"] == pytest.approx(NUM_IN_TIME / NUM_LATE)
    # It waits for the responses that train.
    times_in_time = [time for time, late in zip(times_of(waited), is_late, strict=True) if not late]
    assert row["batch_time"] == pytest.approx(max(times_in_time))


def test_a_paced_response_is_of_weights_as_old_as_it_takes(late_engine, monkeypatch):
    versions = (0, 2, 4, 6, 8, 10, 12)
    pacing = late_engine("pace", versions)
    assert list(pacing.kept_weights) == [4, 6, 8, 10, 12]
    seeds = []
    sample_with_seed = pacing.sampler.sample

    def sample(prompts, params, max_new_tokens, seed):
        seeds.append(seed)
        return sample_with_seed(prompts, params, max_new_tokens, seed)

    monkeypatch.setattr(pacing.sampler, "sample", sample)
    paced = sampled(pacing)

    # With one seed, the first responses of each version would begin with the same draws.
    assert seeds[0] == 5
    assert len(seeds) > 5, "some versions sample in both rounds"
    assert len(set(seeds)) == len(seeds)

    (row,) = batch_rows(pacing)
    assert row["batch_time"] == 2
    waited = sampled(late_engine("wait", versions))
    ages = []
    num_as_old = 0
    for index, (sample, time) in enumerate(zip(paced, times_of(paced), strict=True)):
        (version,) = set(sample.versions)
        ages.append(12 - version)
        num_as_old += version == pacing.weights_of_age(time)
        if version == 12:
            assert sample.token_ids == waited[index].token_ids
    assert set(ages) == {2, 4, 6, 8}
    assert num_as_old > 0.8 * NUM_LATE
    assert pacing.weights_of_age(0.5) == 10
    assert pacing.weights_of_age(30) == 4


# The queue.


@pytest.fixture
def two_steps():
    """A short run without mismatch."""
    short = dataclasses.replace(settings.NONE, more_flags=("--train-iters=2", "--eval-interval=2"))
    return dataclasses.replace(MAIN[0], mismatch=short)


@pytest.mark.processes
def test_a_run_is_made_once_and_measured(monkeypatch, tmp_path, two_steps):
    messages = []
    data = tmp_path / "data.json"

    def say(message):
        messages.append(message)
        # From here on another commit is checked out: the runs that start later are of its code.
        monkeypatch.setattr(queue, "_commit", lambda: "abc1234")

    queue.run_all([two_steps], data, tmp_path, 2, say)
    assert messages[0] == f"0 of 1 runs are in {data}, 1 to go, 2 at a time"
    assert messages[1].startswith("1/1 count_up-none-uncorrected-1 finished, ")
    before = data.read_bytes()
    queue.run_all([two_steps], data, tmp_path, 2, messages.append)
    assert messages[2:] == [f"1 of 1 runs are in {data}, 0 to go, 2 at a time"]
    assert data.read_bytes() == before
    (outcome,) = results.read(data)
    assert outcome.seconds > 1
    assert outcome.commit == "abc1234"
    assert outcome.key == two_steps.key
    assert [step for step, _ in outcome.policy] == [0, 2]
    rows = [json.loads(line) for line in (tmp_path / two_steps.name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "grad_norm" in row]
    assert len(steps) == 2
    for row in steps:
        expected = row["rollout_corr/rollout_is_raw_eff_sample_size"]
        assert results.value_of(row, "ess") == pytest.approx(expected, abs=1e-9)
        assert row.keys() >= {*results.METRIC_OF.values()}
    with pytest.raises(queue.StudyError, match="has count_up-none-uncorrected-1 with other flags"):
        queue.run_all(MAIN[:1], data, tmp_path, 1, messages.append)


@pytest.mark.processes
def test_a_run_ends_with_its_queue(tmp_path):
    """A run that went on would write beside the next try, and the two would be measured as one."""
    run = MAIN[0]
    (tmp_path / run.name).mkdir()
    (tmp_path / run.name / "metrics.jsonl").write_text("of an earlier try\n")
    command = [sys.executable, "-m", "benchmarks.study", "main", "--at-once", "1"]
    with subprocess.Popen(
        [*command, "--data", str(tmp_path / "data.json"), "--runs", str(tmp_path)], cwd=ROOT, stdout=subprocess.DEVNULL
    ) as study:
        lock = tmp_path / run.name / ".in-use"
        try:
            wait_for(lambda: lock.is_file() and lock.read_text(), process=study)
            assert "earlier" not in "".join(path.read_text() for path in lock.parent.glob("metrics*"))
            with pytest.raises(RunError, match=f"--runs {tmp_path}: another run .* writes there"):
                queue.run_all([run], tmp_path / "data.json", tmp_path, 1, print)
            assert lock.is_file(), "the refused queue removed nothing"
        finally:
            study.kill()
    process = int(re.match(r"process (\d+) on ", lock.read_text())[1])
    # Well before the run's own end.
    wait_for(lambda: not Path(f"/proc/{process}").exists(), seconds=10)


# The measurements.


def finished_run(folder, run, rewards=(0.1, 0.5)):
    """The files of a run of 12 steps."""
    run_folder = folder / run.name
    run_folder.mkdir(parents=True)
    row = {"reward/mean": 0.25, "grad_norm": 2.0, "policy/entropy": 1.5, "rollout/response_length": 8.0}
    row |= {"rollout_corr/kl": 0.5, "rollout_corr/k3_kl": 0.25, "rollout_corr/chi2_token": 1.25}
    rows = [{"step": 0, "eval/reward": 0.0}, *({"step": step, **row} for step in range(1, 13))]
    rows[-1] |= {"skipped_steps": 3.0}
    rows[3] |= {"grad_norm": float("inf")}
    rows[11] |= {"reward/mean": 0.75, "rollout_corr/kl": 0.75}
    (run_folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    policy = [{"step": 10 * number, "reward": reward, "right": reward / 2} for number, reward in enumerate(rewards)]
    lines = [*policy, {"step": 15, "reward": 0.0, "right": 0.0}, {"step": 18, "reward": rewards[-1], "right": 0.25}]
    (run_folder / POLICY_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in lines))


def measured(run, folder, error=None):
    return results.measured(run, folder / run.name, "abc", 60.0, error)


def test_measuring(tmp_path):
    finished_run(tmp_path, MAIN[1])
    outcome = measured(MAIN[1], tmp_path)
    assert outcome.key == ("count_up", "rounding", "uncorrected", 1)
    assert (outcome.flags, outcome.commit, outcome.seconds) == (" ".join(MAIN[1].flags), "abc", 60.0)
    assert (outcome.policy, outcome.final, outcome.best) == ([(0, 0.1), (10, 0.5), (18, 0.5)], 0.5, 0.5)
    assert outcome.right == [(0, 0.05), (10, 0.25), (18, 0.25)]
    assert outcome.over_the_run == pytest.approx((10 * 0.3 + 8 * 0.5) / 18)
    means = {"k3": 0.25, "grad_norm": 2.0, "entropy": 1.5, "length": 8.0}
    assert {measure: outcome.curves[measure] for measure in means} == {
        name: [value] * 2 for name, value in means.items()
    }
    assert outcome.skipped_steps == 3
    assert (outcome.curves["sampled"], outcome.curves["kl"], outcome.largest_kl) == ([0.25, 0.5], [0.5, 0.625], 0.75)
    assert outcome.curves["ess"][0] == 0.25
    assert outcome.curves["rejected"] == [None, None]
    assert math.isnan(outcome.mean("rejected"))
    assert outcome.mean("sampled") == 0.375
    results.write([outcome], tmp_path / "study.json")
    assert results.read(tmp_path / "study.json") == [outcome]
    path = tmp_path / MAIN[1].name / "metrics.jsonl"
    path.write_text(path.read_text().replace('"grad_norm": 2.0', '"grad_norm": NaN'))
    assert measured(MAIN[1], tmp_path).curves["grad_norm"] == [None, None]
    path.write_text("")
    assert measured(MAIN[1], tmp_path) is None, "ended before its first step"


def test_a_late_run_has_its_inclusion_rates_beside_the_expected_ones(tmp_path):
    run = settings.SELECTION.runs[3]
    finished_run(tmp_path, run)
    assert measured(run, tmp_path).curves.keys() == {*results.MEASURES}
    metrics = tmp_path / run.name / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    for row in rows[2::2]:  # the last step of each batch of two
        row["selection/inclusion_longest"] = 0.75
    # A batch whose steps are left out, because every reward is 1.
    for row in rows[5:7]:
        del row["grad_norm"]
        row["skipped_steps"] = 1.0
    rows[6] |= {"selection/inclusion_longest": 0.0, "selection/prompts_without": 1.0}
    metrics.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    expected = [
        {"step": step, "expected/longest": 0.7, "expected/shortest": 0.9, "batch_time": 6.5} for step in range(0, 12, 2)
    ]
    (tmp_path / run.name / LATE_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in expected))
    outcome = measured(run, tmp_path)
    assert outcome.curves.keys() == {*results.MEASURES, *results.LATE_METRIC_OF}
    # Ten steps that were made: four are left in the first window, and all of them have the rate 0.75.
    assert outcome.curves["inclusion_longest"] == [0.75]
    assert outcome.curves["prompts_without"] == [None]
    assert outcome.curves["expected_longest"] == [0.7]
    assert outcome.mean("batch_time") == pytest.approx(6.5)
    assert outcome.mean("expected_shortest") == pytest.approx(0.9)


# Comparisons with five seeds.


def test_a_difference_of_means_has_the_textbooks_interval_and_chance():
    """Student's data of two sleeping drugs, in R's documentation of t.test (Welch): t -1.8608, 17.776 degrees."""
    first = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    second = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    difference = comparison.difference_of(first, second)
    assert difference.mean == pytest.approx(-1.58)
    assert (difference.low, difference.high) == pytest.approx((-3.3654832, 0.2054832), abs=1e-6)
    assert difference.p == pytest.approx(0.07939, abs=1e-5)


def test_samples_without_spread_have_no_interval_and_no_verdict():
    difference = comparison.difference_of([0.0, 0.0], [1.0, 1.0])
    assert (difference.mean, difference.p) == (-1, 1)
    compared = comparison.Comparison(difference, p=1.0)
    assert compared.verdict == "undecided"
    assert not compared.is_above_margin
    assert document._difference(compared) == "−1.00 (no spread)"
    assert not comparison.Comparison(comparison.difference_of([1.0, 1.0], [1.0, 1.0]), p=1.0).is_above_margin


def test_chances_are_corrected_for_their_number():
    """Holm's steps: 0.01 times 4, 0.02 times 3, then never smaller than before, and at most 1."""
    chances = {("a",): 0.02, ("b",): 0.01, ("c",): 0.021, ("d",): 0.9}
    assert comparison.holm(chances) == pytest.approx({("b",): 0.04, ("a",): 0.06, ("c",): 0.06, ("d",): 0.9})


REWARDS = {"token_tis": 0.9, "bypass": 0.1, "late_drop": 0.2}


def made_outcome(run):
    """An outcome with the reward of its correction or mismatch, and a small difference for each seed."""
    reward = REWARDS.get(run.mismatch.name, REWARDS.get(run.correction.name, 0.5)) + run.seed / 1000
    policy = [(0, reward), (200, reward)]
    return results.Outcome(*run.key, "", "", 1.0, None, policy, {}, right=policy)


def test_a_table_of_evaluations_has_those_of_a_run_that_an_error_ended():
    first, ended, *_ = settings.HARD.runs
    policy = [(0, 0.1), (12, 0.2), (24, 0.3)]
    outcomes = [
        results.Outcome(*first.key, "", "", 1.0, None, policy, {}, right=policy),
        results.Outcome(*ended.key, "", "", 1.0, "out of memory", policy[:2], {}, right=policy[:2]),
    ]
    whole, short = document.table(outcomes, settings.HARD).splitlines()[2:4]
    assert "| 10.0% | 20.0% | 30.0% |" in whole
    assert "| 10.0% | 20.0% |  |" in short


def test_the_table_of_the_int8_engine_has_the_steps_that_were_not_made():
    outcomes = [dataclasses.replace(made_outcome(run), skipped_steps=run.seed) for run in settings.INT8_ENGINE.runs]
    table = document.table(outcomes, settings.INT8_ENGINE)
    assert "| ESS | rejected | skipped steps |" in table
    assert row_of(table, "weights in int8", "token TIS").endswith("| 2.00 (1.00 to 3.00) |")
    assert "Of the 3 comparisons in this table: 1 better, 1 worse, 1 undecided." in table


def row_of(table, *cells):
    return next(line for line in table.splitlines() if line.startswith(f"| {' | '.join(cells)} |"))


def test_verdicts_and_pictures_of_five_seeds_wait_for_all_runs(tmp_path):
    family = settings.family_of(settings.WORKING_SHORT)
    assert family == [settings.WORKING_SHORT, settings.WORKING_LONG]
    outcomes = [made_outcome(run) for run in settings.runs_of(family)]
    assert comparison.comparisons(outcomes[:-1], family) == {}
    compared = comparison.comparisons(outcomes, family)
    # Three measures of short responses; whole right answers of long ones are not compared.
    assert len(compared) == 4 * 7 * (3 + 2)
    picture = tmp_path / "differences.png"
    pictures.draw_differences(outcomes[:-1], family, picture)
    assert not picture.exists()
    pictures.draw_differences(outcomes, family, picture)
    assert picture.exists()
    for (_, _, how, *_), verdict in compared.items():
        expected = {"token_tis": "better", "bypass": "worse"}.get(how, "undecided")
        assert verdict.verdict == expected
    table = document.table(outcomes, settings.WORKING_SHORT)
    row = row_of(table, "weights up to 8 steps old", "token TIS")
    assert "| 0.90 (0.90 to 0.91) | +0.40 (+0.40 to +0.40) | better, p " in row
    assert "Of the 84 comparisons in this table: 12 better, 12 worse, 60 undecided." in table


def test_a_table_says_which_commits_made_its_runs():
    runs = settings.SELECTION.runs
    commits = {1: "", 2: "b", 3: "a", 4: "b", 5: "b"}
    outcomes = [dataclasses.replace(made_outcome(run), commit=commits[run.seed]) for run in runs]
    assert "1 a run. Made by commits a, b." in document.table(outcomes, settings.SELECTION)
    of_one_seed = [outcome for outcome in outcomes if outcome.seed == 2]
    assert "1 a run. Made by commit b. Not made yet" in document.table(of_one_seed, settings.SELECTION)


def test_a_part_of_a_block_is_shown_with_the_runs_that_are_missing():
    block = settings.WORKING_LONG
    made = [made_outcome(run) for run in block.runs if run.seed == 1 or run.key[1:] == ("stale_4", "bypass", 2)]
    made[1] = dataclasses.replace(made[1], error="error: it failed")
    table = document.table(made, block)
    assert "34 of 165 runs" in table
    assert "Not made yet: seed 2: `none-uncorrected`, `stale_4-uncorrected`" in table
    assert "`stale_4-bypass`" not in table
    assert "; seed 3: all; seed 4: all; seed 5: all." in table
    assert "An error ended `stale_4-uncorrected` with seed 1 after step 200." in table
    assert table.endswith("No verdict before all 330 runs of `docs/study_working.json` are made.\n")
    assert not re.search("better|worse|undecided", table)


def test_ways_to_live_with_late_responses_are_compared_with_each_other():
    block = settings.SELECTION
    outcomes = [made_outcome(run) for run in block.runs]
    table = document.table(outcomes, block)
    row_of(table, "dropping", "without correction")
    waiting = "waiting, without correction"
    dropping = "dropping, without correction"
    for kind, other in (
        ("pacing, without correction", waiting),
        ("pacing, token TIS", waiting),
        (dropping, waiting),
        ("dropping, token TIS", waiting),
        ("dropping at random, without correction", dropping),
        ("dropping at random, without correction", waiting),
    ):
        row_of(table, kind, other)
    assert "worse, p " in row_of(table, dropping, waiting)
    assert "better, p " in row_of(table, "dropping at random, without correction", dropping)
    equal = "+0.00 (−0.00 to +0.00) | undecided, p 1; above −0.05"
    assert equal in row_of(table, "pacing, without correction", waiting)
    assert "above" not in row_of(table, dropping, waiting)
    assert "Of the 18 comparisons in this table: 6 better, 6 worse, 6 undecided." in table
    assert waiting not in document.table(outcomes[:-1], block), "no comparisons before all runs"


# The committed files.


@functools.cache
def committed(name="study.json"):
    return results.read(ROOT / "docs" / name)


def test_the_data_are_of_the_designs_runs():
    for name in {block.data for block in settings.BLOCKS.values()}:
        blocks = [block for block in settings.BLOCKS.values() if block.data == name]
        flags = {run.key: " ".join(run.flags) for run in settings.runs_of(blocks)}
        assert all(flags[outcome.key] == outcome.flags for outcome in committed(name))
        assert len({outcome.key for outcome in committed(name)}) == len(committed(name))
    last = {"count_up": 200, "bonus": 200, "count_on": 100, "experts": 200}
    assert all(outcome.policy[-1][0] == last[outcome.setting] for outcome in committed() if outcome.error is None)


def test_waiting_has_the_rewards_of_the_exact_engine():
    """Digit for digit: with the same seed it is the same run, made by another engine."""
    by_key = {outcome.key: outcome for outcome in committed("study_working.json")}
    for outcome in committed("study_selection.json"):
        exact = by_key.get((outcome.setting, "none", outcome.correction, outcome.seed))
        if outcome.mismatch == "late_wait" and exact is not None:
            assert outcome.policy == exact.policy


@pytest.mark.parametrize("block", settings.BLOCKS.values(), ids=lambda block: block.name)
def test_the_page_has_the_tables_of_the_data(block):
    data = committed(block.data)
    _, begin, after = (ROOT / "docs" / "study.md").read_text().partition(f"{document.begin_of(block)}\n")
    assert begin
    assert after.partition(document.END)[0] == f"\n{document.table(data, block)}\n"


# The conclusions. Verdicts and comparisons are cells of the tables; the prose has means, shares and single runs.

KINDS = tuple(kind.name for kind in settings.STRONG)
MILD = tuple(kind.name for kind in settings.REALISTIC)
# Kinds of run under strong mismatches, with every correction and baseline of three seeds.
STRONG_KINDS = {*settings.MAIN.kinds, *settings.BASELINES.kinds}


def outcomes_of(mismatch, correction, setting="count_up"):
    """The outcomes of a kind's seeds."""
    return [outcome for outcome in committed() if outcome.key[:3] == (setting, mismatch, correction)]


def finals(*kind):
    """The last rewards of a kind's seeds."""
    return [outcome.final for outcome in outcomes_of(*kind)]


def mean_of(*kind, measure=None):
    """The mean of a kind's seeds: of the last rewards, or of a measure over the whole runs."""
    values = [outcome.mean(measure) for outcome in outcomes_of(*kind)] if measure else finals(*kind)
    return sum(values) / len(values)


def in_words(numbers, digits=2):
    *first, last = [f"{number:.{digits}f}" for number in numbers]
    return f"{', '.join(first)} and {last}"


def of_strong_mismatches():
    """(section, words in it) of docs/study.md."""
    for how in ("token_tis", "uncorrected"):
        yield "The corrections", in_words(mean_of(kind, how) for kind in KINDS)
    for kind in KINDS:
        yield "The corrections", in_words(mean_of(kind, how) for how in ("seq_tis", "seq_tis_10", "seq_is"))
    # The worst seed of token TIS beside the best one without correction.
    pairs = []
    for kind in KINDS[:2]:
        pairs.append(f"{min(finals(kind, 'token_tis')):.2f} and {max(finals(kind, 'uncorrected')):.2f}")
    yield "The corrections", f"({', '.join(pairs)})"
    seeds = [*finals("staleness", "seq_tis_weighted"), *finals("staleness", "seq_tis")]
    yield "The baselines", "{0:.2f} and {1:.2f} against {3:.2f} and {4:.2f}, but {2:.2f} against {5:.2f}".format(*seeds)
    for kind, how in (("rounding", "seq_tis"), ("temperature", "seq_tis"), ("temperature", "token_tis")):
        for name in (how, f"{how}_weighted"):
            yield "The baselines", in_words(finals(kind, name))
    for name in ("no_std", "remax"):
        yield "The baselines", in_words(mean_of(kind, f"seq_tis_{name}") for kind in KINDS)
    others = [mean_of("temperature", f"token_tis{name}") for name in ("", "_no_std", "_weighted", "_remax")]
    sentence = "at {:.2f} with the group's mean, at {:.2f} without std, at {:.2f} weighted and at {:.2f} with ReMax"
    yield "The baselines", sentence.format(*others)
    norm = mean_of("temperature", "token_tis_weighted", measure="grad_norm")
    yield "The baselines", f"gradient norm is {norm:.0f} in the mean"
    for kind in KINDS[:2]:
        pair = in_words(mean_of(kind, how, "bonus") for how in ("token_tis", "geo_rs_token_tis"))
        yield "With an entropy bonus", f"{pair} against {mean_of(kind, 'uncorrected', 'bonus'):.2f}"
    yield "With an entropy bonus", f"ends at {mean_of('temperature', 'uncorrected', 'bonus'):.2f}"


def of_weak_mismatches():
    """(section, words in it) of docs/study.md."""
    for kind, how in settings.LONG_RESPONSES.kinds[1:]:
        yield "Long responses", f"at {mean_of(kind.name, how.name, 'count_on'):.2f}"
    yield "Long responses", f"where it is {mean_of('none', 'uncorrected', 'count_on'):.2f} without mismatch"
    yield "Long responses", f"k3 is {mean_of('rounding_long', 'uncorrected', 'count_on', measure='k3'):.3f}"
    for how in ("geo_rs_published", "geo_rs_grown"):
        share = mean_of("rounding_long", how, "count_on", measure="rejected")
        yield "Long responses", f"rejects {100 * share:.0f} % of the tokens"
    (ended,) = (outcome for outcome in outcomes_of("rounding_long", "geo_rs_published", "count_on") if outcome.error)
    yield "Long responses", f"with a reward of {ended.final:.2f}"
    for kind in (("staleness_mild", "token_tis"), ("temperature_mild", "seq_tis")):
        yield "Realistic mismatches", f"at {' and '.join(f'{end:.2f}' for end in finals(*kind) if end < 0.9)}"
    k3 = [mean_of(kind, "uncorrected", measure="k3") for kind in MILD]
    yield "Realistic mismatches", f"k3 is {in_words(k3, 3)}"
    for how in ("token_tis", "seq_tis", "bypass"):
        yield "Realistic mismatches", in_words(mean_of(kind, how) for kind in MILD)
    ends = [outcome.final for outcome in committed() if outcome.setting == "experts"]
    yield "A mixture of experts", f"All {len(ends)} runs end at {min(ends):.2f} to {max(ends):.2f}"
    without = ("uncorrected", "token_tis")
    replayed = ("replay", "token_tis_replay")
    for kind, hows, sentence in (
        ("fp8", without, "is {:.4f} to {:.4f} without it"),
        ("fp8", replayed, "{1:.4f} with it"),
        ("fp8_old", without, "{:.2f} to {:.2f} without"),
        ("fp8_old", replayed, "{:.2f} to {:.2f} with it"),
    ):
        k3 = [outcome.mean("k3") for how in hows for outcome in outcomes_of(kind, how, "experts")]
        yield "A mixture of experts", sentence.format(min(k3), max(k3))


def of_the_tree():
    """(section, words in it) of docs/choosing.md."""
    k3 = []
    for kind in KINDS:
        # The oldest runs have none.
        of_seeds = [outcome.mean("k3") for outcome in outcomes_of(kind, "uncorrected")]
        k3.append(fmean(value for value in of_seeds if math.isfinite(value)))
    yield "The tree", f"with a k3 of {min(k3):.1f} to {max(k3):.1f}"
    best = []
    for kind in KINDS:
        corrections = [correction.name for mismatch, correction in STRONG_KINDS if mismatch.name == kind]
        best.append(max(mean_of(kind, how) for how in corrections))
    yield "The tree", "end at {:.2f} with rounded weights and at {:.2f} with old ones".format(*best)
    weighted = mean_of("temperature", "seq_tis_weighted")
    assert weighted == best[2]
    yield "The tree", f"weighted` end at {weighted:.2f}, like training without mismatch"
    grown, without, published = (
        mean_of("rounding_long", how, "count_on") for how in ("geo_rs_grown", "uncorrected", "geo_rs_published")
    )
    yield "The tree", f"bounds for the length end at {grown:.2f} and no correction at {without:.2f}"
    yield "The tree", f"the preset's own bounds end at {published:.2f}"
    k3_of_old = mean_of("staleness_mild", "uncorrected", measure="k3")
    kl_of_old = mean_of("staleness", "uncorrected", measure="kl")
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert f"a k3 of {k3_of_old:.2f} at up to 4 steps, and a KL of {kl_of_old:.1f} at up to 50 steps" in page


def final_of_seed_1(correction):
    """The last reward of the run with seed 1 under the drifting temperature."""
    (outcome,) = (outcome for outcome in outcomes_of("temperature", correction) if outcome.seed == 1)
    return outcome.final


def of_2026():
    """(section, words in it) of docs/study.md and docs/choosing.md."""
    share = mean_of("temperature", "seq_mask_tis", measure="rejected")
    yield "Published in 2026", f"rejected {100 * share:.0f} % of the tokens"
    for how in ("prefix", "turn", "seq_tis"):
        yield "Published in 2026", f"at {final_of_seed_1(how):.2f}"
    yield "Corrections of 2026", f"without correction {final_of_seed_1('uncorrected'):.2f}"


@pytest.mark.parametrize("sentences_of", [of_strong_mismatches, of_weak_mismatches, of_the_tree, of_2026])
def test_the_prose_has_the_numbers_of_the_data(sentences_of):
    pages = "\n".join((ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("study", "choosing"))
    for section, sentence in sentences_of():
        text = re.split(r"^##+ ", pages.partition(f"# {section}\n")[2], flags=re.MULTILINE)[0]
        prose = " ".join(re.sub(r"^\|.*$", "", text, flags=re.MULTILINE).split())
        assert sentence in prose, section


CHOOSING = {
    "none": "uncorrected",
    "`decoupled_token_is`": "token_tis",
    "`decoupled_token_is --rollout-is-batch-normalize`": "token_tis_norm",
    "`decoupled_token_icepop`": "icepop",
    "`decoupled_geo_rs_token_tis` with bounds of 0.5 and 2": "geo_rs_token_tis",
    "`decoupled_seq_is`": "seq_tis",
    "`decoupled_seq_is --advantage-baseline weighted`": "seq_tis_weighted",
    "`bypass_pg_is`": "bypass_pg",
    "`bypass_ppo_clip`": "bypass",
}


# The last column of two tables of docs/choosing.md: the first name of a row, and the corrections of its runs.
PUBLISHED = {
    "ppo_clip": ["bypass"],
    "dppo_tv": ["bypass_dppo_tv"],
    "dppo_kl": ["bypass_dppo_kl"],
    "cppo": ["bypass_cppo"],
    "sapo": ["bypass_sapo"],
    "gmpo": ["bypass_gmpo"],
    "decoupled_token_kpop": ["kpop"],
    "seq_mask_tis": ["seq_mask_tis"],
    "--lr-ess-scaling sqrt": ["ess_rate"],
    "decoupled_prefix_is": ["prefix"],
    "decoupled_min_prefix_is": ["min_prefix", "min_prefix_pg"],
    "decoupled_turn_is": ["turn"],
}


def test_choosing_has_the_rewards_of_the_published_methods():
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`.*\|([^|]*)\|$", page, flags=re.MULTILINE)
    last_cells = {name: cell for name, cell in rows if name in PUBLISHED}
    assert last_cells.keys() == PUBLISHED.keys()
    for name, corrections in PUBLISHED.items():
        expected = [f"{final_of_seed_1(correction):.2f}" for correction in corrections]
        assert re.findall(r"\d\.\d\d", last_cells[name]) == expected


def test_other_pages_have_the_mean_rewards():
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8").partition("## What the study found")[2]
    for title, how in CHOOSING.items():
        assert f"| {title} | {' | '.join(f'{mean_of(kind, how):.2f}' for kind in KINDS)} |" in page
    kinds = [(kind, how) for kind in ("staleness", "rounding") for how in ("uncorrected", "token_tis")]
    shown = "(?s)" + ".*".join(re.escape(f"{mean_of(*kind):.2f}") for kind in kinds)
    assert re.search(shown, (ROOT / "README.md").read_text(encoding="utf-8"))
