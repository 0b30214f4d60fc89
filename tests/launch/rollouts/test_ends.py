"""Responses of a model whose files name three end tokens: where they stop, what is trained, what rewards read."""

from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rc.launch.engines import Sample
from megatron_rc.launch.engines.registry import make_engine
from megatron_rc.launch.flags.checks import task as task_checks
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rewards import rewarder
from megatron_rc.launch.rollouts.sampler import RolloutSampler
from megatron_rc.records.rollout import FINISH_REASONS, SamplingParams
from tests.support.several_ends import ASSISTANT, CHARACTERS, END, ENDS, OBSERVATION, TOKENS, USER, glm_folder, words_of

PLAIN = range(len(TOKENS) - len(CHARACTERS), len(TOKENS))  # ids of the characters
OF_TOKENS = "--reward=python:tests.support.user_rewards:of_tokens"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return glm_folder(tmp_path_factory.mktemp("glm"))


@pytest.fixture(autouse=True)
def rules_in_this_process(monkeypatch):
    monkeypatch.setattr(rewarder, "RewardPool", lambda source, workers, timeout: rewarder.InProcess(source))
    monkeypatch.setattr(task_checks, "check_loads", lambda source: source.load())


def engine_of(folder, *more):
    """(engine with the directory's weights, settings, task)."""
    config, task = configure(words_of(folder, *more), 1)
    engine = make_engine(config, task.text, 0)
    engine.load_weights(load_file(folder / "model.safetensors").items(), 0)
    return engine, config, task


def greedy_of_both(folder, prompts, *more, **generation):
    """Pairs of our greedy response and of the tokens that transformers' ``generate`` gives, with its padding."""
    engine, _, task = engine_of(folder, *more)
    samples = engine.sample(prompts, SamplingParams(top_k=1), 12, seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    generated = model.generate(torch.tensor(prompts), do_sample=False, max_new_tokens=12, **generation)
    return list(zip(samples, generated[:, len(prompts[0]) :].tolist(), strict=True)), task.text.ends


def test_responses_stop_where_transformers_generate_stops(folder):
    prompts = [[first, second] for first in PLAIN[::4] for second in PLAIN[::4]]
    pairs, ends = greedy_of_both(folder, prompts)
    assert ends.token_ids == tuple(ENDS)
    lasts = set()
    for sample, row in pairs:
        length = next((index + 1 for index, token in enumerate(row) if token in ENDS), 12)
        assert sample.token_ids == row[:length]
        assert sample.finish_reason == ("stop" if row[length - 1] in ENDS else "length")
        lasts.add(sample.token_ids[-1])
    assert lasts > {USER, OBSERVATION}


def test_stop_strings_end_responses_as_those_of_generate(folder):
    """The string has two tokens and begins with none of the prompts' ones; the tokens that spell it are kept."""
    engine, _, task = engine_of(folder)
    prompts = [[first, second] for first in PLAIN[:10] for second in PLAIN[:10]]
    samples = engine.sample(prompts, SamplingParams(top_k=1), 12, seed=0)
    spelled = [task.text.decode(sample.token_ids) for sample in samples]
    letters = [text[at : at + 2] for text in spelled for at in range(2, 9) if text[at : at + 2].isalpha()]
    letters = [pair for pair in letters if not any(pair in marker for marker in TOKENS[: PLAIN[0]])]
    string = max(letters, key=letters.count)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    pairs, ends = greedy_of_both(
        folder, prompts, f"--rollout-stop={string}", stop_strings=[string], tokenizer=tokenizer
    )
    stopped = 0
    for sample, row in pairs:
        text = task.text.decode(sample.token_ids)
        assert sample.token_ids == row[: len(sample.token_ids)]
        assert set(row[len(sample.token_ids) :]) <= {END}, "generate fills its batch behind an end"
        if string in text:
            stopped += 1
            assert text.endswith(string)
            assert sample.finish_reason == "stop"
            assert task.text.response_text(sample.token_ids) == text
    assert stopped > 3
    assert f"stop strings: {string!r} (--rollout-stop)" in ends.words


@pytest.mark.parametrize("skips", [False, True])
def test_the_record_ends_with_an_end_token_and_rewards_read_the_text_before_it(folder, skips):
    engine, config, task = engine_of(folder, OF_TOKENS, *["--rollout-skip-special-tokens"] * skips)
    sampler = RolloutSampler(config, task, engine, 0)
    sampled = sampler.sample(0)
    batch = sampled.batch
    reasons = batch.finish_reasons.tolist()
    rewards = batch.rewards.tolist()
    lengths = []
    lasts = []
    for row, mask, reason, reward in zip(batch.tokens.tolist(), batch.response_mask, reasons, rewards, strict=True):
        positions = mask.nonzero().flatten().tolist()
        assert positions == list(range(2, 2 + len(positions))), "the prompt has two digits"
        response = [row[position] for position in positions]
        assert not set(response[:-1]) & set(ENDS)
        assert FINISH_REASONS[reason] == ("stop" if response[-1] in ENDS else "length")
        assert response[-1] in ENDS or len(response) == 10
        assert row[2 + len(response) :] == [END] * (14 - len(response)), "the tokenizer pads with its end token"
        left_out = [*ENDS, 1, ASSISTANT] if skips else ENDS
        assert reward == sum(len(TOKENS[token]) for token in response if token not in left_out)
        lengths.append(len(response))
        lasts.append(response[-1])
    assert set(lasts) >= {USER, OBSERVATION}
    assert sampled.sums == {"tokens": (sum(lengths), 16), "last": (sum(lasts), 16)}


class Scripted:
    """An engine that gives scripted turns."""

    version = 0

    def __init__(self, *rounds):
        self.rounds = list(rounds)

    def sample(self, prompts, params, max_new_tokens, seed):
        return [Sample(turn, [-1.0] * len(turn), "stop") for turn in self.rounds.pop(0)]


def test_a_turn_that_any_token_ends_gets_a_reply_which_knows_the_token(folder):
    """Only those that end with <|observation|> are answered; markers stay in the texts of earlier turns."""
    turns = ["--max-turns=2", "--reply=python:tests.support.user_replies:after_observation", "--seq-length=24"]
    sizes = ["--grpo-prompts-per-step=1", "--global-batch-size=4", "--micro-batch-size=4"]
    config, task = configure(words_of(folder, *turns, *sizes, OF_TOKENS), 1)
    zero, one, two, seven = (TOKENS.index(digit) for digit in "0127")
    first = [[zero, OBSERVATION], [one, USER], [ASSISTANT, two, OBSERVATION], [zero, END]]
    engine = Scripted(first, [[one, USER], [two, OBSERVATION]])
    sampler = RolloutSampler(config, task, engine, 0)
    requests_seen = []
    replies = sampler.rewarder._replies
    sampler.rewarder._replies = SimpleNamespace(
        score=lambda requests: requests_seen.extend(requests) or replies.score(requests), close=replies.close
    )
    batch = sampler.sample(0).batch
    rows = [batch.tokens[row, 2:10].tolist() for row in range(4)]
    assert rows[0] == [zero, OBSERVATION, seven, one, USER, END, END, END]
    assert rows[1] == [one, USER, *[END] * 6]
    assert rows[2] == [ASSISTANT, two, OBSERVATION, seven, two, OBSERVATION, END, END]
    assert rows[3] == [zero, *[END] * 7]
    assert batch.response_mask[:, 2:8].int().tolist() == [
        [1, 1, 0, 1, 1, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 1],
        [1, 1, 0, 0, 0, 0],
    ]
    assert [request["token_ids"] for request in requests_seen[:4]] == first
    assert [request["response"] for request in requests_seen[:4]] == ["0", "1", "<|assistant|>2", "0"]
    assert [request["turns"] for request in requests_seen[4:]] == [[("0", "7")], [("<|assistant|>2", "7")]]
