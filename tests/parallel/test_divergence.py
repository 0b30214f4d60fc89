"""Divergences from a teacher on vocabulary shards: values, gradients, limits, collectives, memory and errors.

The reference is :mod:`tests.support.divergence_oracle` with autograd, in float64, on the same rounded logits.
"""

import dataclasses
import itertools
import math

import pytest
import torch
import torch.distributed as dist

from megatron_rc.parallel import linear_divergence, vocab_parallel_divergence
from megatron_rc.parallel.divergence import DIVERGENCES
from tests.parallel.test_vocab_memory import allocated
from tests.support.divergence_oracle import divergence
from tests.support.far_device import GPU, far_device
from tests.support.on_rank import all_ranks, recorded, shard_of
from tests.support.ranks import Layout

PADDED = 16  # of four ranks, the last holds only padding
VOCABULARY = 11
SHAPE = (2, 5)
HIDDEN = 6
TEACHER_HIDDEN = 9
TEMPERATURE = 0.7
TEACHER_TEMPERATURE = 1.3
BETAS = {"reverse_kl": None, "forward_kl": None, "jsd": 0.3}
# Relative error of the divergence, and of the gradient, which is rounded to the logits' dtype.
RESULT = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 3e-6}
GRADIENT = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 2**-8}


@dataclasses.dataclass(frozen=True)
class Batch:
    """Logits of both policies over the whole padded vocabulary, and what a call takes beside them."""

    logits: torch.Tensor
    teacher: torch.Tensor
    mask: torch.Tensor
    coefficients: torch.Tensor  # of the divergences in the loss
    kept: torch.Tensor | None = None  # [..., VOCABULARY] bool

    def support(self):
        """The kept tokens as arguments: some in another order, some twice; a position with all has no ids."""
        if self.kept is None:
            return {}
        ids = []
        for index, row in enumerate(self.kept.flatten(0, -2)):
            of_row = row.nonzero().flatten()
            if row.all():
                of_row = of_row[:0]
            elif index % 3 == 0:
                of_row = torch.cat([of_row, of_row]).flip(0)
            ids.append(of_row)
        # What stands at a position that does not count is not read.
        masked = int((~self.mask).flatten().nonzero()[0])
        ids[masked] = torch.tensor([10**12, -7])
        return {"support_ids": torch.cat(ids), "support_offsets": torch.tensor([0, *map(len, ids)]).cumsum(0)}


def make(dtype=torch.float64, *, kept=False):
    generator = torch.Generator().manual_seed(3)
    logits, teacher = 3 * torch.randn(2, *SHAPE, PADDED, generator=generator, dtype=torch.float64)
    mask = torch.rand(SHAPE, generator=generator) < 0.8
    mask[0, 3] = False
    logits[~mask] = math.nan
    teacher[~mask] = math.inf
    logits[..., VOCABULARY:] = math.nan  # padding must not be seen
    teacher[..., VOCABULARY:] = math.nan
    coefficients = torch.randn(SHAPE, generator=generator, dtype=torch.float64)
    of_kept = None
    if kept:
        of_kept = torch.rand(*SHAPE, VOCABULARY, generator=generator) < 0.4
        of_kept[..., 2] = True
        of_kept[0, 0] = True
    return Batch(logits.to(dtype), teacher.to(dtype), mask, coefficients, of_kept)


def expected(batch, kind):
    """(divergence, gradient at the student's logits), in float64."""
    leaf = batch.logits.double().requires_grad_()
    counted = batch.mask.nonzero(as_tuple=True)
    student = leaf[counted][..., :VOCABULARY] / TEMPERATURE
    teacher = batch.teacher[counted].double()[..., :VOCABULARY] / TEACHER_TEMPERATURE
    kept = None if batch.kept is None else batch.kept[counted]
    values = divergence(kind, student, teacher, beta=BETAS[kind], kept=kept)
    (gradient,) = torch.autograd.grad((batch.coefficients[counted] * values).sum(), leaf)
    return torch.zeros(SHAPE, dtype=torch.float64).index_put_(counted, values.detach()), gradient


def call(logits, teacher, batch, kind, **options):
    arguments = {
        "kind": kind,
        "beta": BETAS[kind],
        "vocab_size": VOCABULARY,
        "mask": batch.mask,
        "temperature": TEMPERATURE,
        "teacher_temperature": TEACHER_TEMPERATURE,
    }
    return vocab_parallel_divergence(logits, teacher, all_ranks(), **arguments | batch.support() | options)


def contiguous(tensor):
    return tensor.clone()


def transposed(tensor):
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def outcome(batch, kind, options, view):
    """(divergence, gradient) on this rank, whose logits are views of other memory."""
    leaf = shard_of(batch.logits).requires_grad_()
    logits = view(leaf)
    teacher = view(shard_of(batch.teacher)).requires_grad_()
    before = logits.detach().clone()
    values = call(logits, teacher, batch, kind, **options)
    (gradient,) = torch.autograd.grad((batch.coefficients * values).sum(), logits)
    assert gradient.dtype == logits.dtype
    if options.get("inplace_backward"):
        assert (gradient.data_ptr(), gradient.stride()) == (logits.data_ptr(), logits.stride())
    else:
        assert torch.equal(before.nan_to_num(), logits.detach().nan_to_num()), "the caller's logits were written to"
    return values.detach(), gradient.clone()


OPTIONS = [({}, contiguous), ({"chunk_size": 3, "inplace_backward": True}, contiguous), ({}, transposed)]


def outcomes(batches):
    """The outcomes of every batch, kind and option on this rank."""
    return {
        (index, kind, number): outcome(batch, kind, options, view)
        for (index, batch), kind, (number, (options, view)) in itertools.product(
            enumerate(batches), DIVERGENCES, enumerate(OPTIONS)
        )
    }


def assert_expected(of_ranks, batch, kind):
    values, _ = of_ranks[0]
    assert all(torch.equal(other, values) for other, _ in of_ranks), "ranks differ"
    gradient = torch.cat([gradient for _, gradient in of_ranks], dim=-1)
    want, want_gradient = expected(batch, kind)
    dtype = batch.logits.dtype
    assert values.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(values.double(), want, rtol=RESULT[dtype], atol=RESULT[dtype])
    atol = 1e-12 if dtype == torch.float64 else 5e-6
    torch.testing.assert_close(gradient.double(), want_gradient, rtol=GRADIENT[dtype], atol=atol)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_shards_match_the_definitions(ranks, tp):
    batches = [make(), make(kept=True)]
    if tp < 4:
        batches += [make(torch.float32), make(torch.bfloat16, kept=True)]
    of_ranks = ranks.run(outcomes, Layout(tp=tp), batches)
    for index, kind, number in of_ranks[0]:
        assert_expected([of_rank[index, kind, number] for of_rank in of_ranks], batches[index], kind)


def limits():
    """(student's logits, teacher's, {kind: divergence}) of rows with logits of -inf and of extreme size."""
    log2 = math.log(2)
    nothing = -math.inf
    rows = [
        # Both give 0 to the same tokens.
        ([nothing, 0, 0, nothing], [nothing, 0, 0, nothing], {"reverse_kl": 0, "forward_kl": 0, "jsd": 0}),
        # The teacher gives 0 to half of the student's probability.
        ([0, 0, nothing, nothing], [0, nothing, nothing, nothing], {"reverse_kl": math.inf, "forward_kl": log2}),
        # The student gives 0 to half of the teacher's probability.
        ([0, nothing, nothing, nothing], [0, 0, nothing, nothing], {"reverse_kl": log2, "forward_kl": math.inf}),
        # No token in common.
        ([0, nothing, 0, nothing], [nothing, 0, nothing, 0], {"reverse_kl": math.inf, "jsd": log2}),
        # A student whose second token is rounded to the probability 0: its term's limit is 0.
        ([0, -1e4, nothing, nothing], [0, nothing, nothing, nothing], {"reverse_kl": 0, "forward_kl": 0, "jsd": 0}),
        # Both are certain, of different tokens.
        ([0, 3e4, 0, 0], [3e4, 0, 0, 0], {"reverse_kl": 3e4, "forward_kl": 3e4, "jsd": log2}),
        # The lowest number of float32.
        ([0, 0, -3e38, -3e38], [0, -3e38, 0, -3e38], {"jsd": log2 / 2}),
        # The student is certain of a token to which a broad teacher gives 0.
        ([3e4, *[0] * 15], [nothing, *[0] * 15], {"jsd": log2}),
    ]
    # Further columns are tokens of the probability 0 for both.
    width = max(len(logits) for logits, *_ in rows)
    rows = [
        ([*first, *[nothing] * (width - len(first))], [*second, *[nothing] * (width - len(second))], values)
        for first, second, values in rows
    ]
    student, teacher, values = zip(*rows, strict=True)
    return torch.tensor(student), torch.tensor(teacher), values


def limits_on_rank(kinds):
    student, teacher, _ = limits()
    results = {}
    for kind in kinds:
        leaf = shard_of(student).requires_grad_()
        values = vocab_parallel_divergence(leaf, shard_of(teacher), all_ranks(), kind=kind)
        values.sum().backward()
        results[kind] = values.detach(), leaf.grad
    return results


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_zero_probabilities_and_extreme_logits_give_the_limits(ranks, tp):
    student, teacher, expected = limits()
    of_ranks = ranks.run(limits_on_rank, Layout(tp=tp), DIVERGENCES)
    for kind in DIVERGENCES:
        values = of_ranks[0][kind][0]
        gradient = torch.cat([of_rank[kind][1] for of_rank in of_ranks], dim=-1)
        assert gradient.isfinite().all()
        for row, value in enumerate(values.tolist()):
            if kind in expected[row]:
                assert value == pytest.approx(expected[row][kind], rel=1e-6, abs=1e-6), (kind, row)
        if kind == "forward_kl":
            # p - q, also where the divergence is infinite.
            torch.testing.assert_close(gradient, student.softmax(-1) - teacher.softmax(-1))
        if kind == "reverse_kl":
            assert not gradient[values == math.inf].any()
        assert not values.isnan().any()


def test_a_model_is_at_no_distance_from_itself():
    generator = torch.Generator().manual_seed(6)
    logits = 5 * torch.randn(64, 4096, generator=generator)
    for kind in DIVERGENCES:
        leaf = logits.clone().requires_grad_()
        values = vocab_parallel_divergence(leaf, logits, kind=kind)
        values.sum().backward()
        assert values.abs().max() <= 1e-6
        assert leaf.grad.abs().max() <= 1e-7
        near = vocab_parallel_divergence(logits, logits + 1e-3 * torch.randn(64, 4096, generator=generator), kind=kind)
        assert (near > -1e-6).all()


@pytest.mark.parametrize(
    ("ids", "offsets"),
    [([1, VOCABULARY], [0, 2, 2]), ([-1, 1], [0, 2, 2]), ([1, 2], [0, 3, 2]), ([1, 2], [1, 2, 2])],
)
def test_wrong_kept_tokens_are_nan_without_a_gradient(ids, offsets):
    logits = torch.randn(2, VOCABULARY, requires_grad=True)
    values = vocab_parallel_divergence(
        logits,
        torch.randn(2, VOCABULARY),
        support_ids=torch.tensor(ids),
        support_offsets=torch.tensor(offsets),
    )
    assert values[0].isnan()
    values.nansum().backward()
    assert not logits.grad[0].any()


RIGHT = {"logits": torch.zeros(2, 5, 8), "teacher_logits": torch.zeros(2, 5, 8), "vocab_size": VOCABULARY}
WRONG = [
    ({"logits": torch.zeros(2, 5, 8, dtype=torch.int64)}, r"logits .*int64"),
    ({"teacher_logits": torch.zeros(2, 5, 16)}, r"teacher_logits \(2, 5, 16\) .*one vocabulary"),
    ({"mask": torch.ones(2, 4, dtype=torch.bool)}, r"mask .*\(2, 4\)"),
    ({"mask": torch.ones(2, 5)}, r"mask .*float32"),
    ({"kind": "kl"}, r"kind='kl' .*reverse_kl"),
    ({"beta": 0.5}, r"beta=0\.5 does nothing with kind='reverse_kl'"),
    ({"kind": "jsd", "beta": 1.0}, r"beta=1\.0"),
    ({"temperature": 0.0}, r"temperature=0\.0"),
    ({"teacher_temperature": -1.0}, r"teacher_temperature=-1\.0"),
    ({"vocab_size": 17}, r"vocab_size=17"),
    ({"support_ids": torch.zeros(1, dtype=torch.int64)}, r"support_offsets is None"),
    (
        {"support_ids": torch.zeros(1, dtype=torch.int64), "support_offsets": torch.zeros(3, dtype=torch.int64)},
        r"support_offsets has 3 .*11",
    ),
]


def raises():
    """The collectives on this rank before the errors."""
    with recorded() as seen:
        for change, message in WRONG:
            with pytest.raises(ValueError, match=message):
                vocab_parallel_divergence(tp_group=all_ranks(), **RIGHT | change)
    return seen


def collectives():
    """{kind: (collectives of the forward, of the backward)} on this rank."""
    batch = make(torch.float32)
    results = {}
    for kind in DIVERGENCES:
        leaf = shard_of(batch.logits).requires_grad_()
        with recorded() as forward:
            total = call(leaf, shard_of(batch.teacher), batch, kind).sum()
        with recorded() as backward:
            total.backward()
        results[kind] = forward, backward
    return results


def test_wrong_input_is_named_before_any_collective_and_right_input_makes_few(ranks):
    assert ranks.run(raises, Layout(tp=2)) == [[], []]
    tokens = math.prod(SHAPE)
    of_kl = [("MAX", 2, 2 * tokens), ("SUM", 2, 3 * tokens)]
    of_jsd = [("MAX", 2, 2 * tokens), ("SUM", 2, 2 * tokens), ("SUM", 2, 2 * tokens)]
    expected = {"reverse_kl": (of_kl, []), "forward_kl": (of_kl, []), "jsd": (of_jsd, [])}
    assert ranks.run(collectives, Layout(tp=2)) == [expected, expected]
    nothing = {kind: ([], []) for kind in DIVERGENCES}
    assert ranks.run(collectives, Layout()) == [nothing]


@pytest.mark.parametrize(
    ("kind", "dtype"), [("reverse_kl", torch.float32), ("forward_kl", torch.bfloat16), ("jsd", torch.float32)]
)
def test_only_the_gradient_is_as_large_as_the_logits(kind, dtype):
    tokens = 256
    width = 8192
    generator = torch.Generator().manual_seed(0)
    logits, teacher = torch.randn(2, tokens, width, generator=generator).to(dtype)
    logits.requires_grad_()

    def forward():
        return vocab_parallel_divergence(logits, teacher, kind=kind, chunk_size=2)

    def both():
        return torch.autograd.grad(forward().sum(), logits)

    both()
    chunks = 3 * 2 * width * 4  # bytes of three chunks of float32
    of_tokens = 200 * tokens
    peak, at_end = allocated(forward)
    assert peak <= chunks + of_tokens
    assert at_end <= 24 * tokens
    peak, _ = allocated(both)
    gradient = logits.element_size() * logits.numel()
    assert gradient <= peak <= gradient + chunks + of_tokens


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_on_a_gpu_the_host_does_not_wait(kind):
    batch = make(torch.float32)
    mask = batch.mask
    on_cpu = batch.logits.clone().requires_grad_()
    expected = call(on_cpu, batch.teacher, batch, kind)
    expected[mask].sum().backward()
    with far_device() as device:
        leaf = batch.logits.to(GPU).requires_grad_()
        far = dataclasses.replace(batch, mask=mask.to(GPU))
        teacher = batch.teacher.to(GPU)
        device.waits.clear()
        values = call(leaf, teacher, far, kind)
        values.sum().backward()
        assert not device.waits
        torch.testing.assert_close(values.cpu(), expected.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(leaf.grad.cpu(), on_cpu.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_no_tokens_are_fine(kind):
    logits = torch.zeros(0, 5, PADDED, requires_grad=True)
    values = vocab_parallel_divergence(logits, torch.zeros(0, 5, PADDED), kind=kind)
    values.sum().backward()
    assert values.shape == (0, 5)


# From hidden states


SEQUENCE = 8
SEQUENCES = 3


def layers():
    """(hidden, weight, bias, teacher's hidden, weight and bias, mask, coefficients)."""
    generator = torch.Generator().manual_seed(5)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    student = [normal(SEQUENCE, SEQUENCES, HIDDEN), normal(PADDED, HIDDEN), normal(PADDED)]
    teacher = [normal(SEQUENCE, SEQUENCES, TEACHER_HIDDEN), normal(PADDED, TEACHER_HIDDEN), normal(PADDED)]
    mask = torch.rand(SEQUENCE, SEQUENCES, generator=generator) < 0.8
    kept = torch.rand(SEQUENCE, SEQUENCES, VOCABULARY, generator=generator) < 0.5
    kept[..., 1] = True
    return student, teacher, mask, kept, normal(SEQUENCE, SEQUENCES)


def plain_layers(kind, with_kept):
    """(divergence, gradients of hidden, weight and bias) by autograd of the definitions."""
    student, teacher, mask, kept, coefficients = layers()
    leaves = [tensor.requires_grad_() for tensor in student]
    logits = (leaves[0] @ leaves[1].t() + leaves[2])[..., :VOCABULARY] / TEMPERATURE
    teacher_logits = (teacher[0] @ teacher[1].t() + teacher[2])[..., :VOCABULARY] / TEACHER_TEMPERATURE
    values = divergence(kind, logits, teacher_logits, beta=BETAS[kind], kept=kept if with_kept else None)
    values = torch.where(mask, values, 0)
    (coefficients * values).sum().backward()
    return values.detach(), [leaf.grad for leaf in leaves]


CALLS = [(kind, kept, size) for kind in DIVERGENCES for kept, size in ((False, 5), (True, 4), (False, None))]


def linear_outcomes(sequence_parallel):
    """{call: (divergence, gradients, kinds of collectives)} on this rank."""
    student, teacher, mask, kept, coefficients = layers()
    rank = dist.get_rank()
    size = dist.get_world_size()
    rows = slice(rank * PADDED // size, (rank + 1) * PADDED // size)
    part = slice(rank * SEQUENCE // size, (rank + 1) * SEQUENCE // size) if sequence_parallel else slice(None)
    results = {}
    for kind, with_kept, chunk_size in CALLS:
        leaves = [student[0][part], student[1][rows], student[2][rows]]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        ids = [row.nonzero().flatten() for row in kept.flatten(0, 1)]
        support = {"support_ids": torch.cat(ids), "support_offsets": torch.tensor([0, *map(len, ids)]).cumsum(0)}
        with recorded() as calls:
            values = linear_divergence(
                leaves[0],
                leaves[1],
                teacher[0][part],
                teacher[1][rows],
                dist.group.WORLD,
                bias=leaves[2],
                teacher_bias=teacher[2][rows],
                sequence_parallel=sequence_parallel,
                kind=kind,
                beta=BETAS[kind],
                vocab_size=VOCABULARY,
                mask=mask,
                temperature=TEMPERATURE,
                teacher_temperature=TEACHER_TEMPERATURE,
                chunk_size=chunk_size,
                **support if with_kept else {},
            )
            (coefficients * values).sum().backward()
        results[kind, with_kept, chunk_size] = values.detach(), [leaf.grad for leaf in leaves], [c[0] for c in calls]
    return results


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(1, False), (2, True), (4, False), (4, True)])
def test_hidden_states_match_plain_output_layers(ranks, tp, sequence_parallel):
    of_ranks = ranks.run(linear_outcomes, Layout(tp=tp), sequence_parallel)
    for kind, with_kept, chunk_size in CALLS:
        want, gradients = plain_layers(kind, with_kept)
        shards = [of_rank[kind, with_kept, chunk_size] for of_rank in of_ranks]
        for values, _, calls in shards:
            torch.testing.assert_close(values, want, rtol=1e-12, atol=1e-12)
            if tp == 1:
                assert not calls
            elif not sequence_parallel:
                assert calls == (["MAX", "SUM", "SUM", "SUM"] if kind == "jsd" else ["MAX", "SUM", "SUM"])
        of_hidden, of_weight, of_bias = zip(*(grads for _, grads, _ in shards), strict=True)
        whole = [torch.cat(of_hidden) if sequence_parallel else of_hidden[-1], torch.cat(of_weight), torch.cat(of_bias)]
        for got, gradient in zip(whole, gradients, strict=True):
            torch.testing.assert_close(got, gradient, rtol=1e-11, atol=1e-12)


def test_no_logits_are_held():
    """Beyond the gradients: at most 3.3 chunks of logits at any time, of both policies and the scratch of a part."""
    tokens = 512
    width = 16384
    chunk = 128
    hidden = torch.randn(tokens, 64, requires_grad=True)
    weight = torch.randn(width, 64, requires_grad=True)
    teacher_hidden = torch.randn(tokens, 32)
    teacher_weight = torch.randn(width, 32)

    def run():
        linear_divergence(hidden, weight, teacher_hidden, teacher_weight, chunk_size=chunk).sum().backward()

    run()
    hidden.grad = weight.grad = None
    largest, _ = allocated(run)
    gradients = 4 * (hidden.numel() + weight.numel())
    assert largest - gradients <= 3.3 * 4 * chunk * width


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(2, 4, dtype=torch.bfloat16)}, "hidden is torch.bfloat16"),
        ({"teacher_hidden": torch.zeros(2, 4)}, r"teacher_hidden \(2, 4\).*multiplied"),
        ({"teacher_hidden": torch.zeros(3, 5)}, r"teacher_hidden \(3, 5\).*same tokens"),
        ({"teacher_weight": torch.zeros(8, 5)}, r"teacher_weight has 8 rows"),
        ({"teacher_bias": torch.zeros(5)}, r"teacher_bias"),
        ({"mask": torch.ones(3, dtype=torch.bool)}, r"mask"),
        ({"gradient_accumulation": True}, r"main_grad"),
    ],
)
def test_wrong_layers_are_named(change, message):
    arguments = {
        "hidden": torch.zeros(2, 4),
        "weight": torch.zeros(PADDED, 4),
        "teacher_hidden": torch.zeros(2, 5),
        "teacher_weight": torch.zeros(PADDED, 5),
    }
    with pytest.raises(ValueError, match=message):
        linear_divergence(**arguments | change)
