"""Responses of several turns: what the engine sampled is trained, what the task says is read alone."""

import json
from dataclasses import replace

import pytest
import torch

from examples.guessing_game import Game
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks import task as task_checks
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rewards import rewarder
from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rollouts.sampler import RolloutSampler
from megatron_rc.launch.rollouts.turns import converse
from megatron_rc.records.rollout import load_rollouts, save_rollouts
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, save_initial
from tests.support.training_runs import rows, run_training

EOS = 1
ENDED = Sample([5, EOS], [-0.5, -0.1], "stop", versions=[3, 3])


class Scripted:
    """An engine that gives scripted turns; it remembers texts and seeds, and names a token by its log-prob."""

    version = 7

    def __init__(self, *rounds):
        self.rounds = list(rounds)
        self.asked = []

    def sample(self, prompts, params=None, max_new_tokens=0, seed=0):
        self.asked.append(([list(prompt) for prompt in prompts], seed))
        return [turn(*tokens) if isinstance(tokens, tuple) else tokens for tokens in self.rounds.pop(0)]


def turn(*tokens, **more):
    return Sample(list(tokens), [-token / 100 for token in tokens], "stop" if tokens[-1] == EOS else "length", **more)


def talk(engine, replies, prompts=((2, 3), (2,)), **limits):
    """Converse with replies of one scripted list a round; returns the conversations, and each round's indices."""
    replied_to = []

    def reply(indices, conversations):
        replied_to.append(indices)
        return [Outcome(reward, observation=observation) for observation, reward in replies[len(replied_to) - 1]]

    conversations = converse(prompts, lambda texts, seed: engine.sample(texts, seed=seed), 11, reply=reply, **limits)
    return conversations, replied_to


def test_turns_and_observations_are_appended_token_by_token():
    engine = Scripted([(5, EOS), (6, EOS)], [(7, 8, EOS)], [(9, EOS)])
    replies = [[([20, 21], 0.5), (None, 2.0)], [([22], 0.25)], [([23], 0.125)]]
    (long, short), replied_to = talk(engine, replies, max_turns=3, room=90)
    assert long.token_ids == [5, EOS, 20, 21, 7, 8, EOS, 22, 9, EOS], "no turn follows the last observation"
    assert long.sampled == [True, True, False, False, True, True, True, False, True, True]
    assert long.log_probs == [-token / 100 for token in (5, EOS, 7, 8, EOS, 9, EOS)]
    assert (long.reward, short.reward, long.finish_reason) == (0.875, 2.0, "stop")
    assert long.turn_rewards == [0, 0.5, 0, 0, 0.25, 0, 0], "the last turn's is the rest of the response's reward"
    assert short.turn_rewards == [0, 0]
    assert (short.token_ids, short.sampled) == ([6, EOS], [True, True])
    texts, seeds = zip(*engine.asked, strict=True)
    assert texts[0] == [[2, 3], [2]], "all samples at once"
    assert texts[1:] == ([[2, 3, 5, EOS, 20, 21]], [[2, 3, 5, EOS, 20, 21, 7, 8, EOS, 22]])
    assert replied_to == [[0, 1], [0], [0]]
    assert (seeds[0], len(set(seeds))) == (11, 3), "the first turn is sampled as a run of one turn does"

    def spell(ids):
        return "-".join(map(str, ids))

    earlier, newest = long.texts(spell, spell)
    assert (earlier, newest) == ([("5-1", "20-21"), ("7-8-1", "22")], "9-1")


def test_a_conversation_ends_where_no_whole_turn_has_room():
    """Prompt, turn and observation have 2 + 2 + 3 tokens, and 1 + 2 + 3."""
    for room, is_cut in ((5, [True, True]), (6, [True, False]), (7, [False, False])):
        num_open = 2 - sum(is_cut)
        engine = Scripted([(5, EOS), (6, EOS)], [(7, EOS)] * num_open)
        replies = [[([20] * 3, 0.5)] * 2, [(None, 0.0)] * num_open]
        conversations, _ = talk(engine, replies, max_turns=2, room=room)
        assert [conversation.is_cut for conversation in conversations] == is_cut
        reasons = [conversation.finish_reason for conversation in conversations]
        assert reasons == ["length" if cut else "stop" for cut in is_cut]
        assert [len(conversation.token_ids) for conversation in conversations] == [2 if cut else 7 for cut in is_cut]
        assert [conversation.reward for conversation in conversations] == [0.5, 0.5]


def test_a_turn_without_an_end_and_a_dropped_one_get_no_reply():
    engine = Scripted([(5, EOS), (6, EOS), (6, 6)], [Sample([], [], "abort"), (6, 6)])
    conversations, replied_to = talk(engine, [[([20], 1.0), ([20], 1.0)]], [(2,)] * 3, max_turns=5, room=90)
    assert replied_to == [[0, 1]]
    assert [conversation.finish_reason for conversation in conversations] == ["abort", "length", "length"]
    token_ids = [conversation.token_ids for conversation in conversations]
    assert token_ids == [[], [6, EOS, 20, 6, 6], [6, 6]], "a dropped turn drops its response"


def test_bad_turns_are_told_with_the_tokens_before_them():
    retried = turn(5, 6, EOS, bad_lengths=(4, 0))
    dropped = Sample([], [], "abort", bad_lengths=(1, 0, 2))
    engine = Scripted([retried, (6, EOS)], [dropped, turn(6, 6, bad_lengths=(2,))])
    conversations, _ = talk(engine, [[([20], 0), ([20], 0)]], max_turns=2, room=90)
    # Observations are not sampled.
    assert [conversation.bad_lengths for conversation in conversations] == [(4, 0, 4, 0, 5), (4,)]
    assert [conversation.token_ids for conversation in conversations] == [[], [6, EOS, 20, 6, 6]]


def test_without_replies_a_conversation_is_one_turn():
    (conversation,) = converse([(2,)], lambda texts, seed: [ENDED], 0)
    assert (conversation.token_ids, conversation.sampled) == ([5, EOS], [True, True])


def test_versions_kept_tokens_and_experts_stay_with_their_tokens():
    """Rows of experts spell the position that was read, and the turn that read it."""

    def read(number, tokens):
        return torch.stack([torch.arange(tokens), torch.full((tokens,), number)], dim=1).view(tokens, 1, 2)

    support_of_first = torch.tensor([5, 9, EOS]).int(), torch.tensor([2, 1]).int()
    support_of_second = torch.tensor([7]), torch.tensor([1, 0])
    first = turn(5, EOS, versions=[3, 4], support=support_of_first, routed_experts=read(0, 2 + 2 - 1))
    second = turn(7, EOS, versions=[4, 5], support=support_of_second, routed_experts=read(1, 2 + 2 + 1 + 2 - 1))
    replies = [[([20], 0.0)], [(None, 0.0)]]
    (conversation,), _ = talk(Scripted([first], [second]), replies, [(2, 3)], max_turns=2, room=90)
    assert conversation.versions == [3, 4, 4, 5]
    ids, counts = conversation.support
    assert (ids.tolist(), counts.tolist()) == ([5, 9, EOS, 7], [2, 1, 1, 0])
    assert conversation.routed_experts[:, 0].tolist() == [[0, 0], [1, 0], [2, 0], [3, 1], [4, 1], [5, 1]]
    without = replace(conversation, turns=(first, replace(second, routed_experts=None, support=None)))
    assert (without.routed_experts, without.support) == (None, None)


# The record of a whole batch -----------------------------------------------------------------------------------------

GAME = ["--task=python:examples.guessing_game:Game", "--max-response-length=2", "--seq-length=16", "--run-name=run"]
GAME += ["--grpo-iterations=1", "--grpo-prompts-per-step=2", "--grpo-group-size=2", "--global-batch-size=4"]
# The ids of the characters "1234567?<>", after three of the tokenizer.
ID_OF_1 = 3
PROMPT = 10
LOWER = 11
HIGHER = 12


def make(tmp_path, rounds, *more):
    """A sampler of scripted rounds of guesses."""
    config, task = configure(flags(tmp_path, *GAME, *more), 1)
    turns_of_rounds = [[guess(number) for number in numbers] for numbers in rounds]
    return RolloutSampler(config, task, Scripted(*turns_of_rounds), 0)


def guess(number):
    return turn(ID_OF_1 + number - 1, EOS)


@pytest.fixture
def game(tmp_path, monkeypatch):
    """Function that plays scripted rounds of guesses at two numbers, and returns the sampled batch.

    Replies and rewards run in this process, as in a worker's.
    """
    monkeypatch.setattr(rewarder, "RewardPool", lambda source, workers, timeout: rewarder.InProcess(source))
    monkeypatch.setattr(task_checks, "check_loads", lambda source: source.load())
    return lambda rounds, *more: make(tmp_path, rounds, *more).sample(0)


def secret_numbers(tmp_path):
    """The two numbers to guess."""
    seed = configure(flags(tmp_path, "--run-name=run"), 1)[0].training.seed
    return [problem.label for problem in Game(seed).problems(0, 2)]


def test_a_record_trains_the_turns_and_reads_the_observations(game, tmp_path):
    first, second = secret_numbers(tmp_path)
    assert 1 < first < 7, "this seed has room on both sides"
    assert 1 < second < 7, "this seed has room on both sides"
    sampled = game([[first, first - 1, second + 1, 7], [first, second, second + 1], [second]], "--max-turns=3")
    batch = sampled.batch
    batch.validate(vocab_size=13)
    id_of_0 = ID_OF_1 - 1
    expected_rows = [
        [PROMPT, id_of_0 + first, EOS],
        [PROMPT, id_of_0 + first - 1, EOS, HIGHER, id_of_0 + first, EOS],
        [PROMPT, id_of_0 + second + 1, EOS, LOWER, id_of_0 + second, EOS],
        [PROMPT, id_of_0 + 7, EOS, LOWER, id_of_0 + second + 1, EOS, LOWER, id_of_0 + second, EOS],
    ]
    for tokens, mask, expected in zip(batch.tokens.tolist(), batch.response_mask.tolist(), expected_rows, strict=True):
        assert tokens == expected + [0] * (16 - len(expected))
        assert mask == [token not in (PROMPT, LOWER, HIGHER, 0) for token in tokens]
    labels, mask, log_probs = batch.label_aligned()
    torch.testing.assert_close(-100 * log_probs[mask], labels[mask].float())
    assert batch.rollout_log_probs[~batch.response_mask].eq(0).all()
    assert batch.policy_versions[batch.response_mask].eq(7).all()
    assert batch.rewards.tolist() == [1, 1, 1, 1], "a tenth from a reply, nine tenths from the reward"
    assert sampled.sums == {"right": (4.0, 4), "guesses": (1.0 + 2 + 2 + 3, 4)}


def test_the_first_turn_is_that_of_a_run_of_one_turn(game, tmp_path):
    first, second = secret_numbers(tmp_path)
    rounds = [[first, first - 1, second, second + 1]]
    assert game(rounds).batch.rewards.tolist() == pytest.approx([0.9, 0, 0.9, 0])
    assert game([*rounds, [first, second]], "--max-turns=2").batch.rewards.tolist() == [1, 1, 1, 1]


REPLY = "python:tests.support.user_replies:"


def error_lines(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "reward-errors.jsonl").read_text().splitlines()]


@pytest.mark.processes
def test_a_reply_that_fails_costs_its_sample_alone(tmp_path):
    """The function does what a guess says, in a worker: hang, exit, call sys.exit, or give an observation."""
    more = [f"--reply={REPLY}misbehave", "--reward-timeout=1", "--reward-workers=2", "--reward-on-error=-0.5"]
    sampler = make(tmp_path, [[1, 2, 3, 4], [5]], "--max-turns=2", "--reward=exact", *more)
    sampled = sampler.sample(0)
    sampler.close()
    assert sampled.batch.rewards.tolist()[:3] == [-0.5] * 3
    assert sampled.batch.response_mask.sum(dim=1).tolist() == [2, 2, 2, 4]
    assert sampled.counts["reward/errors"] == 3
    lines = error_lines(tmp_path)
    assert [line["sample"] for line in lines] == [0, 1, 2]
    assert {line["rule"] for line in lines} == {f"--reply {REPLY}misbehave"}
    assert "took longer than --reward-timeout 1 s" in lines[0]["error"]
    assert lines[1]["error"] == "ended its process with exit code 3"
    assert lines[2]["error"] == "raised SystemExit: 4"
    assert lines[0]["turns"] == []


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("empty", "gave an empty observation: give None to end the conversation"),
        ("number", "gave 5, which is no text, no list of token ids and not None"),
        ("foreign", "gave an observation with 'x', which is not a character of the tokenizer"),
        ("beyond", "gave an observation with the token id 99, beyond the tokenizer's 13"),
        ("unknown", "gave a dict with extra: a reply has 'observation' and 'reward'"),
        ("unrewarded", "gave 'reward': 'much', which is no number"),
    ],
)
def test_replies_that_are_none(game, tmp_path, name, error):
    sampled = game([[1, 2, 3, 4]], "--max-turns=2", f"--reply={REPLY}{name}")
    assert sampled.counts["reward/errors"] == 4
    assert {line["error"] for line in error_lines(tmp_path)} == {error}


def test_a_reply_may_give_token_ids_and_a_reward(game):
    sampled = game([[1, 2, 3, 4], [7] * 4], "--max-turns=2", f"--reply={REPLY}paid", "--reward=exact")
    assert sampled.batch.tokens[:, 3].tolist() == [PROMPT] * 4
    assert sampled.batch.rewards.tolist() == [1 / 4 + 7 / 4, 2 / 4 + 7 / 4, 3 / 4 + 7 / 4, 4 / 4 + 7 / 4]
    rewards_of_turns = torch.zeros(4, 16)
    rewards_of_turns[:, 2] = torch.tensor([1, 2, 3, 4]) / 4  # the end of the first turn
    assert torch.equal(sampled.batch.turn_rewards, rewards_of_turns)


def test_stopping_at_a_failed_reply(game):
    with pytest.raises(rewarder.RewardError, match=r"--reply .*number gave 5, .*--reward-errors continue"):
        game([[1, 2, 3, 4]], "--max-turns=2", f"--reply={REPLY}number", "--reward-errors=stop")


def test_evaluations_converse_too(game, tmp_path):
    sampler = make(tmp_path, [[1, 7], [2, 6]], "--max-turns=2", "--eval-interval=1", "--eval-problems=2")
    first, second = (problem.label for problem in sampler.task.problems(0, 2, held_out=True))
    graded = sampler.evaluate()
    assert [problem.responses for problem in graded] == [["1>2"], ["7<6"]]
    assert [problem.rewards for problem in graded] == [[0.1 + 0.9 * (first == 2)], [0.1 + 0.9 * (second == 6)]]


REFUSED = [
    ([], "--task count_up replies to no turn"),
    ([f"--reply={REPLY}nothing"], "--reply .* has no nothing"),
    ([f"--reply={REPLY}empty", "--overlong=penalise", "--overlong-buffer=2"], "--overlong penalise .*--max-turns 2"),
]


@pytest.mark.parametrize(("more", "message"), REFUSED)
def test_settings_that_do_not_go_together_are_refused(tmp_path, more, message):
    with pytest.raises(ConfigurationError, match=message):
        configure(flags(tmp_path, "--max-turns=2", *more), 1)


# Rewards of turns in a run -------------------------------------------------------------------------------------------

TURNS = [*GAME, "--max-response-length=6", "--seq-length=32", "--grpo-prompts-per-step=4", "--grpo-group-size=4"]
TURNS += ["--global-batch-size=16", f"--reply={REPLY}by_length", "--reward=exact", "--max-turns=3", "--num-layers=2"]
TURNS += ["--advantage-estimator=reinforce-pp", "--gamma=0.9", "--lr=1e-3", "--micro-batch-size=2", "--train-iters=2"]
TURNS += ["--rollout-rs-threshold=1e-9_1e9,1e9", "--lr-decay-style=constant"]


def losses(folder):
    return [{name: row[name] for name in ("loss/total", "grad_norm")} for row in rows(folder)]


def test_rewards_of_turns_are_recorded_and_reach_all_ranks(ranks, tmp_path):
    """One rank samples; four ranks take the same steps on its records, and others without the rewards of turns."""
    ranks.run(save_initial, Layout(), flags(tmp_path, *TURNS, f"--save={tmp_path}/start"))
    start = [f"--load={tmp_path}/start", "--finetune"]
    live = flags(tmp_path / "live", *TURNS, *start, f"--save-rollouts={tmp_path}/kept")
    assert ranks.run(run_training, Layout(), live) == [None]
    (tmp_path / "stripped").mkdir()
    for path in (tmp_path / "kept").glob("*"):
        batch = load_rollouts(path)
        assert batch.turn_rewards.any()
        save_rollouts(replace(batch, turn_rewards=None), tmp_path / "stripped" / path.name)
    layout = Layout(pp=2, tp=2)
    flags_of_one_turn = [flag for flag in TURNS if not flag.startswith(("--max-turns", "--reply", "--reward"))]
    for records in ("kept", "stripped"):
        load = [*start, *layout.flags(), f"--load-rollouts={tmp_path}/{records}"]
        of_records = flags(tmp_path / f"on-{records}", *flags_of_one_turn, *load)
        assert ranks.run(run_training, layout, of_records) == [None] * layout.world
        pairs = zip(losses(tmp_path / f"on-{records}"), losses(tmp_path / "live"), strict=True)
        is_same = all(of_step == pytest.approx(of_live_step, rel=1e-4, abs=1e-6) for of_step, of_live_step in pairs)
        assert is_same == (records == "kept")
