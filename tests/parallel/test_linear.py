"""Log-probs and entropy from hidden states, forward and gradients, against a plain output layer and softmax."""

import pytest
import torch
import torch.distributed as dist

from megatron_rc.parallel import linear_log_probs_and_entropy
from tests.parallel.test_vocab_memory import allocated
from tests.support.on_rank import recorded
from tests.support.ranks import Layout
from tests.support.softmax_oracle import log_probs_entropy_squares

VOCABULARY = 11
PADDED = 16
HIDDEN = 6
TEMPERATURE = 0.7
SEQUENCE = 8
BATCH = 3


def make(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    labels = torch.randint(0, VOCABULARY, (SEQUENCE, BATCH), generator=generator)
    labels[1, 2] = -100
    return normal(SEQUENCE, BATCH, HIDDEN), normal(PADDED, HIDDEN), normal(PADDED), labels, normal(3, SEQUENCE, BATCH)


def plain(dtype=torch.float64):
    """(results, gradients of hidden, weight and bias) by autograd of the textbook formulas, in float64."""
    hidden, weight, bias, labels, coefficients = make(dtype)
    leaves = [value.double().requires_grad_() for value in (hidden, weight, bias)]
    logits = (leaves[0] @ leaves[1].t() + leaves[2])[..., :VOCABULARY]
    results = log_probs_entropy_squares(logits / TEMPERATURE, labels)
    (coefficients.double() * results).sum().backward()
    return list(results.detach()), [leaf.grad for leaf in leaves]


def local(dtype, sequence_parallel, chunk_size):
    """(results, gradients) on one TP rank; its hidden states are a slice with sequence parallelism."""
    hidden, weight, bias, labels, coefficients = make(dtype)
    rank = dist.get_rank()
    size = dist.get_world_size()
    rows = PADDED // size
    part = SEQUENCE // size
    if sequence_parallel:
        hidden = hidden[rank * part : (rank + 1) * part]
    leaves = [hidden, weight[rank * rows : (rank + 1) * rows], bias[rank * rows : (rank + 1) * rows]]
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    results = linear_log_probs_and_entropy(
        leaves[0],
        leaves[1],
        labels,
        dist.group.WORLD,
        bias=leaves[2],
        sequence_parallel=sequence_parallel,
        vocab_size=VOCABULARY,
        temperature=TEMPERATURE,
        chunk_size=chunk_size,
        sum_squares=True,
    )
    sum((c * r).sum() for c, r in zip(coefficients, results, strict=True)).backward()
    return [result.detach() for result in results], [leaf.grad for leaf in leaves]


def assert_equal(results, expected, sequence_parallel, tolerance):
    """Assert that results on every rank, and the joined gradients, are the reference's."""
    want, gradients = expected
    for got, _ in results:
        for value, reference in zip(got, want, strict=True):
            torch.testing.assert_close(value.double(), reference, rtol=tolerance, atol=tolerance)
    shards = list(zip(*(grads for _, grads in results), strict=True))
    whole = [torch.cat(shards[0]) if sequence_parallel else shards[0][0], torch.cat(shards[1]), torch.cat(shards[2])]
    for value, reference in zip(whole, gradients, strict=True):
        torch.testing.assert_close(value.double(), reference, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "chunk_size"), [(1, False, 5), (2, True, 1), (4, False, None), (4, True, 5)]
)
def test_shards_match_a_plain_output_layer(ranks, tp, sequence_parallel, chunk_size):
    results = ranks.run(local, Layout(tp=tp), torch.float64, sequence_parallel, chunk_size)
    assert_equal(results, plain(), sequence_parallel, 1e-12)
    if tp > 1 and not sequence_parallel:
        for _, gradients in results[1:]:
            assert torch.equal(gradients[0], results[0][1][0]), "hidden's gradient is complete on every rank"


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 5e-2)])
def test_lower_precision(ranks, dtype, tolerance):
    results = ranks.run(local, Layout(tp=2), dtype, True, 5)
    assert results[0][1][1].dtype == dtype
    assert results[0][0][0].dtype == torch.float32
    assert_equal(results, plain(dtype), True, tolerance)


@pytest.mark.parametrize("backward_inside", [False, True], ids=["backward outside", "backward inside"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_changes_no_bit(dtype, backward_inside):
    """Autocast would compute the matmuls in bfloat16, and log-probs would differ from the engine's by percents."""
    hidden, weight, bias, labels, coefficients = make(dtype)
    outcomes = []
    for enabled in (False, True):
        leaves = [value.clone().requires_grad_() for value in (hidden, weight, bias)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            results = linear_log_probs_and_entropy(leaves[0], leaves[1], labels, bias=leaves[2], chunk_size=5)
            loss = sum((c * r).sum() for c, r in zip(coefficients, results, strict=False))
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        outcomes.append([*results, *(leaf.grad for leaf in leaves)])
    for without, with_autocast in zip(*outcomes, strict=True):
        assert without.dtype == with_autocast.dtype
        assert torch.equal(without, with_autocast)


def test_a_frozen_weight_gets_no_gradient():
    hidden, weight, _, labels, _ = make()
    hidden.requires_grad_()
    linear_log_probs_and_entropy(hidden, weight, labels, vocab_size=VOCABULARY)[0].sum().backward()
    assert weight.grad is None
    assert hidden.grad.abs().sum() > 0


def collectives(sequence_parallel, chunk_size):
    """Kinds and sizes of the collectives of one call, forward and backward."""
    with recorded() as seen:
        local(torch.float64, sequence_parallel, chunk_size)
    return [(kind, numbers) for kind, _, numbers in seen]


TOKENS = SEQUENCE * BATCH


def test_collectives_of_the_statistics_do_not_grow_with_chunks(ranks):
    """Chunks of sequence parallelism are gathered twice and scattered once."""
    for chunk_size in (1, None):
        for seen in ranks.run(collectives, Layout(tp=2), False, chunk_size):
            assert seen == [("MAX", TOKENS), ("SUM", 4 * TOKENS), ("SUM", TOKENS * HIDDEN)]
    assert ranks.run(collectives, Layout(), False, 1) == [[]]
    half = TOKENS // 2 * HIDDEN
    gather = ("ALL_GATHER_INTO_TENSOR", half)
    scatter = ("REDUCE_SCATTER_TENSOR", half // 2)
    sums = [("MAX", TOKENS), ("SUM", 4 * TOKENS)]
    for seen in ranks.run(collectives, Layout(tp=2), True, TOKENS // 2):
        assert seen == [gather, gather, *sums, gather, scatter, gather, scatter]


def test_no_logits_are_held():
    """Beyond the gradients: at most 2.2 chunks of logits at any time."""
    tokens = 512
    width = 16384
    hidden_size = 64
    chunk = 128
    hidden = torch.randn(tokens, hidden_size, requires_grad=True)
    weight = torch.randn(width, hidden_size, requires_grad=True)
    labels = torch.randint(0, width, (tokens,))

    def run():
        results = linear_log_probs_and_entropy(hidden, weight, labels, chunk_size=chunk)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])

    run()
    hidden.grad = weight.grad = None
    largest, allocated_at_end = allocated(run)
    gradients = 4 * (hidden.numel() + weight.numel())
    assert allocated_at_end >= gradients
    assert largest - gradients <= 2.2 * 4 * chunk * width


def test_no_tokens_are_fine():
    weight = torch.randn(PADDED, HIDDEN, requires_grad=True)
    hidden = torch.zeros(0, BATCH, HIDDEN, requires_grad=True)
    log_probs, entropy = linear_log_probs_and_entropy(hidden, weight, torch.zeros(0, BATCH, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == (0, BATCH)
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(SEQUENCE, BATCH, HIDDEN, dtype=torch.bfloat16)}, "bfloat16"),
        ({"hidden": torch.zeros(SEQUENCE, BATCH, HIDDEN + 1)}, r"hidden|multiplied"),
        ({"labels": torch.zeros(SEQUENCE, dtype=torch.int64)}, "labels"),
        ({"bias": torch.zeros(HIDDEN)}, "bias"),
        ({"gradient_accumulation": True}, r"main_grad"),
    ],
)
def test_wrong_input_is_named(change, message):
    arguments = {
        "hidden": torch.zeros(SEQUENCE, BATCH, HIDDEN),
        "weight": torch.zeros(PADDED, HIDDEN),
        "labels": torch.zeros(SEQUENCE, BATCH, dtype=torch.int64),
        "vocab_size": VOCABULARY,
    }
    with pytest.raises(ValueError, match=message):
        linear_log_probs_and_entropy(**(arguments | change))
