"""A teacher's log-probs over HTTP: the same of both kinds of servers, and answers that cannot be used are refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.http_client import HttpClient
from megatron_rc.launch.engines.teacher_server import SERVERS, ScoreRequest
from megatron_rc.launch.tasks.text import CharacterText
from tests.support.rollout_servers import CONFIG, QUICK, running
from tests.support.teacher_servers import TeacherAnswers

TOP_K = 4
VOCABULARY = 13
TEXT = CharacterText("0123456789")
SEQUENCES = [ScoreRequest([5, 6], [7, 1, 2]), ScoreRequest([3], [4]), ScoreRequest([9, 9, 9], [8, 0])]
KINDS = {"vllm": "/v1/completions", "sglang": "/generate"}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(CONFIG).double()


@pytest.fixture
def server(model):
    with running(kind=TeacherAnswers) as started:
        started.model = model
        yield started


def teacher(kind, server, decode=TEXT.decode):
    return SERVERS[kind](HttpClient(server.url, timeout=5.0, retries=QUICK), TOP_K, VOCABULARY, decode)


@pytest.mark.parametrize("kind", KINDS)
def test_log_probs_are_the_models(server, model, kind):
    for sequence, scored in zip(SEQUENCES, teacher(kind, server).score(SEQUENCES, concurrency=2), strict=True):
        logits = model(input_ids=torch.tensor([sequence.tokens])).logits[0, len(sequence.prompt) - 1 : -1]
        expected = logits.detach().log_softmax(-1)
        top = expected.topk(TOP_K)
        torch.testing.assert_close(torch.tensor(scored.top_ids), top.indices)
        torch.testing.assert_close(torch.tensor(scored.top_log_probs).double(), top.values, rtol=0, atol=1e-6)
        own = expected.gather(1, torch.tensor(sequence.response)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(scored.log_probs).double(), own, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_another_tokenizer_is_noticed(server, kind):
    """By the text of a plain token; a server that shows no text is not known to have another one."""
    with pytest.raises(EngineError, match=r"token 7 is '4' to the teacher and '5' to the policy"):
        teacher(kind, server, CharacterText("1234567890").decode).score(SEQUENCES, concurrency=1)
    server.shows_text = False
    assert teacher(kind, server, CharacterText("1234567890").decode).score(SEQUENCES, concurrency=1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_is_not_there(kind, server):
    teacher(kind, server).wait_until_ready(1.0)
    away = SERVERS[kind](HttpClient("http://127.0.0.1:1", timeout=1.0, retries=QUICK), TOP_K, VOCABULARY, TEXT.decode)
    with pytest.raises(EngineError, match=r"there is no rollout server at http://127\.0\.0\.1:1"):
        away.wait_until_ready(0.2)


def vllm_entries(answer):
    return answer["choices"][0]["prompt_logprobs"]


def without_log_probs(answer):
    answer["choices"][0]["prompt_logprobs"] = None
    return answer


def of_other_tokens(answer):
    answer["choices"][0]["prompt_token_ids"] = [1]
    return answer


def with_value(value):
    def change(answer):
        for entry in vllm_entries(answer)[-1].values():
            entry["logprob"] = value
        return answer

    return change


def with_one_less(answer):
    entry = vllm_entries(answer)[-1]
    del entry[_likely(entry)]
    return answer


def with_a_large_id(answer):
    entry = vllm_entries(answer)[-1]
    entry["99"] = entry.pop(_likely(entry))
    return answer


def _likely(entry):
    """One of the likeliest tokens, which is not the token of the text."""
    token = str(SEQUENCES[0].response[-1])
    return next(number for number, value in entry.items() if value["rank"] <= TOP_K and number != token)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_log_probs, "no log-probs of the 4 likeliest tokens"),
        (of_other_tokens, "the server read other tokens"),
        (with_value(0.5), "0.5 is no log-prob"),
        (with_value("x"), "x is no log-prob"),
        (with_one_less, "expected 4 different ones below 13"),
        (with_a_large_id, "expected 4 different ones below 13"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_answers_that_cannot_be_used(server, change, words):
    server.faults["/v1/completions"] = [change]
    with pytest.raises(EngineError, match=words):
        teacher("vllm", server).score(SEQUENCES[:1], concurrency=1)


def test_a_server_with_several_models_needs_a_name(server):
    server.faults["/v1/models"] = [lambda answer: {"data": [{"id": "a"}, {"id": "b"}]}]
    with pytest.raises(EngineError, match=r"serves a, b: name the teacher with --teacher-model"):
        teacher("vllm", server).score(SEQUENCES, concurrency=1)
    named = teacher("vllm", server)
    named.model = "b"
    named.score(SEQUENCES[:1], concurrency=1)
    assert server.seen[-1][1]["model"] == "b"
