"""Weights that change while responses are under way: versions within a response, the order of things, resumed runs."""

import threading

import pytest

from megatron_rc.launch.engines import Sample
from megatron_rc.records.rollout import load_rollouts
from tests.launch.rollouts.test_scheduler import SECONDS, CountingEngine, run_with
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, save_initial
from tests.support.training_runs import HELD_OUT, LIVE, rows, without_times

# tokens of a response, and of them those of the weights before
LENGTH = 8
OLD = 3


def partial(folder, *more, servers=1):
    urls = ",".join(f"http://127.0.0.1:{index + 1}" for index in range(servers))
    engine = f"--rollout-engine=vllm-server --rollout-url={urls} --rollout-weights-dir={folder}/weights"
    return flags(folder, *LIVE, *engine.split(), "--rl-partial-rollouts", "--rollout-staleness=1", *more)


class OpenEngine(CountingEngine):
    """Samples a batch ahead, on a thread, until it has got new weights."""

    def __init__(self):
        super().__init__()
        self.news = threading.Condition()

    def load_weights(self, weights, version):
        for _ in weights:
            pass
        with self.news:
            self.version = version
            self.news.notify_all()

    def sample(self, prompts, params, max_new_tokens, seed, progress=None):
        begun = self.version
        if progress is None:  # an evaluation
            return [Sample([3] * LENGTH, [-1.0] * LENGTH, "length", versions=[begun] * LENGTH) for _ in prompts]
        self.calls.append(begun)
        self.threads.add(threading.current_thread().name)
        with self.news:
            if progress.batch > begun and not self.news.wait_for(lambda: self.version > begun, SECONDS):
                raise TimeoutError("no new weights came while the responses were under way")
        versions = [begun] * OLD + [self.version] * (LENGTH - OLD)
        return [self.response(index, versions) for index, _ in enumerate(prompts)]

    def response(self, index, versions):
        log_probs = [-1.0 - 0.02 * ((index + position) % 7) for position in range(LENGTH)]
        return Sample([3 + index % 2] * LENGTH, log_probs, "length", versions=versions)


def test_weights_change_within_responses(ranks, tmp_path):
    """Each batch but the first was begun by the weights before, and is ended by the newest ones."""
    arguments = partial(tmp_path, "--train-iters=4", f"--save-rollouts={tmp_path}/rollouts")
    ((error, calls, threads, left),) = ranks.run(run_with, Layout(), arguments, OpenEngine)
    assert (error, left) == (None, [])
    assert calls == [[0, 0, 1, 2]]
    assert threads == [{"rollouts"}]
    metrics = rows(tmp_path)
    assert [row["rollout/staleness_max"] for row in metrics] == [0, 1, 1, 1]
    assert [row["rollout/staleness_mean"] for row in metrics] == [0, *[OLD / LENGTH] * 3]
    for row in metrics[1:]:
        assert row["rollout_corr/staleness_1_token_fraction"] == OLD / LENGTH
        assert row["rollout_corr/staleness_0_token_fraction"] == 1 - OLD / LENGTH
    for step in range(1, 4):
        batch = load_rollouts(tmp_path / "rollouts" / f"step-{step:07d}-replica-0000.safetensors")
        for versions, mask in zip(batch.policy_versions, batch.response_mask, strict=True):
            assert versions[mask].tolist() == [step - 1] * OLD + [step] * (LENGTH - OLD)


@pytest.fixture(scope="module")
def single(ranks, tmp_path_factory):
    """Folder with the checkpoint that all layouts start from; and a function: the metrics of a run in a layout."""
    folder = tmp_path_factory.mktemp("single")
    ranks.run(save_initial, Layout(), flags(folder, *LIVE, f"--save={folder}/start"))
    start = [f"--load={folder}/start", "--finetune", "--optimizer=sgd", "--lr=0.05", "--train-iters=3"]

    def run(layout, run_folder, *more):
        arguments = partial(run_folder, *layout.flags(), *start, *more, servers=layout.dp)
        assert [error for error, *_ in ranks.run(run_with, layout, arguments, EvenEngine)] == [None] * layout.world
        return without_times(run_folder)

    return run, {name: run(Layout(), folder / name, *more) for name, more in USERS.items()}


USERS = {
    "interpolated": ["--proximal-interpolation", "--rollout-staleness-scale=1:1.5"],
    "bypass": ["--bypass-mode", "--rollout-staleness-scale=1:0.7"],
}
CASES = [(Layout(tp=2), "interpolated"), (Layout(pp=2), "bypass"), (Layout(dp=2), "interpolated")]


@pytest.mark.parametrize(("layout", "users"), CASES, ids=str)
def test_every_layout_takes_the_same_steps(tmp_path, single, layout, users):
    """Bounds by staleness, interpolation and the breakdown use the version of each token."""
    run, rows_of_one_rank = single
    for expected, row in zip(rows_of_one_rank[users], run(layout, tmp_path, *USERS[users]), strict=True):
        names = [name for name in expected if name.startswith(("rollout_corr/", "rollout/", "loss/"))]
        assert any("staleness_1" in name for name in names) == (expected["step"] > 1)
        for name in names:
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name


class EvenEngine(OpenEngine):
    """Gives equal responses to each prompt, so that a replica's share is like any other's."""

    def response(self, index, versions):
        return super().response(index % 2, versions)


def test_evaluations_are_made_while_responses_are_under_way(ranks, tmp_path):
    arguments = partial(tmp_path, *HELD_OUT, "--train-iters=4", "--rollout-staleness=2")
    arguments += ["--eval-problems=4", "--eval-interval=1"]
    ((error, _, _, left),) = ranks.run(run_with, Layout(), arguments, OpenEngine)
    assert (error, left) == (None, [])
    assert [row["step"] for row in rows(tmp_path) if "eval/reward" in row] == [0, 1, 2, 3, 4]
