"""The engine check: what is wrong with an engine is said in words, and what is right is not accused."""

import dataclasses
from unittest import mock

import pytest
import torch

from megatron_rc.launch.check_engine import _endings, _tokens, judge_endings, judge_rewards, judge_tokens
from megatron_rc.launch.engines import Sample
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.launch.tasks.text import CharacterText
from tests.support.made_rollouts import made_batch
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, recorded_batch
from tests.support.several_ends import glm_folder, words_of

WIDE = ["--init-method-std=0.5", "--grpo-prompts-per-step=8", "--global-batch-size=32", "--rollout-dtype=bf16"]
EOS = 1


class Faulty:
    """The default engine with one fault."""

    def __init__(self, engine, fault):
        self.engine = engine
        self.fault = fault
        if fault == "first end only":
            engine.ends = ResponseEnds(engine.ends.token_ids[:1])
            engine._end_tokens = torch.tensor(engine.ends.token_ids)

    @property
    def version(self):
        return self.engine.version

    def load_weights(self, weights, version):
        if self.fault == "stale":
            weights = [(name, tensor.roll(1, -1) if "down_proj" in name else tensor) for name, tensor in weights]
        self.engine.load_weights(iter(weights), version)

    def sample(self, prompts, params, max_new_tokens, seed):
        if self.fault == "hot":
            params = dataclasses.replace(params, temperature=2.0)
        samples = self.engine.sample(prompts, params, max_new_tokens, seed)
        return [self.spoil(prompt, sample) for prompt, sample in zip(prompts, samples, strict=True)]

    def spoil(self, prompt, sample):
        tokens = sample.token_ids
        log_probs = sample.log_probs
        reason = sample.finish_reason
        if self.fault == "shift":
            log_probs = [-2.0, *log_probs[:-1]]
        if self.fault == "raw":
            logits = self.engine.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
            log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
        if self.fault == "no eos" and tokens[-1] == EOS and len(tokens) > 1:
            tokens = tokens[:-1]
            log_probs = log_probs[:-1]
        return Sample(tokens, log_probs, reason)


def findings(words, fault):
    """What the check says, with an engine of one fault on the first rank of each replica."""
    from megatron_rc.launch import check_engine
    from megatron_rc.launch.rollouts import collector

    config, task = configure(words, torch.distributed.get_world_size())
    right = collector.make_engine
    with mock.patch.object(collector, "make_engine", lambda *settings: Faulty(right(*settings), fault)):
        return check_engine.check_engine(config, task)


ABOUT = ["shift", "temperature and log-prob mode", "weights", "tokenizer", "end of text", "rewards"]
# A fault of the engine, flags, the findings, and words of one of them.
FAULTS = [
    (None, "--rl-default-temperature=0.6", set(), ""),
    ("shift", "", {"shift", "weights"}, "shifted by +1"),
    ("stale", "", {"weights"}, "other weights, a stale cache, or another tokenizer"),
    ("raw", "--rl-default-temperature=0.6", {ABOUT[1], "weights"}, "raw log-probs, before temperature"),
    ("hot", "", {ABOUT[1], "weights"}, "the engine samples at another temperature"),
    ("no eos", "", {"end of text"}, "must be in it, with its log-prob"),
]


@pytest.mark.parametrize(("fault", "more", "wrong", "message"), FAULTS)
def test_one_fault_is_one_finding(ranks, tmp_path, fault, more, wrong, message):
    (of_rank,) = ranks.run(findings, Layout(), flags(tmp_path, *WIDE, *more.split()), fault)
    assert {finding.about for finding in of_rank if not finding.agrees} == wrong
    assert [finding.about for finding in of_rank] == ABOUT
    assert any(message in finding.words for finding in of_rank)


def test_all_ends_of_a_models_files_are_checked(ranks, tmp_path):
    """An engine that stops at the tokenizer's own end alone goes on after the others."""
    arguments = words_of(glm_folder(tmp_path), "--grpo-prompts-per-step=8", "--global-batch-size=32")
    for fault in (None, "first end only"):
        (of_rank,) = ranks.run(findings, Layout(), arguments, fault)
        (ending,) = [finding for finding in of_rank if finding.about == "end of text"]
        assert "3 <|user|>, 4 <|observation|> (config.json, generation_config.json)" in ending.words
        assert ending.agrees == (fault is None)
        assert ("turns have an end inside: sampling went on after it" in ending.words) == (fault is not None)
        assert int(ending.words.split()[0]) > (8 if fault is None else 0)


def test_every_rank_finds_the_same(ranks, tmp_path):
    for layout, fault in ((Layout(cp=2), "shift"), (Layout(pp=2), None)):
        of_ranks = ranks.run(findings, layout, flags(tmp_path, *WIDE, *layout.flags()), fault)
        assert all(of_rank == of_ranks[0] for of_rank in of_ranks)
        wrong = {finding.about for finding in of_ranks[0] if not finding.agrees}
        assert ("weights" in wrong) if fault else not wrong


def test_rewards_that_fail_are_a_finding(ranks, tmp_path):
    rule = ["--reward=python:tests.support.user_rewards:refuse", "--reward-workers=1"]
    (of_rank,) = ranks.run(findings, Layout(), flags(tmp_path, *WIDE, *rule), None)
    assert [finding.about for finding in of_rank if not finding.agrees] == ["rewards"]
    sentence = "32 of 32 responses could not be scored: reward-errors.jsonl in the run's folder has them"
    assert sentence in of_rank[-1].words
    assert judge_rewards({"reward/mean": 0.0}, 4) == [], "recorded rewards"


def test_tokens_beyond_the_tokenizer_and_split_text_are_counted():
    """Three responses: one as the tokenizer would split it, one with a token that it lacks, one of two other pieces."""
    text = CharacterText("ab")
    batch = recorded_batch(0).rows([0, 1, 2])
    mask = torch.zeros_like(batch.response_mask)
    mask[:, 4:7] = True
    tokens = torch.full_like(batch.tokens, text.tokens_of("a")[0])
    tokens[:, 6] = text.eos
    batch = dataclasses.replace(batch, tokens=tokens, response_mask=mask)
    assert _tokens(batch, text).tolist() == [0, 3, 3]
    tokens[1, 5] = text.tokenizer.token_to_id("<unk>")
    assert _tokens(batch, text).tolist() == [0, 3, 2]
    tokens[1, 5] = text.size
    assert _tokens(batch, text).tolist()[:2] == [1, 3]
    split = judge_tokens(13, 0, 4, 3)
    foreign = judge_tokens(13, 2, 4, 0)
    assert (split.agrees, "3 of 4" in split.words) == (True, True)
    assert (foreign.agrees, "2 sampled tokens" in foreign.words) == (False, True)
    (inside,) = judge_endings(text.ends, 4, 4, 2)
    assert (inside.agrees, "sampling went on after it" in inside.words) == (False, True)


def test_every_turn_ends_with_a_token_or_a_string_that_ends_texts():
    tokens = torch.tensor([[5, 6, EOS, 7, 8, EOS, 0], [5, 6, EOS, 7, 8, 8, 8]])
    turns = torch.tensor([[0, 1, 1, 0, 1, 1, 0], [0, 1, 1, 0, 1, 1, 1]]).bool()
    batch = made_batch(tokens, turns, torch.full((2, 7), -1.0), torch.zeros(2), finish_reasons=torch.tensor([0, 1]))
    assert _endings(batch, ResponseEnds((EOS,))).tolist() == [1, 1, 0]
    whole = dataclasses.replace(batch, response_mask=torch.arange(7).expand(2, 7) > 0)
    assert _endings(whole, ResponseEnds((EOS,))).tolist() == [1, 0, 2], "without an observation between them"
    assert _endings(batch, ResponseEnds((EOS, 8))).tolist() == [1, 0, 2], "8 is inside of both last turns"
    assert _endings(batch, ResponseEnds((EOS,), ("88",), lambda ids: "".join(map(str, ids)))).tolist() == [1, 1, 1]
    strings = ResponseEnds((9,), ("61", "81"), lambda ids: "".join(map(str, ids)))
    assert _endings(batch, strings).tolist() == [1, 1, 0]
