"""Evaluations of a run: when they are made, what is asked and counted, over layouts."""

import json

import pytest
import torch

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks import Problem, make_task
from megatron_rc.parallel import ParallelGroups
from tests.support.documented import undocumented
from tests.support.ranks import Layout, RankFailure
from tests.support.recorded_training import flags
from tests.support.training_runs import HELD_OUT, rows, run_training, run_until_signal


@pytest.mark.parametrize(
    ("layout", "interval", "steps"),
    [(Layout(), 2, [0, 2, 3]), (Layout(dp=2, pp=2), 9, [0, 1])],
    ids=str,
)
def test_evaluations_come_at_the_start_by_the_interval_and_at_the_end(ranks, tmp_path, layout, interval, steps):
    arguments = [*HELD_OUT, f"--eval-interval={interval}", "--eval-problems=5", *layout.flags()]
    arguments += [f"--train-iters={steps[-1]}"]
    assert set(ranks.run(run_training, layout, flags(tmp_path, *arguments))) == {None}
    evaluations = [row for row in rows(tmp_path) if "eval/reward" in row]
    assert [row["step"] for row in evaluations] == steps
    assert all(
        set(row) == {"step", "eval/reward", "eval/exact_match", "eval/pass@1", "eval/reward_errors"}
        for row in evaluations
    )
    written = sorted((tmp_path / "run" / "eval").iterdir())
    assert [path.name for path in written] == [f"step-{step:07d}.jsonl" for step in steps]
    assert len(written[0].read_text().splitlines()) == 5
    assert [row["step"] for row in rows(tmp_path) if "loss/total" in row] == list(range(1, steps[-1] + 1))


def test_a_resumed_run_goes_on_evaluating(ranks, tmp_path):
    """Stopped between two multiples of the interval: nothing is evaluated twice, and no interval goes by unseen."""
    arguments = [
        *HELD_OUT,
        "--eval-interval=2",
        "--eval-problems=2",
        f"--save={tmp_path}/save",
        f"--load={tmp_path}/save",
    ]
    for iterations in (1, 3):
        assert ranks.run(run_training, Layout(), flags(tmp_path, *arguments, f"--train-iters={iterations}")) == [None]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0, 1, 2, 3]
    (tmp_path / "run").rename(tmp_path / "before")
    ahead = ["--rollout-staleness=2", "--train-iters=6"]
    assert ranks.run(run_training, Layout(), flags(tmp_path, *arguments, *ahead)) == [None]
    # Weights are handed over after 3 and 5 steps; in a new folder nothing says that those of 3 were evaluated.
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [3, 5, 6]


def test_an_evaluation_due_at_the_step_of_a_stop_is_made_when_the_run_goes_on(ranks, tmp_path):
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    arguments = flags(tmp_path, *HELD_OUT, "--eval-interval=2", "--eval-problems=2", "--train-iters=3", *save)
    assert ranks.run(run_until_signal, Layout(dp=2), arguments, 2) == [True, True]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0]
    assert ranks.run(run_training, Layout(dp=2), arguments) == [None, None]
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0, 2, 3]


class Pupil:
    """Knows the answer to some of the held-out problems, and to others at every second try."""

    version = 0

    def __init__(self, task, known, guessed=()):
        self.task = task
        self.known = known
        self.guessed = guessed
        self.asked = []
        self.sampling = []

    def load_weights(self, weights, version):
        self.version = len(list(weights)) and version

    def sample(self, prompts, params, max_new_tokens, seed):
        self.sampling.append((params.top_k, params.temperature))
        return [self.answer(self.task.text.decode(prompt)) for prompt in prompts]

    def answer(self, prompt):
        self.asked.append(prompt)
        is_right = prompt not in self.guessed or self.asked.count(prompt) % 2
        text = self.known.get(prompt, "99") if is_right else "99"
        if text is None:
            return Sample([], [], "stop")
        ids = [*self.task.text.encode(Problem(text)), self.task.text.eos]
        return Sample(ids, [0.0] * len(ids), "stop")


def evaluate_pupil(words, known, guessed=()):
    from megatron_rc.launch.rollouts.collector import RolloutCollector

    config, task = configure(words, torch.distributed.get_world_size())
    groups = ParallelGroups.from_megatron()
    pupil = Pupil(task, known, guessed)
    collector = RolloutCollector(config, task, groups, pupil)
    metrics = collector.evaluate(6)
    return metrics, pupil.asked, set(pupil.sampling)


def first_problems(count):
    """The problems, and their prompts as the engine sees them."""
    task = make_task("python:tests.support.user_rewards:Doubles", 1234)
    problems = task.problems(0, count, held_out=True)
    return problems, [task.text.decode(task.text.encode(problem)) for problem in problems]


def test_a_response_that_is_left_out_counts_as_wrong_in_an_evaluation(ranks, tmp_path):
    problems, prompts = first_problems(4)
    known = {prompt: problem.label for prompt, problem in zip(prompts, problems, strict=True)} | {prompts[1]: None}
    arguments = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=4", "--bad-samples=drop")
    ((metrics, asked, sampling),) = ranks.run(evaluate_pupil, Layout(), arguments, known)
    expected = {"eval/reward": 0.75, "eval/exact_match": 0.75, "eval/pass@1": 0.75, "eval/reward_errors": 0}
    assert metrics == pytest.approx(expected)
    assert sorted(asked) == sorted(prompts)
    assert sampling == {(1, 1.0)}, "the most likely answer, once"


@pytest.mark.parametrize(
    ("layout", "written"), [(Layout(), 2), (Layout(cp=2, dp=2), 2), (Layout(dp=2, pp=2), 4)], ids=str
)
def test_several_samples_are_counted_by_problem_over_all_replicas(ranks, tmp_path, layout, written):
    """Of 4 tries 2 are right for a problem that is guessed: one of two tries is right with 1 - 1/6."""
    problems, prompts = first_problems(5)
    known = {prompt: problem.label for prompt, problem in zip(prompts, problems, strict=True) if prompt != prompts[4]}
    more = ["--eval-samples=4", "--eval-temperature=0.7", f"--eval-answers={written}"]
    arguments = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=5", *more, *layout.flags())
    results = ranks.run(evaluate_pupil, layout, arguments, known, prompts[:2])
    expected = {"eval/reward": 0.6, "eval/exact_match": 0.6, "eval/pass@1": 0.6, "eval/reward_errors": 0}
    expected |= {"eval/pass@2": (2 * 5 / 6 + 2) / 5, "eval/pass@4": 0.8}
    assert [metrics for metrics, *_ in results] == [pytest.approx(expected)] * layout.world
    asked = [prompt for _, some, _ in results for prompt in some]
    assert {prompt: asked.count(prompt) for prompt in prompts} == dict.fromkeys(prompts, 4)
    assert {how for *_, sampling in results for how in sampling} == {(0, 0.7)}
    lines = (tmp_path / "run" / "eval" / "step-0000006.jsonl").read_text().splitlines()
    answers = [json.loads(line) for line in lines]
    # Of two replicas the first has the first two problems.
    assert [(answer["label"], answer["reward"]) for answer in answers] == [(p.label, 1.0) for p in problems[:written]]


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, pp=2)], ids=str)
def test_files_are_counted_by_name_over_all_replicas(ranks, tmp_path, layout):
    """Rows with keys of their own, in files of other sizes; the pooled share is over problems."""
    rows_of_files = {
        "train": [{"prompt": "1 + 1 = ", "label": "2"}],
        "small": [{"question": f"{number} - 1 = ", "solution": {"value": number - 1}} for number in range(2)],
        "large": [{"prompt": f"{number} * 2 = ", "label": f"{2 * number}"} for number in range(5)],
    }
    for name, table in rows_of_files.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in table))
    data = ["--prompt-data", f"{tmp_path}/train.jsonl", "--eval-data", f"{tmp_path}/small.jsonl"]
    data += [f"twice={tmp_path}/large.jsonl", "--eval-input-key", "small=question"]
    data += ["--eval-label-key", "small=solution.value", "--eval-interval=1", "--seq-length=32"]
    own = [word for word in HELD_OUT if not word.startswith("--task")]
    base = [word for word in flags(tmp_path, *own, *layout.flags()) if not word.startswith("--task")]
    known = {"0 - 1 = ": "-1", "0 * 2 = ": "0", "3 * 2 = ": "6", "4 * 2 = ": "8"}
    results = ranks.run(evaluate_pupil, layout, [*base, *data], known)
    shares = {"": 4 / 7, "small/": 1 / 2, "twice/": 3 / 5}
    expected = {
        f"eval/{begin}{name}": share for begin, share in shares.items() for name in ("reward", "exact_match", "pass@1")
    } | {f"eval/{begin}reward_errors": 0 for begin in shares}
    assert [metrics for metrics, *_ in results] == [pytest.approx(expected)] * layout.world
    lines = (tmp_path / "run" / "eval" / "step-0000006.jsonl").read_text().splitlines()
    assert [json.loads(line)["data"] for line in lines] == ["small", "twice"] * 2 + ["twice"] * 3
    assert undocumented(expected) == []


def test_answers_that_cannot_be_written_end_the_run_on_every_rank(ranks, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "eval").write_text("in the way")
    arguments = flags(tmp_path, *HELD_OUT, "--eval-interval=1", "--eval-problems=2", *Layout(dp=2).flags())
    with pytest.raises(RankFailure, match=r"eval/step-0000006\.jsonl cannot be written \(File exists\): make room"):
        ranks.run(evaluate_pupil, Layout(dp=2), arguments, {})
