"""The transformers engine: the weights it gets, the tokens it samples, the log-probs it reports."""

import math

import pytest
import torch
import transformers

from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.rounding import round_weight
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.tasks.ends import ResponseEnds
from megatron_rc.launch.weights import find_family
from megatron_rc.launch.weights.checkpoint_names import checkpoint_tensors
from megatron_rc.records.rollout import SamplingParams
from tests.support.recorded_training import GPT2, LLAMA, VOCABULARY, flags, run_config

PAD = 0
EOS = 1
ENDS = ResponseEnds((EOS,))


PROMPTS = [[5], [3, 4, 5, 6], [7, 8], [9, 10, 11]] * 4


def engine_of(words, **options):
    config = run_config(words)
    torch.manual_seed(0)
    model = find_family(config).hugging_face_config(config)
    return TransformersEngine(model, "fp32", ENDS, PAD, torch.device("cpu"), **options)


@pytest.fixture
def engine(tmp_path):
    return engine_of(flags(tmp_path, "--init-method-std=0.3"))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_sampled_distribution(engine, temperature):
    """Prompts of different lengths in one batch, each response scored again by itself, without cache or padding."""
    samples = engine.sample(PROMPTS, SamplingParams(temperature=temperature), 6, seed=5)
    reasons = set()
    for prompt, sample in zip(PROMPTS, samples, strict=True):
        logits = engine.model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
        want = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sample.token_ids).unsqueeze(1))
        torch.testing.assert_close(torch.tensor(sample.log_probs), want.squeeze(1), rtol=1e-4, atol=1e-4)
        ended = sample.token_ids[-1] == EOS
        assert EOS not in sample.token_ids[:-1]
        assert sample.finish_reason == ("stop" if ended else "length")
        assert ended or len(sample.token_ids) == 6
        reasons.add(sample.finish_reason)
    assert reasons == {"stop", "length"}


def test_sampling_follows_the_distribution(engine):
    """4,000 first tokens against the probabilities they were drawn with: within five standard errors each."""
    samples = engine.sample([[4, 5]] * 4000, SamplingParams(), 1, seed=0)
    drawn = torch.tensor([sample.token_ids[0] for sample in samples]).bincount(minlength=VOCABULARY) / 4000
    expected = engine.model(torch.tensor([[4, 5]])).logits[0, -1].softmax(-1)
    assert ((drawn - expected).abs() <= 5 * (expected * (1 - expected) / 4000).sqrt() + 1e-9).all()


def test_weights_are_rounded_to_the_rollout_type():
    tensor = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    assert torch.equal(round_weight(tensor, "fp32", True), tensor)
    bf16 = round_weight(tensor, "bf16", True)
    fp8 = round_weight(tensor, "fp8-e4m3", True)
    assert torch.equal(bf16, bf16.bfloat16().float())
    assert torch.equal(round_weight(tensor, "fp8-e4m3", False), bf16)
    assert (bf16 - tensor).abs().max() <= 2**-8 * tensor.abs().max()
    # Three mantissa bits: half a step is 1/16 of a value, but for the smallest ones.
    assert ((fp8 - tensor).abs() <= tensor.abs() / 16 + tensor.abs().amax(1, keepdim=True) * 2**-9 / 448 * 1.01).all()
    assert (fp8 - tensor).abs().mean() > 4 * (bf16 - tensor).abs().mean()


@pytest.mark.parametrize("dtype", ["fp8-e4m3", "int8"])
def test_the_weights_of_a_directory_are_rounded_like_the_engines(tmp_path, dtype):
    """What vLLM reads is what the transformers engine holds; GPT-2 stores its weights the other way round."""
    for model in (LLAMA, GPT2, [*LLAMA, "--num-experts=2", "--qk-layernorm"]):
        config = run_config(flags(tmp_path, model=model))
        config = find_family(config).hugging_face_config(config)
        torch.manual_seed(1)
        trained = transformers.AutoModelForCausalLM.from_config(config)
        weights = [(name, tensor.detach()) for name, tensor in checkpoint_tensors(trained).items()]
        engine = TransformersEngine(config, dtype, ENDS, PAD, torch.device("cpu"))
        engine.load_weights(weights, 2)
        assert engine.version == 2
        path = ModelDirectory(tmp_path / "weights", config, EOS, dtype).write(weights)
        read = transformers.AutoModelForCausalLM.from_pretrained(path).state_dict()
        changed = 0
        for name, parameter in engine.model.named_parameters():
            assert torch.equal(parameter, read[name]), name
            changed += not torch.equal(parameter, trained.state_dict()[name])
        assert changed > 10


def test_greedy_sampling(tmp_path):
    engine = engine_of(flags(tmp_path, "--init-method-std=0.5"))
    torch.manual_seed(0)
    engine.load_weights([(n, 0.3 * torch.randn_like(p)) for n, p in engine.model.named_parameters()], 0)
    prompts = [[3, 4], [5]] * 8
    samples = engine.sample(prompts, SamplingParams(top_k=1), 6, seed=0)
    of_other_seed = engine.sample(prompts, SamplingParams(top_k=1), 6, seed=1)
    assert [sample.token_ids for sample in samples] == [sample.token_ids for sample in of_other_seed]
    logits = engine.model(torch.tensor([prompts[0]])).logits[0, -1]
    assert samples[0].token_ids[0] == int(logits.argmax())
    assert all(value == 0 for sample in samples for value in sample.log_probs)
    assert all(sample.support is None for sample in samples), "the engine was not asked for kept tokens"


def kept_by_hand(logits, params):
    """Ids that top-k, then top-p, then min-p keep of a row of logits, and their log-probs."""
    order = (logits / params.temperature).double().sort(descending=True)
    ids = order.indices.tolist()
    probabilities = order.values.softmax(0).tolist()
    if params.top_k:
        ids = ids[: params.top_k]
        probabilities = probabilities[: params.top_k]
    total = sum(probabilities)
    of_top_p = []
    sum_before = 0.0
    for token, probability in zip(ids, probabilities, strict=True):
        if sum_before / total < params.top_p:
            of_top_p.append((token, probability))
        sum_before += probability
    lowest = params.min_p * probabilities[0]
    of_min_p = [(token, probability) for token, probability in of_top_p if probability >= lowest]
    total = sum(probability for _, probability in of_min_p)
    return {token: math.log(probability / total) for token, probability in of_min_p}


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.7),
        SamplingParams(top_k=4),
        SamplingParams(min_p=0.4),
        SamplingParams(0.8, top_p=0.8, top_k=7, min_p=0.05),
    ],
    ids=str,
)
def test_kept_tokens_and_log_probs_over_them_are_reported(tmp_path, params):
    engine = engine_of(flags(tmp_path), reports_support=True)
    torch.manual_seed(0)
    engine.load_weights([(n, 0.3 * torch.randn_like(p)) for n, p in engine.model.named_parameters()], 0)
    sizes = set()
    for prompt, sample in zip(PROMPTS, engine.sample(PROMPTS, params, 6, seed=5), strict=True):
        ids, counts = sample.support
        assert ids.dtype == counts.dtype == torch.int32
        logits = engine.model(torch.tensor([prompt + sample.token_ids])).logits[0, len(prompt) - 1 : -1]
        ids_of_steps = ids.split(counts.tolist())
        for row, token, log_prob, kept in zip(logits, sample.token_ids, sample.log_probs, ids_of_steps, strict=True):
            expected = kept_by_hand(row, params)
            assert set(kept.tolist()) == set(expected)
            assert log_prob == pytest.approx(expected[token], abs=1e-4)
            sizes.add(len(kept))
    assert min(sizes) < VOCABULARY
    assert len(sizes) > 1 or params.top_k == 4
    (sample,) = engine.sample([[3]], SamplingParams(), 2, seed=0)
    assert sample.support is None, "all tokens were kept"


def test_a_prompt_of_several_responses_is_read_once(engine):
    """The samples are the same to the last digit as where each response reads its own prompt."""
    generator = torch.Generator().manual_seed(3)
    different = [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in (40, 33)]
    prompts = [prompt for prompt in different for _ in range(4)]
    shapes = []  # of the tokens of each call of the model
    model = engine.model

    def watched(**arguments):
        shapes.append(tuple(arguments["input_ids"].shape))
        return model(**arguments)

    engine.model = watched
    samples = engine.sample(prompts, SamplingParams(), 8, 11)
    assert shapes[:2] == [(2, 40), (8, 1)]
    shapes.clear()
    engine._shares_prompts = False
    assert engine.sample(prompts, SamplingParams(), 8, 11) == samples
    assert shapes[:2] == [(8, 40), (8, 1)]
    shapes.clear()
    # One response each, or so few tokens that other kernels compute them.
    engine._shares_prompts = True
    engine.sample(different, SamplingParams(), 1, 11)
    engine.sample([[3, 4, 5]] * 4, SamplingParams(), 1, 11)
    assert shapes == [(2, 40), (4, 3)]


def test_the_same_seed_gives_the_same_responses(engine):
    first, again, other = (engine.sample([[4], [5]] * 4, SamplingParams(), 8, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert [sample.token_ids for sample in first] != [sample.token_ids for sample in other]
