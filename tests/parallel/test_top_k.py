"""Divergences from a few of the teacher's tokens: values, gradients, means over sampled tokens, limits and errors.

The reference is :mod:`tests.support.divergence_oracle`, position by position, in float64.
"""

import itertools
import math

import pytest
import torch

from megatron_rc.parallel import linear_top_k_divergence, top_k_divergence, vocab_parallel_divergence
from megatron_rc.parallel.divergence import DIVERGENCES
from megatron_rc.parallel.groups import group_rank
from megatron_rc.parallel.top_k import TAILS
from tests.parallel.test_vocab_memory import allocated
from tests.support.divergence_oracle import of_top_k
from tests.support.on_rank import all_ranks, recorded, shard_of
from tests.support.ranks import Layout

PADDED = 16  # of four ranks, the last holds only padding
VOCABULARY = 11
SHAPE = (4, 2)
HIDDEN = 6
TEMPERATURE = 0.7
BETAS = {"reverse_kl": None, "forward_kl": None, "jsd": 0.3}
NUM_IDS = [3, 5, 0, VOCABULARY, 1, 4, 2, VOCABULARY - 1]
CASES = list(itertools.product(DIVERGENCES, TAILS))


def make():
    """(hidden, weight, teacher's logits, labels, mask, list of ids of each position, coefficients)."""
    generator = torch.Generator().manual_seed(2)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden = normal(*SHAPE, HIDDEN)
    weight = normal(PADDED, HIDDEN)
    teacher = 2 * normal(*SHAPE, VOCABULARY)
    mask = torch.ones(SHAPE, dtype=torch.bool)
    mask[1, 1] = False
    labels = torch.randint(0, VOCABULARY, SHAPE, generator=generator)
    labels[~mask] = -100
    ids = [torch.randperm(VOCABULARY, generator=generator)[:number].tolist() for number in NUM_IDS]
    # Two labels that are among the teacher's tokens.
    labels[0, 0] = ids[0][1]
    labels[2, 1] = ids[5][0]
    return hidden, weight, teacher, labels, mask, ids, normal(*SHAPE)


def of_teacher(tail):
    """The arguments that say what the teacher says."""
    _, _, teacher, labels, mask, ids, _ = make()
    log_probs = teacher.log_softmax(-1)
    known = [row[of_row] for row, of_row in zip(log_probs.flatten(0, 1), ids, strict=True)]
    arguments = {
        "teacher_ids": torch.tensor([token for of_row in ids for token in of_row]),
        "teacher_offsets": torch.tensor([0, *map(len, ids)]).cumsum(0),
        "teacher_log_probs": torch.cat(known),
        "tail": tail,
        "vocab_size": VOCABULARY,
        "temperature": TEMPERATURE,
        "mask": mask,
    }
    # What stands at a position that does not count is not read.
    masked = int((~mask).flatten().nonzero())
    first = int(arguments["teacher_offsets"][masked])
    arguments["teacher_ids"][first] = 10**12
    arguments["teacher_log_probs"][first] = math.nan
    if tail == "sampled":
        arguments["labels"] = labels
        of_labels = log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        arguments["teacher_label_log_probs"] = torch.where(mask, of_labels, math.nan)
    return arguments


def reference(kind, tail):
    """(divergence, gradients of hidden and weight), one position after the other."""
    hidden, weight, teacher, labels, mask, ids, coefficients = make()
    leaves = [hidden.requires_grad_(), weight.requires_grad_()]
    logits = (hidden @ weight.t())[..., :VOCABULARY] / TEMPERATURE
    beta = BETAS[kind] or 0.5
    values = torch.zeros(SHAPE, dtype=torch.float64)
    for number, place in enumerate(itertools.product(*map(range, SHAPE))):
        if mask[place]:
            label = int(labels[place])
            values[place] = of_top_k(tail, kind, logits[place], teacher[place], ids[number], beta=beta, label=label)
    gradients = torch.autograd.grad((coefficients * values).sum(), leaves)
    return values.detach(), gradients


def outcomes(sequence_parallel):
    """{(kind, tail, from logits): (divergence, gradients of hidden and weight, collectives)} on this rank."""
    results = {}
    for (kind, tail), from_logits in itertools.product(CASES, (True, False)):
        hidden, weight, *_, mask, _, coefficients = make()
        arguments = of_teacher(tail) | {"tp_group": all_ranks(), "kind": kind, "beta": BETAS[kind]}
        rows = shard_of(weight, 0).requires_grad_()
        with recorded() as calls:
            if from_logits:
                hidden.requires_grad_()
                logits = hidden @ rows.t()
                with torch.no_grad():
                    logits[~mask] = math.nan
                    first = group_rank(all_ranks()) * len(rows)
                    logits[..., max(0, VOCABULARY - first) :] = math.nan
                values = top_k_divergence(logits, chunk_size=3, **arguments)
            else:
                hidden = shard_of(hidden, 0) if sequence_parallel else hidden
                hidden.requires_grad_()
                values = linear_top_k_divergence(
                    hidden, rows, sequence_parallel=sequence_parallel, chunk_size=4, **arguments
                )
        (coefficients * values).sum().backward()
        results[kind, tail, from_logits] = values.detach(), (hidden.grad, rows.grad), list(calls)
    return results


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (4, False), (4, True)])
def test_shards_match_the_definitions(ranks, tp, sequence_parallel):
    of_ranks = ranks.run(outcomes, Layout(tp=tp), sequence_parallel)
    for kind, tail, from_logits in of_ranks[0]:
        want, (of_hidden, of_weight) = reference(kind, tail)
        shards = [of_rank[kind, tail, from_logits] for of_rank in of_ranks]
        for values, _, _ in shards:
            torch.testing.assert_close(values, want, rtol=1e-11, atol=1e-12)
        got_hidden = [gradients[0] for _, gradients, _ in shards]
        whole = torch.cat(got_hidden) if sequence_parallel else got_hidden[-1]
        if from_logits:
            # A plain product's gradient is of this rank's rows of the weight.
            whole = sum(got_hidden)
        torch.testing.assert_close(whole, of_hidden, rtol=1e-11, atol=1e-12)
        got_weight = torch.cat([gradients[1] for _, gradients, _ in shards])
        torch.testing.assert_close(got_weight, of_weight, rtol=1e-11, atol=1e-12)

        tokens = math.prod(SHAPE)
        numbers = {"none": sum(NUM_IDS), "rest": tokens + sum(NUM_IDS), "sampled": 2 * tokens + sum(NUM_IDS)}
        expected = [("MAX", tp, tokens)] * (tail != "none") + [("SUM", tp, numbers[tail])]
        for _, _, calls in shards:
            statistics = [call for call in calls if call[0] != "ALL_GATHER_INTO_TENSOR"]
            assert statistics == (expected if tp > 1 else [])


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_mean_over_sampled_tokens_is_that_of_the_whole_vocabulary(kind):
    """Value and gradient: the sampled token stands for all that the teacher's list lacks."""
    hidden, weight, teacher, _, mask, _, coefficients = make()
    logits = (hidden @ weight.t())[..., :VOCABULARY].clone().requires_grad_()
    probabilities = (logits.detach() / TEMPERATURE).softmax(-1)
    arguments = of_teacher("sampled") | {"kind": kind, "beta": BETAS[kind]}
    mean = torch.zeros(SHAPE, dtype=torch.float64)
    for token in range(VOCABULARY):
        arguments["labels"] = torch.full(SHAPE, token)
        arguments["teacher_label_log_probs"] = teacher.log_softmax(-1)[..., token]
        mean = mean + probabilities[..., token] * top_k_divergence(logits, **arguments)
    (gradient,) = torch.autograd.grad((coefficients * mean).sum(), logits)

    whole = vocab_parallel_divergence(
        logits,
        teacher,
        kind=kind,
        beta=BETAS[kind],
        mask=mask,
        temperature=TEMPERATURE,
        teacher_temperature=1.0,
    )
    (of_whole,) = torch.autograd.grad((coefficients * whole).sum(), logits)
    torch.testing.assert_close(mean, whole, rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(gradient, of_whole, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("inplace", [False, True])
def test_lower_precision_and_gradients_in_place(dtype, inplace):
    hidden, weight, *_, coefficients = make()
    for kind, tail in CASES:
        rounded = (hidden @ weight.t())[..., :VOCABULARY].to(dtype)
        outcomes = []
        for logits in (rounded.clone(), rounded.double()):
            leaf = logits.requires_grad_()
            arguments = of_teacher(tail) | {"kind": kind, "beta": BETAS[kind]}
            values = top_k_divergence(leaf * 1, inplace_backward=inplace, **arguments)
            (coefficients * values).sum().backward()
            outcomes.append((values, leaf.grad))
        (values, gradient), (exact, exact_gradient) = outcomes
        assert values.dtype == torch.float32
        assert gradient.dtype == dtype
        torch.testing.assert_close(values.double(), exact, rtol=5e-6, atol=5e-6)
        relative = 2**-8 if dtype == torch.bfloat16 else 1e-5
        torch.testing.assert_close(gradient.double(), exact_gradient, rtol=relative, atol=1e-5)


def one_position(logits, ids, log_probs, tail, kind, **more):
    """(divergence, gradient) of one position."""
    leaf = torch.tensor([logits], requires_grad=True)
    values = top_k_divergence(
        leaf,
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor([0, len(ids)]),
        torch.tensor(log_probs, dtype=torch.float32),
        tail=tail,
        kind=kind,
        **more,
    )
    values.sum().backward()
    return values.item(), leaf.grad


def test_limits():
    nothing = -math.inf
    half = math.log(0.5)
    # The teacher gives 0 to a token that the student may say.
    value, gradient = one_position([0.0, 0.0, nothing], [0, 1], [0.0, nothing], "none", "reverse_kl")
    assert value == math.inf
    assert not gradient.any()
    # The student gives 0 to a token of the teacher: the gradient is p - q.
    value, gradient = one_position([0.0, nothing, nothing], [0, 1], [half, half], "rest", "forward_kl")
    assert value == math.inf
    torch.testing.assert_close(gradient, torch.tensor([[0.5, -0.5, 0.0]]))
    # The teacher's list has all of its mass: of the rest it knows only that it is little.
    value, gradient = one_position([0.0, 0.0, 0.0], [0], [0.0], "rest", "reverse_kl")
    assert value == pytest.approx(math.log(1 / 3) / 3 + (math.log(2 / 3) - math.log(1e-8)) * 2 / 3)
    assert gradient.isfinite().all()
    # The student is certain of a token in the list, to far below float32's digits.
    value, gradient = one_position([60.0, 0.0, 0.0], [0], [half], "rest", "forward_kl")
    assert value == pytest.approx(half + 0.5 * (60 - math.log(2)), rel=1e-6)
    assert gradient[0, 1].item() == pytest.approx(-0.25)
    for kind, tail in itertools.product(DIVERGENCES, ("rest", "none")):
        value, gradient = one_position([3e4, 0.0, nothing], [0, 2], [half, half], tail, kind)
        assert not math.isnan(value)
        assert gradient.isfinite().all()
    # A sampled token that the student gives 0 is no sample of the student.
    of_label = {"labels": torch.tensor([2]), "teacher_label_log_probs": torch.tensor([half])}
    value, gradient = one_position([0.0, 0.0, nothing], [0], [half], "sampled", "reverse_kl", **of_label)
    assert value == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize(
    ("ids", "log_probs", "more"),
    [
        ([1, 1], [-1.0, -1.0], {}),
        ([1, 3], [-1.0, -2.0], {}),
        ([-1, 2], [-1.0, -2.0], {}),
        ([0, 1], [-0.1, -0.1], {}),
        ([0, 1], [math.nan, -0.1], {}),
        ([0], [-1.0], {"tail": "sampled", "labels": 3}),
    ],
    ids=["twice", "above the vocabulary", "negative", "more than 1", "no number", "label"],
)
def test_bad_data_are_nan_and_spoil_no_other_position(ids, log_probs, more):
    logits = torch.randn(2, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    arguments = {"tail": "rest"} | more
    if "labels" in arguments:
        arguments["labels"] = torch.tensor([arguments["labels"], 1])
        arguments["teacher_label_log_probs"] = torch.tensor([-1.0, -1.0])
    values = top_k_divergence(
        logits,
        torch.tensor([*ids, 0]),
        torch.tensor([0, len(ids), len(ids) + 1]),
        torch.tensor([*log_probs, -1.0]),
        **arguments,
    )
    assert values[0].isnan()
    assert values[1].isfinite()
    values[1].backward()
    assert not logits.grad[0].any()
    assert logits.grad[1].isfinite().all()


RIGHT = {
    "logits": torch.zeros(2, 8),
    "teacher_ids": torch.zeros(2, dtype=torch.int64),
    "teacher_offsets": torch.tensor([0, 1, 2]),
    "teacher_log_probs": torch.zeros(2),
    "tail": "rest",
}
LABELS = {"labels": torch.zeros(2, dtype=torch.int64), "teacher_label_log_probs": torch.zeros(2)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tail": "others"}, r"tail='others' .*sampled"),
        ({"kind": "kl"}, "kind='kl'"),
        ({"tail": "sampled"}, r"tail='sampled' and labels.*pass them"),
        (LABELS, r"tail='rest' and labels.*drop them"),
        ({"tail": "sampled"} | LABELS | {"labels": torch.zeros(3, dtype=torch.int64)}, r"labels .*\(3,\)"),
        ({"teacher_log_probs": torch.zeros(3)}, r"teacher_log_probs .*\(3,\)"),
        ({"teacher_offsets": torch.tensor([0, 2])}, "teacher_offsets has 2 numbers: expected 3"),
        ({"teacher_ids": torch.zeros(2)}, "teacher_ids is torch.float32"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, "mask"),
        ({"logits": torch.zeros(2, 8, dtype=torch.int64)}, "logits are torch.int64"),
        ({"temperature": 0.0}, r"temperature=0\.0"),
    ],
)
def test_wrong_input_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        top_k_divergence(**RIGHT | change)


@pytest.mark.parametrize("tail", TAILS)
def test_only_the_gradient_is_as_large_as_the_logits(tail):
    tokens = 256
    width = 8192
    few = 20
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, width, generator=generator).requires_grad_()
    teacher = torch.randn(tokens, width, generator=generator).log_softmax(-1)
    known = teacher.topk(few)
    arguments = {
        "teacher_ids": known.indices.flatten(),
        "teacher_offsets": torch.arange(tokens + 1) * few,
        "teacher_log_probs": known.values.flatten(),
        "tail": tail,
    }
    if tail == "sampled":
        arguments["labels"] = logits.argmax(-1)
        arguments["teacher_label_log_probs"] = teacher.gather(1, logits.argmax(-1, True))[:, 0]
    del teacher

    def both():
        return torch.autograd.grad(top_k_divergence(logits, chunk_size=4, **arguments).sum(), logits)

    both()
    peak, _ = allocated(both)
    gradient = 4 * tokens * width
    # Some hundred bytes for each of the teacher's numbers.
    assert gradient <= peak <= gradient + 4 * 4 * width * 4 + 400 * tokens * (few + 1)


def test_without_any_id_the_sampled_token_stands_for_all():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, VOCABULARY, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (5,), generator=generator)
    of_teacher = -torch.rand(5, generator=generator, dtype=torch.float64)
    nothing = {
        "teacher_ids": torch.zeros(0, dtype=torch.int32),
        "teacher_offsets": torch.zeros(6, dtype=torch.int32),
        "teacher_log_probs": torch.zeros(0),
    }
    values = top_k_divergence(logits, tail="sampled", labels=labels, teacher_label_log_probs=of_teacher, **nothing)
    (gradient,) = torch.autograd.grad(values.sum(), logits)
    log_p = logits.log_softmax(1).gather(1, labels.unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(values, log_p - of_teacher)
    slope = (log_p - of_teacher + 1).detach()
    (expected,) = torch.autograd.grad((slope * log_p).sum(), logits)
    torch.testing.assert_close(gradient, expected)
    for tail in ("rest", "none"):
        assert not top_k_divergence(logits, tail=tail, **nothing).any()
    nothing["teacher_offsets"] = torch.zeros(1, dtype=torch.int64)
    for tail in ("rest", "none"):
        empty = torch.zeros(0, VOCABULARY, requires_grad=True)
        values = top_k_divergence(empty, tail=tail, **nothing)
        values.sum().backward()
        assert values.shape == (0,)
