"""Log-probs, entropy and Σπ² from vocabulary shards: values, gradients, collectives and errors.

The reference is plain ``log_softmax`` with autograd, in float64, on the same rounded logits.
"""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch

from megatron_rc.parallel import softmax, vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from tests.support.on_rank import all_ranks, recorded, shard_of
from tests.support.ranks import Layout
from tests.support.softmax_oracle import log_probs_entropy_squares

PADDED = 16  # of four ranks, the last holds only padding
VOCABULARY = 11
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = [{"chunk_size": size, "inplace_backward": inplace} for size in (None, 3) for inplace in (False, True)]
# Relative error of the results, and of the gradient, which is rounded to the logits' dtype.
RESULT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6, torch.float16: 3e-6}
GRADIENT = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


@dataclass(frozen=True)
class Batch:
    """Logits of the whole padded vocabulary, and the settings of a call.

    ``coefficients`` [3, ...] make a scalar of log-probs, entropy and Σπ², whose gradient is tested.
    """

    logits: torch.Tensor
    labels: torch.Tensor
    coefficients: torch.Tensor
    mask: torch.Tensor | None = None
    vocab_size: int = VOCABULARY
    temperature: float = 0.7

    @property
    def counted(self):
        return self.labels != -100 if self.mask is None else self.mask


def make(dtype=torch.float64, shape=(2, 5), **changes):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(*shape, PADDED, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, changes.get("vocab_size", VOCABULARY), shape, generator=generator)
    coefficients = 2 * torch.randn(3, *shape, generator=generator, dtype=torch.float64)
    logits[..., changes.get("vocab_size", VOCABULARY) :] = math.nan  # padding must not be seen
    if labels.numel() and "mask" not in changes:
        labels.view(-1)[3] = -100
    return Batch(logits.to(dtype), labels, coefficients, **changes)


def textbook(batch):
    """(results [3, ...], gradient at the logits), in float64."""
    logits = batch.logits.double().requires_grad_()
    scaled = logits[..., : batch.vocab_size] / batch.temperature
    results = log_probs_entropy_squares(scaled, batch.labels, counted=batch.counted)
    (grad,) = torch.autograd.grad(scalar(results, batch), logits)
    return results.detach(), torch.where(batch.counted.unsqueeze(-1), grad, 0)


def scalar(results, batch):
    """Σ coefficients · results, over the results that there are."""
    return sum((factor * result).sum() for factor, result in zip(batch.coefficients, results, strict=False))


def call(logits, batch, **options):
    settings = {"vocab_size": batch.vocab_size, "mask": batch.mask, "temperature": batch.temperature}
    options = settings | {"sum_squares": True} | options
    return vocab_parallel_log_probs_and_entropy(logits, batch.labels, all_ranks(), **options)


def log_probs_alone(logits, batch, **options):
    settings = {"vocab_size": batch.vocab_size, "mask": batch.mask, "temperature": batch.temperature}
    return (vocab_parallel_log_probs(logits, batch.labels, all_ranks(), **settings | options),)


def contiguous(shard):
    return shard.clone()


def outcome(batch, options=None, function=call, view=contiguous):
    """(results, gradient) on this rank, whose logits are a view of other memory, made from its own leaf."""
    options = options or {}
    leaf = shard_of(batch.logits).requires_grad_()
    logits = view(leaf)
    before = bits(logits).clone()
    pointer = logits.data_ptr()
    results = function(logits, batch, **options)
    total = scalar(results, batch)
    (grad,) = torch.autograd.grad(total, logits, retain_graph=True)
    assert grad.shape == logits.shape
    assert grad.dtype == logits.dtype
    if options.get("inplace_backward"):
        assert (grad.data_ptr(), grad.stride()) == (pointer, logits.stride())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(total, leaf)
    else:
        (again,) = torch.autograd.grad(total, leaf)
        assert torch.equal(bits(again), bits(grad)), "the second backward differs"
        assert torch.equal(bits(logits), before), "the caller's logits were written to"
    return torch.stack(results).detach(), grad.clone()


def outcomes_of(batch, choices, *more):
    """An outcome for each choice of options."""
    return [outcome(batch, options, *more) for options in choices]


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8)


def whole(outcomes):
    """(results, gradient over the whole vocabulary) from the ranks' outcomes, whose results are equal."""
    results, _ = outcomes[0]
    assert all(torch.equal(bits(results_of_rank), bits(results)) for results_of_rank, _ in outcomes)
    return results, torch.cat([grad for _, grad in outcomes], dim=-1)


def assert_textbook(outcomes, batch, scale=1):
    """Assert the results and the gradient; for logits larger by ``scale``, gradients may be coarser by as much."""
    results, grad = whole(outcomes)
    count = len(results)
    dtype = batch.logits.dtype
    assert results.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    factors = torch.cat([batch.coefficients[:count], torch.zeros_like(batch.coefficients[count:])])
    want, want_grad = textbook(replace(batch, coefficients=factors))
    torch.testing.assert_close(results.double(), want[:count], rtol=RESULT[dtype], atol=RESULT[dtype])
    atol = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(grad.double(), want_grad, rtol=GRADIENT[dtype], atol=scale * atol)
    assert not grad[..., batch.vocab_size :].any(), "padding has a gradient"
    assert not grad[~batch.counted].any(), "masked tokens have a gradient"


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float64), (4, torch.float64), *((2, dtype) for dtype in DTYPES)])
def test_shards_match_the_textbook(ranks, tp, dtype):
    for vocab_size in (PADDED, VOCABULARY, 3):
        batch = make(dtype, vocab_size=vocab_size)
        of_options = list(zip(*ranks.run(outcomes_of, Layout(tp=tp), batch, OPTIONS), strict=True))
        for outcomes in of_options:
            assert_textbook(outcomes, batch)
        for apart, inplace in zip(of_options[::2], of_options[1::2], strict=True):
            assert torch.equal(whole(apart)[1], whole(inplace)[1])


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.bfloat16), (2, torch.float64)])
def test_log_probs_alone_match_the_textbook(ranks, tp, dtype):
    batch = make(dtype)
    for options in ({}, {"chunk_size": 3, "inplace_backward": True}):
        assert_textbook(ranks.run(outcome, Layout(tp=tp), batch, options, log_probs_alone), batch)


ENTROPY_WEIGHTS = {
    "positive": lambda weights: weights.abs(),
    "negative": lambda weights: -weights.abs(),
    "either": lambda weights: weights,
    "denormal": lambda weights: 1e-40 * weights.abs(),
    "at some tokens": lambda weights: weights.clamp(min=0),
    "none": torch.zeros_like,
}


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (2, torch.bfloat16)])
def test_any_weight_of_the_entropy(ranks, tp, dtype):
    options = [{"sum_squares": False} | options for options in (OPTIONS[0], OPTIONS[-1])]
    for weights_of in ENTROPY_WEIGHTS.values():
        batch = make(dtype)
        batch.coefficients[1] = weights_of(batch.coefficients[1])
        for weights in (batch.coefficients[0].clone(), 0):
            batch.coefficients[0] = weights
            for outcomes in zip(*ranks.run(outcomes_of, Layout(tp=tp), batch, options), strict=True):
                assert_textbook(outcomes, batch)


def transposed(shard):
    return shard.transpose(0, 1).contiguous().transpose(0, 1)


def wide_rows(shard):
    return torch.cat([shard, torch.full_like(shard, 1e4)], dim=-1)[..., : shard.shape[-1]]


def every_other_row(shard):
    return shard.repeat_interleave(2, dim=1)[:, 1::2]


def vocabulary_first(shard):
    return shard.permute(2, 0, 1).contiguous().permute(1, 2, 0)


VIEWS = [transposed, wide_rows, every_other_row, vocabulary_first]


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_other_memory(view):
    batch = make(torch.bfloat16)
    for outcome_of_choice in outcomes_of(batch, OPTIONS, call, view):
        assert_textbook([outcome_of_choice], batch)


def without(batch, nowhere, instead=-math.inf):
    """The batch with logits of -inf at ``nowhere``; each label is at the first other logit of its row."""
    first = (batch.logits.isfinite() & ~nowhere).int().argmax(-1)
    labels = torch.where(batch.counted, first, -100)
    return replace(batch, logits=batch.logits.masked_fill(nowhere, instead), labels=labels)


@pytest.mark.parametrize(("tp", "where"), [(1, "some columns"), (4, "all columns of a rank")])
def test_a_logit_of_minus_infinity_has_probability_zero(ranks, tp, where):
    nowhere = torch.zeros(2, 5, PADDED, dtype=torch.bool)
    if where == "some columns":
        nowhere[0, 0, 3:5] = nowhere[1, 2, 0] = nowhere[..., 7] = True
    else:
        nowhere[0, 0, :8] = nowhere[0, 1, 8:] = nowhere[1, 1, :4] = True
    batch = without(make(), nowhere)
    for function in (call, log_probs_alone):
        for outcomes in zip(*ranks.run(outcomes_of, Layout(tp=tp), batch, OPTIONS, function), strict=True):
            assert whole(outcomes)[0].isfinite().all()
            assert_textbook(outcomes, batch)


@pytest.mark.parametrize(
    ("dtype", "temperature"), [(torch.float64, 2.0), (torch.float32, 0.7), (torch.bfloat16, 1.0), (torch.float16, 0.7)]
)
def test_the_lowest_number_is_as_good_as_minus_infinity(dtype, temperature):
    nowhere = torch.zeros(2, 5, PADDED, dtype=torch.bool)
    nowhere[0, 0, 3:5] = nowhere[1, 2, 0] = True
    batch = without(make(dtype, temperature=temperature), nowhere, torch.finfo(dtype).min)
    batch.coefficients[1].abs_()
    for options in ({}, {"sum_squares": False}):
        assert_textbook([outcome(batch, options)], batch)


def test_a_label_of_probability_zero():
    batch = make()
    batch.logits[0, 0, 4] = -math.inf
    batch.labels[0, 0] = 4
    batch.coefficients[1] = 3.0
    batch.coefficients[2] = 0
    for sum_squares in (False, True):
        results, grad = outcome(batch, {"sum_squares": sum_squares})
        assert results[0, 0, 0] == -math.inf
        assert results[1:].isfinite().all()
        torch.testing.assert_close(grad, textbook(batch)[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tp", "dtype"), [(1, torch.float32), (2, torch.float16)])
def test_huge_logits_do_not_overflow(ranks, tp, dtype):
    batch = make(dtype)
    batch.logits[0] += 1e4
    batch.logits[1] -= 1e4
    batch.logits[1, 1, 4] = 1e4
    batch.coefficients[1].abs_()
    for outcomes in zip(*ranks.run(outcomes_of, Layout(tp=tp), batch, [{}, {"sum_squares": False}]), strict=True):
        assert_textbook(outcomes, batch, scale=1e3)


@pytest.mark.parametrize(("tp", "bad"), [(1, -math.inf), (1, math.inf), (2, math.nan)])
def test_masked_positions_are_zero_whatever_stands_there(ranks, tp, bad):
    mask = torch.rand(2, 5, generator=torch.Generator().manual_seed(5)) < 0.5
    batch = make(torch.float32, mask=mask)
    spoiled = replace(batch, logits=batch.logits.clone(), labels=batch.labels.clone())
    spoiled.logits[~mask] = bad
    spoiled.labels[~mask] = torch.tensor([-100, -1, PADDED, 10**6, 3] * 2)[: (~mask).sum()]
    batch.coefficients[1].abs_()
    spoiled = replace(spoiled, coefficients=batch.coefficients)
    choices = [options | {"sum_squares": sum_squares} for options in OPTIONS for sum_squares in (False, True)]
    clean, got = (ranks.run(outcomes_of, Layout(tp=tp), case, choices) for case in (batch, spoiled))
    for index in range(len(choices)):
        results, grad = whole([rank[index] for rank in clean])
        got_results, got_grad = whole([rank[index] for rank in got])
        assert torch.equal(bits(got_results), bits(results))
        assert torch.equal(bits(got_grad), bits(grad))
        assert not got_results[:, ~mask].any()
        assert not got_grad[~mask].any()


@pytest.mark.parametrize(("tp", "label"), [(1, 10**6), (1, -1), (2, VOCABULARY), (2, PADDED), (2, -100)])
def test_a_label_out_of_range_is_nan_and_spoils_nothing_else(ranks, tp, label):
    batch = make(mask=torch.ones(2, 5, dtype=torch.bool))
    wrong = replace(batch, labels=batch.labels.clone())
    wrong.labels[0, 2] = label
    results, grad = whole(ranks.run(outcome, Layout(tp=tp), wrong))
    assert results[0, 0, 2].isnan()
    batch.coefficients[0, 0, 2] = 0  # the row's gradient comes from the entropy and Σπ²
    want, want_grad = textbook(batch)
    want[0, 0, 2] = math.nan
    torch.testing.assert_close(results, want, rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(grad, want_grad, rtol=1e-12, atol=1e-12)


FUNCTIONS = (vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy)
RIGHT = {"logits": torch.zeros(2, 5, 8), "labels": torch.zeros(2, 5, dtype=torch.int64), "vocab_size": VOCABULARY}
WRONG = [
    ({"logits": torch.zeros(2, 5, 8, dtype=torch.int64)}, r"logits .*int64"),
    ({"logits": torch.zeros(2, 4, 8)}, r"logits \(2, 4, 8\) .*labels \(2, 5\)"),
    ({"labels": torch.zeros(2, 5)}, r"labels .*float32"),
    ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask .*\(2, 4\)"),
    ({"temperature": 0.0}, r"temperature=0\.0"),
    ({"chunk_size": 0}, r"chunk_size=0"),
    ({"vocab_size": 17}, r"vocab_size=17"),
    ({"logits": torch.zeros(2, 5, 512), "vocab_size": 500}, r"512 .*its own shard"),
]


def raises():
    """The collectives on this rank before the errors that both functions raise."""
    with recorded() as seen:
        for (change, message), function in itertools.product(WRONG, FUNCTIONS):
            with pytest.raises(ValueError, match=message):
                function(tp_group=all_ranks(), **RIGHT | change)
    return seen


def test_wrong_input_is_named_before_any_collective(ranks):
    assert ranks.run(raises, Layout(tp=2)) == [[], []]


def collectives(batch, choices, function):
    """The collectives of the forward and of the backward, for each choice of options."""
    return [collectives_of_one(batch, options, function) for options in choices]


def collectives_of_one(batch, options, function):
    logits = shard_of(batch.logits).requires_grad_()
    with recorded() as forward:
        total = scalar(function(logits, batch, **options), batch)
    with recorded() as backward:
        total.backward()
    return forward, backward


@pytest.mark.parametrize(("tp", "shape"), [(1, (2, 5)), (2, (2, 5)), (2, (0, 5))])
def test_one_maximum_and_one_sum_are_all_the_collectives(ranks, tp, shape):
    batch = make(torch.float32, shape)
    tokens = math.prod(shape)
    for function, more, numbers in (
        (call, {"sum_squares": False}, 3),
        (call, {"sum_squares": True}, 4),
        (log_probs_alone, {}, 2),
    ):
        expected = [("MAX", tp, tokens), ("SUM", tp, numbers * tokens)] if tp > 1 else []
        calls = ranks.run(collectives, Layout(tp=tp), batch, [options | more for options in OPTIONS], function)
        assert calls == [[(expected, [])] * len(OPTIONS)] * tp


def test_compiled_chunks_do_the_same(monkeypatch):
    """The graphs for the compiler are run without a C++ compiler."""
    made = []

    def traced(function):
        made.append(function)
        return torch.compile(function, backend="aot_eager", dynamic=False)

    monkeypatch.setattr(softmax, "_compiled", traced)
    nowhere = torch.zeros(2, 5, PADDED, dtype=torch.bool)
    nowhere[0, 0, 3:5] = nowhere[1, 4, 5] = True
    batch = without(make(torch.bfloat16), nowhere)
    batch.logits[~batch.counted] = math.nan
    # The last chunk has one token.
    for options in (
        {"chunk_size": 3},
        {"chunk_size": 3, "inplace_backward": True},
        {"chunk_size": 9, "sum_squares": False},
    ):
        made.clear()
        compiled = outcome(batch, options | {"compile": True})
        assert len(made) >= 2, "nothing was compiled"
        assert_textbook([compiled], batch)
        torch.testing.assert_close(compiled, outcome(batch, options))
    torch._dynamo.reset()
