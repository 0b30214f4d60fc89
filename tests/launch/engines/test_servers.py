"""Rollout servers over HTTP: what is sent, and which answers and weights are refused."""

import base64
import io
import json
import threading
import time
from types import SimpleNamespace

import numpy
import pytest
import torch

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.engines.answers import derive_seed, make_asks
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.vllm_client import VllmClient
from megatron_rc.launch.engines.vllm_engine import _to_sample
from megatron_rc.launch.rollouts.samples import GoodSamples
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.records.rollout import SamplingParams
from tests.support.recorded_training import flags, run_config
from tests.support.rollout_servers import (
    ENDS,
    EOS,
    GENERATE,
    ROUTE,
    TOKENS,
    content_of,
    draw,
    generate_path,
    given,
    make_engine,
    running,
    sample,
    weights,
)


def test_samples_are_the_servers_in_the_order_of_the_prompts(engine, server):
    server.together = threading.Barrier(8, timeout=60)
    prompts = [[2 + index % 9, index % 7] for index in range(40)]
    samples = sample(engine, prompts)
    for index, (prompt, got) in enumerate(zip(prompts, samples, strict=True)):
        assert got == Sample(*draw(prompt, derive_seed(9, index), TOKENS), "length", versions=[3] * TOKENS)
    assert 8 <= server.most <= engine.concurrency == 64
    server.seen.clear()
    assert sample(engine, []) == []
    assert generate_path(engine) not in server.paths(), "no prompts are no requests"
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        sample(engine, [[5], []])
    seeds = {derive_seed(seed, index) for seed in range(30) for index in range(100)}
    assert len(seeds) == 3000
    assert all(0 <= seed < 2**31 for seed in seeds)


def test_every_sampling_parameter_is_named(engine, server):
    """What a request leaves out, a server takes from the model's generation_config.json."""
    sample(engine, temperature=0.6)
    body = dict(server.seen)[generate_path(engine)]
    sampling = body.get("sampling_params", body)
    fixed = {"min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "top_p": 1.0}
    assert sampling.items() >= (fixed | {"temperature": 0.6, "stop_token_ids": [EOS]}).items()
    assert sampling["top_k"] == (0 if type(engine.client) is VllmClient else -1)
    assert body.get("token_ids", body.get("input_ids")) == [5, 6]
    asked = {"return_routed_experts", "return_sampling_mask"}
    assert not asked & body.keys()


@pytest.mark.parametrize("kind", GENERATE)
def test_a_server_that_comes_back_costs_nothing_but_time(kind, tmp_path, caplog):
    """It was killed within a batch, and starts with weights of its own, which are not those of the trainer."""
    with running() as server:
        engine = given(kind, server, tmp_path, 5, concurrency=2)
        sample(engine)
        server.hold = 0.05
        whole = []
        thread = threading.Thread(target=lambda: whole.extend(sample(engine, [[2, index] for index in range(12)])))
        thread.start()
        while len(server.paths()) < 12:
            time.sleep(0.01)
        server.breaks = True
    time.sleep(0.3)
    assert not whole
    with running(server.server_address[1]) as server:
        thread.join()
        assert [got.token_ids for got in whole] == [
            draw([2, index], derive_seed(9, index), TOKENS)[0] for index in range(12)
        ]
        assert server.version == "5"
        swapped = "/collective_rpc" if kind is VllmClient else "/update_weights_from_disk"
        after = server.paths()[server.paths().index(swapped) :]
        assert after.count(GENERATE[kind]) == 12, "what the server sampled before it had the weights is not used"
    assert "lost the weights of step 5" in caplog.text


def in_choice(**fields):
    def change(answer):
        choice = answer["choices"][0]
        return answer | {"choices": [{name: value for name, value in (choice | fields).items() if value != "absent"}]}

    return change


def ended(tokens, *values):
    """Fields of a choice; all log-probs are -1 but the first ones."""
    return {"token_ids": tokens, "logprobs": content_of(tokens, [*values, *[-1.0] * (len(tokens) - len(values))])}


NO_LOG_PROB = "expected a finite number of at most 0"

WRONG_COMPLETIONS = {
    "html": ((200, b"<html>Not here</html>"), "answered '<html>Not here</html>', expected JSON"),
    "other-model": (lambda answer: answer | {"model": "large"}, "model large answered, not tiny"),
    "text-tokens": (in_choice(token_ids=["a"] * TOKENS), r"token ids are \['a'"),
    "empty": (in_choice(token_ids=[]), "the response is empty, expected at least one token"),
    "fewer-log-probs": (in_choice(logprobs=content_of([3] * 3, [-1.0] * 3)), "-1.0], expected a list of 4"),
    "other-log-probs": (in_choice(logprobs=content_of([9] * 4, [-1.0] * 4)), "log-probs of other tokens than"),
    "prompt-completed": (lambda answer: answer | {"prompt_token_ids": [0, 5, 6]}, "read 3 prompt tokens, not the 2"),
    "cut": (in_choice(**ended([3, 3])), "cut after 2 of 4 tokens: raise the engine's longest sequence"),
    "other-stop": (
        in_choice(**ended([3, 3]), finish_reason="stop"),
        "none of the end tokens 1: .*--rollout-stop-token-ids 3",
    ),
    "past-the-end": (in_choice(**ended([3, EOS, 3, 3])), "goes on after end token 1"),
}


def in_meta(**fields):
    def change(answer):
        meta = answer["meta_info"] | fields
        return answer | {"meta_info": {name: value for name, value in meta.items() if value != "absent"}}

    return change


def pairs(*values):
    def change(answer):
        return in_meta(output_token_logprobs=[[v, t, None] for v, t in values])(answer) | {
            "output_ids": [token for _, token in values]
        }

    return change


WRONG_GENERATIONS = {
    "list": (lambda answer: [answer, answer], "2 answers came, expected 1"),
    "other-tokens": (lambda answer: answer | {"output_ids": [7]}, "log-probs of other tokens than output_ids"),
    "nan": (pairs((float("nan"), 5), (-1, 5), (-1, 5), (-1, 5)), f"token 0 is nan, {NO_LOG_PROB}"),
    "prompt": (in_meta(prompt_tokens=3), "read 3 prompt tokens, 2 were sent"),
    "too-long": (pairs(*[(-1, 5)] * 5), "5 tokens came, 4 were asked for"),
    "aborted": (in_meta(finish_reason={"type": "abort", "message": "no"}), "ended with 'abort'"),
}


WRONG_ANSWERS = [
    *(pytest.param(VllmClient, *case, id=f"vllm-{name}") for name, case in WRONG_COMPLETIONS.items()),
    *(pytest.param(SglangClient, *case, id=f"sglang-{name}") for name, case in WRONG_GENERATIONS.items()),
]


@pytest.mark.parametrize(("kind", "fault", "message"), WRONG_ANSWERS)
def test_answers_that_cannot_be_trained_on(server, tmp_path, kind, fault, message):
    """The trainer asks for one response."""
    engine = given(kind, server, tmp_path)
    server.faults[GENERATE[kind]] = [fault]
    arguments = ["--rollout-engine=vllm-server", f"--rollout-url={server.url}", f"--rollout-weights-dir={tmp_path}"]
    samples = GoodSamples(run_config(flags(tmp_path, *arguments)), engine, ENDS, replica=0)
    with pytest.raises(EngineError, match=message) as caught:
        samples([[5, 6]], SamplingParams(), TOKENS, seed=9)
    assert server.paths().count(GENERATE[kind]) == 1
    assert server.url in str(caught.value)
    assert "\n" not in str(caught.value)


EXPERTS = torch.arange(5 * 3 * 2, dtype=torch.int32).view(5, 3, 2)  # of two prompt tokens and four others but the last
KEPT = [[7, 8], [3], [8, 9, 10], [4, 11]]


def lists_of(support):
    ids, counts = support
    return [own.tolist() for own in ids.split(counts.tolist())]


def numpy_file(array):
    file = io.BytesIO()
    numpy.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def reporting(kind, experts, kept):
    """A change of an answer: with experts and kept tokens, as this server writes them."""
    if kind is VllmClient:
        array = numpy_file(experts.numpy().astype(numpy.uint8))
        return in_choice(routed_experts=array, sampling_mask=kept)
    numbers = base64.b64encode(experts.numpy().tobytes()).decode()
    log_probs = [-0.5] * TOKENS
    return in_meta(routed_experts=numbers, output_token_sampling_mask=kept, output_token_sampling_logprobs=log_probs)


@pytest.mark.parametrize("kind", GENERATE, ids=["vllm", "sglang"])
def test_experts_and_kept_tokens_are_read(server, tmp_path, kind):
    engine = given(kind, server, tmp_path, experts_shape=(3, 2), reports_support=True)
    server.always[GENERATE[kind]] = reporting(kind, EXPERTS, KEPT)
    (got,) = sample(engine, top_p=0.9)
    assert torch.equal(got.routed_experts, EXPERTS)
    assert lists_of(got.support) == KEPT
    if kind is SglangClient:
        assert got.log_probs == [-0.5] * TOKENS, "over the kept tokens"
        body = dict(server.seen)["/generate"]
        assert body["return_routed_experts"]
        assert body["return_sampling_mask"]
    for params in ({"top_k": 1}, {}):
        (other,) = sample(engine, **params)
        assert other.support is None, "a greedy answer is not trained on; else no token was left out"
    server.always[GENERATE[kind]] = in_choice(**ended([])) if kind is VllmClient else pairs()
    assert sample(engine, top_p=0.9)[0].token_ids == [], "one bad response, which needs no experts"


PICKLE = numpy_file(numpy.array([print], dtype=object))
REPORTS = [
    (VllmClient, {"routed_experts": None}, "has no routed_experts: start the server with --enable-return-routed"),
    (VllmClient, {"sampling_mask": None}, "has no sampling_mask: start the server with --return-sampling-mask"),
    (VllmClient, {"routed_experts": PICKLE}, "routed_experts is no NumPy array in base64"),
    (VllmClient, {"sampling_mask": KEPT[1:]}, "kept tokens of 3 positions came for 4 tokens"),
    (SglangClient, {"routed_experts": "absent"}, "answered without routed_experts"),
    (SglangClient, {"routed_experts": "AAAA"}, "is no base64 of 5 tokens' experts"),
    (SglangClient, {"output_token_sampling_mask": "absent"}, "answered without output_token_sampling_mask"),
    (SglangClient, {"output_token_sampling_logprobs": [-1.0]}, r"log-probs are \[-1.0\], expected a list of 4"),
]


@pytest.mark.parametrize(("kind", "wrong", "message"), REPORTS)
def test_wrong_reports_are_named(server, tmp_path, kind, wrong, message):
    engine = given(kind, server, tmp_path, experts_shape=(3, 2), reports_support=True)
    put = in_choice if kind is VllmClient else in_meta
    server.always[GENERATE[kind]] = lambda answer: put(**wrong)(reporting(kind, EXPERTS, KEPT)(answer))
    with pytest.raises(EngineError, match=message):
        sample(engine, top_p=0.9)


# Two end tokens, and strings that tokens spell: the texts of the tokens are the letters from a on.
SEVERAL = ResponseEnds((EOS, 7), ("dd", "f"), lambda ids: "".join("abcdefghijklm"[token] for token in ids))


def answered(kind, tokens, reason):
    """A change of an answer: other tokens, and the reason of their end."""
    if kind is VllmClient:
        return in_choice(**ended(tokens), finish_reason=reason, weight_versions=None)
    change = pairs(*((-1.0, token) for token in tokens))
    return lambda answer: in_meta(finish_reason={"type": reason})(change(answer))


@pytest.mark.parametrize("kind", GENERATE, ids=["vllm", "sglang"])
def test_every_end_is_sent_and_accepted(server, tmp_path, kind):
    engine = given(kind, server, tmp_path, ends=SEVERAL)
    assert json.loads((tmp_path / "weights" / "config.json").read_text())["eos_token_id"] == [EOS, 7]
    ways = [([4, 7], "stop"), ([2, EOS], "stop"), ([2, 3, 3], "stop"), ([2, 2, 5], "stop"), ([2, 2, 2, 5], "length")]
    for tokens, reason in ways:
        # Tokens 5 and 3 alone end nothing but in a string.
        server.faults[GENERATE[kind]] = [answered(kind, tokens, reason)]
        (got,) = sample(engine)
        assert (got.token_ids, got.finish_reason) == (tokens, "stop")
    asked = next(body["sampling_params"] for path, body in server.seen if path == GENERATE[kind])
    assert asked.items() >= {"stop_token_ids": [EOS, 7], "stop": ["dd", "f"], "skip_special_tokens": False}.items()
    if kind is VllmClient:
        assert asked["detokenize"] is True, "else vLLM looks for no string"
        assert asked["ignore_eos"] is True, "the ends of the server's files end nothing"


BEYOND = {
    "token": ([7, 2, 2, 2], "length", "goes on after end token 7: "),
    "string": ([5, 2, 2, 2], "length", "goes on after the stop string 'f': .*--skip-tokenizer-init"),
    "no end": (
        [2, 4],
        "stop",
        "at token 4, which is none of the end tokens 1, 7: .*--rollout-stop-token-ids 4",
    ),
}


@pytest.mark.parametrize("kind", GENERATE, ids=["vllm", "sglang"])
@pytest.mark.parametrize(("tokens", "reason", "message"), BEYOND.values(), ids=BEYOND)
def test_answers_that_end_elsewhere_are_refused(server, tmp_path, kind, tokens, reason, message):
    engine = given(kind, server, tmp_path, ends=SEVERAL)
    server.faults[GENERATE[kind]] = [answered(kind, tokens, reason)]
    with pytest.raises(EngineError, match=message):
        sample(engine)


SWAP = ["/pause", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/resume"]


def test_vllm_takes_weights_over_while_it_is_paused(server, tmp_path):
    engine = given(VllmClient, server, tmp_path)
    assert server.paths()[-5:] == SWAP
    body = dict(server.seen)["/collective_rpc"]
    assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "weights")}}
    assert engine.client.model == "tiny"
    server.seen.clear()
    engine.load_weights(weights(seed=1).items(), 1)
    assert server.paths() == SWAP, "a server is met once"
    assert engine.version == 1
    # Of several models the named one is chosen.
    server.always["/v1/models"] = lambda _: {"data": [{"id": "a"}, {"id": "b"}]}
    sample(given(VllmClient, server, tmp_path, 5, model="b"))
    assert {body["model"] for path, body in server.seen if path == ROUTE} == {"b"}


def test_sglang_takes_weights_over_and_flushes(server, tmp_path):
    given(SglangClient, server, tmp_path, 7)
    body = {"model_path": str(tmp_path / "weights"), "flush_cache": True, "weight_version": "7"}
    assert server.seen[-2:] == [("/update_weights_from_disk", body), ("/flush_cache", None)]


def answer(**fields):
    return lambda _: fields


VLLM = VllmClient
SGLANG = SglangClient
DEVELOPER = r"status 404: use vLLM 0\.32 or newer, and start it as VLLM_SERVER_DEV_MODE=1 vllm"
RAW = {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}}
REFUSED = answer(success=False, message="shape")
FAILED = [
    (VLLM, "/server_info", (404, b""), f"/server_info.* {DEVELOPER}"),
    (VLLM, "/v1/models", answer(data=[{"id": "a"}, {"id": "b"}]), "serves a, b, not None: name"),
    (VLLM, "/server_info", answer(**RAW), "reports raw_logprobs, expected processed_logprobs"),
    (VLLM, "/collective_rpc", (500, b"disk"), "failed 4 times, at last with status 500: disk"),
    (VLLM, "/reset_prefix_cache", answer(success=False), "kept its prefix cache"),
    (VLLM, "/update_weight_version", (404, b""), f"/update_weight_version.* {DEVELOPER}"),
    (SGLANG, "/update_weights_from_disk", REFUSED, "did not take the weights over: shape"),
    (SGLANG, "/flush_cache", (400, b"requests are running"), "status 400: requests are running"),
]


@pytest.mark.parametrize(("kind", "path", "fault", "message"), FAILED)
def test_after_a_failed_sync_nothing_is_sampled(server, tmp_path, kind, path, fault, message):
    engine = make_engine(kind, server, tmp_path)
    server.faults[path] = [fault] * (4 if isinstance(fault, tuple) and fault[0] == 500 else 1)
    with pytest.raises(EngineError, match=message):
        engine.load_weights(weights().items(), 0)
    assert "/resume" not in server.paths()
    with pytest.raises(EngineError, match="call load_weights first"):
        sample(engine)
    engine.load_weights(weights().items(), 0)
    assert len(sample(engine)) == 1


@pytest.mark.parametrize(
    ("holds", "message"),
    [("7", "holds weights 7, expected 5"), ("default", "lost the weights of step 5")],
)
def test_a_server_with_other_weights_is_found_out(engine, server, holds, message):
    """Whether another trainer gives it some, or it never keeps them."""
    engine.load_weights(weights().items(), 5)
    sample(engine)
    give = "/update_weight_version" if type(engine.client) is VllmClient else "/update_weights_from_disk"
    server.always[give] = lambda answer: setattr(server, "version", holds) or answer
    server.version = holds
    with pytest.raises(EngineError, match=message):
        sample(engine)
    assert server.paths().count(give) == (1 if holds == "7" else 3), "it gets them twice more"


@pytest.mark.parametrize("status", [403, 404])
def test_a_vllm_without_the_route_of_token_ids_is_named(server, tmp_path, status):
    server.route_status = status
    with pytest.raises(EngineError, match=rf"status {status}\): use vLLM 0\.32 or newer.* --enable-scale-out"):
        given(VllmClient, server, tmp_path)


@pytest.mark.parametrize(("faults", "updates"), [([(503, b"")], 1), ([], 0)], ids=["away", "there"])
def test_a_server_that_names_no_versions_gets_its_weights_again_if_it_was_away(server, tmp_path, faults, updates):
    """An older SGLang: nobody else tells whether it was started again."""
    engine = given(SglangClient, server, tmp_path, 5)
    server.always["/generate"] = in_meta(weight_version="absent")
    server.faults["/generate"] = faults
    server.seen.clear()
    assert sample(engine)
    assert server.paths().count("/update_weights_from_disk") == updates


def test_a_server_that_goes_away_while_it_takes_weights_gets_them_from_the_beginning(server, tmp_path):
    engine = make_engine(VllmClient, server, tmp_path)
    server.faults["/reset_prefix_cache"] = [(502, b"")]
    engine.load_weights(weights().items(), 5)
    assert server.paths()[-11:] == [*SWAP[:3], *SWAP[2:], *SWAP]
    server.faults["/reset_prefix_cache"] = [(502, b"")]
    server.always["/reset_prefix_cache"] = lambda answer: (
        server.faults["/reset_prefix_cache"].append((502, b"")) or answer
    )
    with pytest.raises(EngineError, match="in each of 3"):
        engine.load_weights(weights().items(), 6)


def raw(answer):
    return in_meta(output_top_logprobs=[[[-0.5, 3, None]]])(answer)


def test_sglang_with_log_probs_before_temperature_is_found_out(server, tmp_path):
    engine = given(SglangClient, server, tmp_path)
    server.always["/generate"] = raw
    assert sample(engine), "at temperature 1 they are equal"
    with pytest.raises(EngineError, match=r"log-probs before temperature 0.5: start it without SGLANG_RETURN_ORIG"):
        sample(engine, temperature=0.5)
    server.always.clear()
    server.seen.clear()
    sample(engine, temperature=0.5)
    sample(engine, temperature=0.5)
    assert len(server.seen) == 4, "two more requests, once"
    with pytest.raises(EngineError, match=r"before top_p=0\.9, top_k=0 and min_p=0\.0: sample with top_p=1"):
        sample(engine, top_p=0.9)
    with pytest.raises(EngineError, match=r"before top_p=1\.0, top_k=2 and min_p=0\.0: sample"):
        sample(engine, top_k=2)
    assert sample(engine, top_k=1), "the likeliest tokens, which evaluations ask for"
    assert server.seen[-1][-1]["sampling_params"]["top_k"] == 1


def test_vllm_in_this_process_reports_experts_and_kept_tokens():
    """From vLLM's output, by its documented fields: it has them on a GPU alone."""
    (ask,) = make_asks([[5, 6]], SamplingParams(top_p=0.9), TOKENS, seed=9, ends=ENDS)
    tokens = [7, 3, 8, 4]
    answer = SimpleNamespace(
        token_ids=tokens,
        logprobs=[{token: SimpleNamespace(logprob=-0.5)} for token in tokens],
        finish_reason="length",
        routed_experts=EXPERTS.numpy().astype(numpy.uint8),
        sampling_mask=SimpleNamespace(token_ids=KEPT),
    )
    output = SimpleNamespace(prompt_token_ids=[5, 6], outputs=[answer])
    got = _to_sample(ask, output)
    assert torch.equal(got.routed_experts, EXPERTS)
    assert lists_of(got.support) == KEPT
    answer.routed_experts = answer.sampling_mask = None
    got = _to_sample(ask, output)
    assert got.routed_experts is None
    assert got.support is None
