"""Log-probs over the tokens that an engine kept: values, gradients, collectives, memory and bad data.

The reference is a softmax of dense logits in one process, in float64, with -inf for the tokens that were not kept.
"""

import contextlib
import math
import sys
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.parallel import (
    linear_log_probs_and_entropy,
    log_probs,
    softmax,
    support,
    vocab_parallel_log_probs,
    vocab_parallel_log_probs_and_entropy,
)
from tests.parallel.test_vocab import GRADIENT, RESULT, scalar, whole
from tests.parallel.test_vocab_memory import COPY, TOKENS, WIDTH, allocated
from tests.parallel.test_vocab_memory import make as make_large
from tests.support.far_device import GPU, far_device, is_there
from tests.support.on_rank import all_ranks, recorded, shard_of
from tests.support.operations import Operations
from tests.support.ranks import Layout
from tests.support.softmax_oracle import log_probs_entropy_squares

VOCABULARY = 11
PADDED = 16  # of four ranks, the last holds only padding
HIDDEN = 6
TEMPERATURE = 0.7
EVERY = list(range(VOCABULARY))
# Label and kept tokens of each position. Shards of four ranks have 4 columns.
POSITIONS = [
    (3, [1, 3, 4, 9]),
    (10, [10]),  # the label alone
    (5, []),  # the whole vocabulary
    (-100, [10**12, -7, 3, 3]),  # does not count
    (7, EVERY),
    (2, [0, 2, 3]),  # only the first shard has kept tokens
    (6, [9, 6, 0, 6, 9, 9, 5, 6]),  # in any order, and more than once
    (0, [10, 8, 0]),
    (9, [9, 8]),
    (4, []),
]
# A label that was not kept; an id that is out of range; the label of the last is not in the vocabulary.
WRONG = [(3, [1, 2]), (3, [0, 3, VOCABULARY]), (3, [-1, 3]), (3, [3, 10**12]), (VOCABULARY, [1, VOCABULARY])]


@dataclass(frozen=True)
class Batch:
    """Hidden states, whose product with a weight are the logits, and the positions."""

    hidden: torch.Tensor  # [2, positions / 2, HIDDEN]
    weight: torch.Tensor  # [PADDED, HIDDEN]
    labels: torch.Tensor
    kept: list[list[int]]
    coefficients: torch.Tensor  # [3, ...]: of log-probs, entropy and Σπ² in the loss

    @property
    def support(self):
        offsets = torch.tensor([0, *map(len, self.kept)]).cumsum(0)
        return {
            "support_ids": torch.tensor([token for ids in self.kept for token in ids], dtype=torch.int64),
            "support_offsets": offsets,
        }

    def logits(self, dtype):
        all_logits = self.hidden @ self.weight.t()
        all_logits[..., VOCABULARY:] = math.nan  # padding must not be seen
        return all_logits.to(dtype)


def make(positions=POSITIONS):
    generator = torch.Generator().manual_seed(7)
    labels, kept = zip(*positions, strict=True)
    shape = (2, len(positions) // 2)

    def normal(*size):
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    return Batch(
        normal(*shape, HIDDEN), normal(PADDED, HIDDEN), torch.tensor(labels).view(shape), list(kept), normal(3, *shape)
    )


def dense(batch, logits, over):
    """[log-probs, entropy, Σπ²] from dense logits in float64; ``over``: the entropy is over the kept tokens."""
    logits = logits[..., :VOCABULARY] / TEMPERATURE
    kept = torch.tensor([[not ids or token in ids for token in EVERY] for ids in batch.kept]).view(logits.shape)
    return log_probs_entropy_squares(logits, batch.labels, kept=kept, entropy_over_kept=over)


def expected(batch, dtype, over, used):
    """([results], gradient at the logits); ``used``: the results that the loss depends on."""
    logits = batch.logits(dtype).double().requires_grad_()
    results = dense(batch, logits, over)
    (grad,) = torch.autograd.grad(sum((batch.coefficients[i] * results[i]).sum() for i in used), logits)
    return results.detach(), torch.where((batch.labels != -100).unsqueeze(-1), grad, 0)


def call(batch, logits, over=False, alone=False, **options):
    options = {"vocab_size": VOCABULARY, "temperature": TEMPERATURE} | batch.support | options
    if alone:
        return (vocab_parallel_log_probs(logits, batch.labels, all_ranks(), **options),)
    options = {"sum_squares": True, "entropy_over_support": over} | options
    return vocab_parallel_log_probs_and_entropy(logits, batch.labels, all_ranks(), **options)


# (over the kept tokens, log-probs alone, results in the loss, view of transposed memory, other options)
CHOICES = [
    (False, False, (0, 1, 2), False, {}),
    (True, False, (0, 1, 2), False, {"chunk_size": 3, "inplace_backward": True}),
    (False, False, (0, 1, 2), True, {"chunk_size": 1, "inplace_backward": True}),
    (True, False, (1,), True, {}),
    (False, False, (0,), False, {}),
    (False, False, (2,), False, {"inplace_backward": True}),
    (False, True, (0,), False, {}),
    (False, True, (0,), True, {"chunk_size": 2, "inplace_backward": True}),
]
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def outcomes(batch, dtypes=DTYPES, far=False, entries=4):
    """(results, gradient) on this rank for each dtype and choice; a block of rows has about ``entries`` ids."""
    results = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(support, "BLOCK_ENTRIES", entries))
        if far:
            for module in (support, log_probs):
                stack.enter_context(mock.patch.object(module, "host_waits_for", return_value=True))
        for dtype in dtypes:
            results += [outcome(batch, dtype, *choice) for choice in CHOICES]
    return results


def outcome(batch, dtype, over, alone, used, transposed, options):
    shard = shard_of(batch.logits(dtype))
    if transposed:
        shard = shard.transpose(0, 1).contiguous().transpose(0, 1)
    logits = shard.requires_grad_()
    results = call(batch, logits, over, alone, **options)
    (grad,) = torch.autograd.grad(sum((batch.coefficients[i] * results[i]).sum() for i in used), logits)
    assert grad.dtype == dtype
    assert (grad.data_ptr() == logits.data_ptr()) == bool(options.get("inplace_backward"))
    return torch.stack(results).detach(), grad.clone()


def assert_dense(batch, outcomes_of_ranks, dtypes=DTYPES):
    """Assert that the ranks' outcomes are the reference's."""
    cases = [(dtype, *choice) for dtype in dtypes for choice in CHOICES]
    for (dtype, over, alone, used, *_), parts in zip(cases, zip(*outcomes_of_ranks, strict=True), strict=True):
        results, grad = whole(parts)
        want, want_grad = expected(batch, dtype, over, used)
        assert results.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        count = 1 if alone else 3
        torch.testing.assert_close(results.double(), want[:count], rtol=RESULT[dtype], atol=RESULT[dtype])
        atol = 1e-12 if dtype == torch.float64 else 5e-6
        torch.testing.assert_close(grad.double(), want_grad, rtol=GRADIENT[dtype], atol=atol)


@pytest.mark.parametrize("tp", [1, 4])
def test_shards_match_a_dense_masked_softmax(ranks, tp):
    batch = make()
    assert_dense(batch, ranks.run(outcomes, Layout(tp=tp), batch))


@pytest.mark.parametrize("tp", [2])
def test_it_is_the_same_without_a_value_on_the_host(ranks, tp):
    """A GPU sorts all ids, and copies a local column over those of other shards."""
    batch = make()
    assert_dense(batch, ranks.run(outcomes, Layout(tp=tp), batch, DTYPES, True))
    first_shard_alone = make([(0, [0, 1]), (1, [1])])
    assert_dense(first_shard_alone, ranks.run(outcomes, Layout(tp=tp), first_shard_alone, DTYPES, True))


def test_ids_that_are_sorted_are_not_sorted_again(ranks):
    positions = [(label, [] if label == -100 else sorted(set(ids))) for label, ids in POSITIONS]
    batch = make(positions)
    assert_dense(batch, ranks.run(outcomes_of_sorted_ids, Layout(tp=2), batch))


def outcomes_of_sorted_ids(batch):
    """What ``outcomes`` gives on a GPU, from ids that the caller calls sorted."""
    choices = [(*choice[:4], choice[4] | {"support_is_sorted": True}) for choice in CHOICES]
    with mock.patch.object(sys.modules[__name__], "CHOICES", choices), Operations() as operations:
        results = outcomes(batch, far=True)
    assert not any(name == "sort" for name in operations.by_name)
    return results


@pytest.mark.parametrize("ids", [[2, 1], [1, 1], [-1, 1], [1, VOCABULARY]])
def test_ids_that_are_wrongly_called_sorted_make_every_log_prob_nan_on_a_gpu(ids):
    batch = make([(1, ids), (3, [3, 4])])
    logits = batch.logits(torch.float32)
    with mock.patch.object(support, "host_waits_for", return_value=True):
        assert call(batch, logits, alone=True, support_is_sorted=True)[0].isnan().all()


def test_no_pass_waits_for_a_gpu():
    batch = make()
    with far_device() as device:
        logits = batch.logits(torch.float32).to(GPU).requires_grad_()
        support = {name: value.to(GPU) for name, value in batch.support.items()}
        labels = batch.labels.to(GPU)
        device.waits.clear()
        results = vocab_parallel_log_probs_and_entropy(logits, labels, vocab_size=VOCABULARY, **support)
        torch.autograd.backward(results, [torch.ones_like(result) for result in results])
        assert not device.waits
        assert is_there(logits.grad)


def test_logits_far_below_those_that_were_not_kept():
    """Sums relative to the row's maximum would be 0."""
    logits = torch.tensor([[1e4, -1.0, -2.0, 5.0]]).requires_grad_()
    kept_tokens = {"support_ids": torch.tensor([1, 2]), "support_offsets": torch.tensor([0, 2])}
    log_prob = vocab_parallel_log_probs(logits, torch.tensor([1]), **kept_tokens)
    log_prob.sum().backward()
    want = torch.tensor([1.0, 0.0]).log_softmax(0)
    torch.testing.assert_close(log_prob, want[:1])
    torch.testing.assert_close(logits.grad, torch.tensor([[0.0, 1 - want[0].exp(), -want[1].exp(), 0.0]]))


def test_wrong_data_give_nan_at_their_position_alone(ranks):
    expected_outcomes = ranks.run(outcomes, Layout(tp=2), make(POSITIONS), [torch.float64])[0]
    for position in WRONG:
        wrong = make([position, *POSITIONS[1:]])
        wrong_outcomes = ranks.run(outcomes, Layout(tp=2), wrong, [torch.float64])[0]
        for (results, grad), (want, want_grad) in zip(wrong_outcomes, expected_outcomes, strict=True):
            assert results[0, 0, 0].isnan()
            assert not results[1:].isnan().any()
            torch.testing.assert_close(results.flatten(1)[:, 1:], want.flatten(1)[:, 1:], rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(grad.flatten(0, 1)[1:], want_grad.flatten(0, 1)[1:], rtol=1e-12, atol=1e-12)
            assert grad.isfinite().all()


@pytest.mark.parametrize("offsets", [[0, 3, 2, 4], [1, 2, 3, 4], [0, 1, 2, 3], [-5, 10**9, 1, 4]])
def test_offsets_that_do_not_ascend_over_all_ids_make_every_log_prob_nan(offsets):
    logits = torch.randn(3, 5, requires_grad=True)
    kept_tokens = {"support_ids": torch.tensor([0, 1, 2, 3]), "support_offsets": torch.tensor(offsets)}
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(logits, torch.tensor([0, 1, 2]), **kept_tokens)
    assert log_probs.isnan().all()
    (log_probs.nan_to_num().sum() + entropy.sum()).backward()
    assert logits.grad.isfinite().all()


def test_check_reports_a_label_that_was_not_kept():
    kept_tokens = {"support_ids": torch.tensor([0, 1, 1, 2]), "support_offsets": torch.tensor([0, 2, 4])}
    log_probs = vocab_parallel_log_probs(torch.zeros(1, 2, 3), torch.tensor([[0, 0]]), **kept_tokens)
    mask = torch.ones(1, 2, dtype=torch.bool)
    result = correct_rollouts(log_probs, torch.full((1, 2), -1.0), mask, RolloutCorrectionConfig())
    with pytest.raises(ValueError, match=r"sample 0 .*position 1 is NaN"):
        result.check()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"support_ids": None}, "support_ids"),
        ({"support_ids": torch.zeros(2)}, r"support_ids .*float32"),
        ({"support_ids": torch.zeros(1, 2, dtype=torch.int64)}, r"support_ids .*\(1, 2\)"),
        ({"support_offsets": torch.zeros(6, dtype=torch.int64)}, r"support_offsets .*6 .*7"),
    ],
)
def test_wrong_input_is_named(change, message):
    labels = torch.zeros(2, 3, dtype=torch.int64)
    kept_tokens = {"support_ids": labels.new_zeros(2), "support_offsets": labels.new_zeros(7)} | change
    for function in (vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy):
        with pytest.raises(ValueError, match=message):
            function(torch.zeros(2, 3, 8), labels, **kept_tokens)
    with pytest.raises(ValueError, match=message):
        linear_log_probs_and_entropy(torch.zeros(2, 3, 4), torch.zeros(8, 4), labels, **kept_tokens)


def collectives(batch):
    """The collectives of the forward and the backward of log-probs alone, and with each entropy."""
    calls = []
    for over, alone, squares in (
        (False, True, False),
        (False, False, True),
        (False, False, False),
        (True, False, True),
    ):
        logits = shard_of(batch.logits(torch.float32)).requires_grad_()
        options = {} if alone else {"sum_squares": squares}
        with recorded() as seen:
            scalar(call(batch, logits, over, alone, **options), batch).backward()
        calls.append(seen)
    return calls


@pytest.mark.parametrize("tp", [1, 2])
def test_one_maximum_and_one_sum_are_all_the_collectives(ranks, tp):
    tokens = len(POSITIONS)
    sizes = [(1, 2), (2, 5), (2, 4), (1, 4)]
    want = [[("MAX", tp, a * tokens), ("SUM", tp, b * tokens)] if tp > 1 else [] for a, b in sizes]
    for kept in ([], [3], EVERY, [1, 1]):
        batch = make([(3, kept)] * tokens)
        assert ranks.run(collectives, Layout(tp=tp), batch) == [want] * tp


def test_compiled_chunks_do_the_same(monkeypatch):
    """The graphs for the compiler are run without a C++ compiler."""
    traced = mock.Mock(side_effect=lambda function: torch.compile(function, backend="aot_eager", dynamic=False))
    monkeypatch.setattr(softmax, "_compiled", traced)
    plain = make(), torch.float32, False, False, (0, 1, 2), False
    torch.testing.assert_close(outcome(*plain, {"chunk_size": 3, "compile": True}), outcome(*plain, {}))
    assert traced.call_count >= 2
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("number", "entries", "dtype", "over"),
    [
        (100, 400, torch.bfloat16, True),
        (2, support.BLOCK_ENTRIES, torch.bfloat16, False),
    ],
)
def test_beside_the_support_it_needs_a_few_numbers_for_each_id_of_a_block(dtype, over, number, entries):
    """Less than one percent of the logits, for many ids, and for few, whose block has all rows; the ids are given."""
    logits, labels, mask = make_large(dtype)
    ids = torch.rand(TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).topk(number).indices
    ids[:, 0] = labels
    support_of_rows = {"support_ids": ids.flatten(), "support_offsets": torch.arange(TOKENS + 1) * ids.shape[1]}

    def gradient(**more):
        results = vocab_parallel_log_probs_and_entropy(logits, labels, mask=mask, chunk_size=4, **more)
        return torch.autograd.grad(sum(result.sum() for result in results), logits)

    with mock.patch.object(support, "BLOCK_ENTRIES", entries):
        without, _ = allocated(gradient)
        peak, allocated_at_end = allocated(lambda: gradient(**support_of_rows, entropy_over_support=over))
    assert peak - without <= 0.01 * COPY
    assert allocated_at_end == logits.nbytes
