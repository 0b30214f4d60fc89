"""The correction of sequences of any length, against the oracle: lists and nested tensors, one process and two."""

import dataclasses

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.adaptors.sequences import correct_sequences
from megatron_rc.parallel import ParallelGroups
from tests.adaptors.pages import documented
from tests.support.correction_cases import clear_batch, sizes
from tests.support.correction_comparison import config_of
from tests.support.ranks import Layout

CONFIG = RolloutCorrectionConfig(rollout_is="token")
# Versions and turns of tokens, advantages of sequences and tokens, prompts, and no weights.
NAMES = ["token by staleness", "turns by id", "sequence icepop", "token accepted scope", "groups", "maxima and veto"]
TWO = [torch.full((2,), -1.0), torch.full((3,), -2.0)]
MASKS = [torch.ones(2, dtype=torch.bool), torch.ones(3, dtype=torch.bool)]


def sequences(batch):
    """(positional arguments, side inputs) of a batch whose rows are cut at the ends of their responses."""
    ends = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]

    def cut(tensor):
        return [row[:end].clone() for row, end in zip(tensor, ends, strict=True)]

    sides = {name: cut(value) if value.dim() == 2 else value for name, value in batch.sides.items()}
    return [cut(batch.train), cut(batch.rollout), cut(batch.mask)], sides


def check(corrected, expected, rows=slice(None)):
    """Compare with the oracle's result, on the given rows of the batch."""
    expected_masks = expected.mask[rows]
    weights = expected.weights
    assert [mask.tolist() for mask in corrected.masks] == [
        row[: len(mask)] for row, mask in zip(expected_masks, corrected.masks, strict=True)
    ]
    assert (corrected.weights is None) == (weights is None)
    for weight, row in zip(corrected.weights or (), (weights or [])[rows], strict=True):
        torch.testing.assert_close(
            weight.double(), torch.tensor(row[: len(weight)], dtype=torch.float64), rtol=1e-9, atol=0
        )
    assert corrected.denominators.tolist() == expected.denominators
    metrics = corrected.result.metrics()
    assert metrics["rollout_corr/kl"] == pytest.approx(expected.metrics["kl"], rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_lists_and_nested_tensors(name):
    batch, expected = clear_batch(name)
    tensors, sides = sequences(batch)
    check(correct_sequences(*tensors, config_of(name), **sides, **sizes(batch)), expected)
    tensors = [torch.nested.nested_tensor(values, layout=torch.jagged) for values in tensors]
    corrected = correct_sequences(*tensors, config_of(name), **sides, **sizes(batch))
    assert corrected.masks.is_nested
    weights = None if corrected.weights is None else corrected.weights.unbind()
    check(dataclasses.replace(corrected, weights=weights, masks=corrected.masks.unbind()), expected)


def test_lengths_that_add_up_to_the_number_of_sequences():
    """Versions of tokens are not taken for versions of sequences."""
    log_probs = [torch.full((2,), -1.0), torch.zeros(0)], [torch.full((2,), -1.0), torch.zeros(0)]
    masks = [torch.ones(2, dtype=torch.bool), torch.zeros(0, dtype=torch.bool)]
    versions = [torch.tensor([5, 1]), torch.zeros(0, dtype=torch.int64)]
    versions_of_tokens = {"current_version": 5, "max_staleness": 4, "policy_versions": versions}
    metrics = correct_sequences(*log_probs, masks, CONFIG, **versions_of_tokens).result.metrics()
    shares = [metrics[f"rollout_corr/staleness_{age}_token_fraction"] for age in (0, 4)]
    assert shares == [0.5, 0.5]


def without_sequences_on_the_second_rank():
    """Denominators of a batch, all of which lies on the first rank; each token has a version and a turn."""
    groups = ParallelGroups.from_megatron()
    values, masks = (TWO, MASKS) if groups.dp.rank() == 0 else ([], [])
    ids = [torch.zeros(len(mask), dtype=torch.int64) for mask in masks]
    sides = {"current_version": 0, "policy_versions": ids, "turn_ids": ids}
    corrected = correct_sequences(values, values, masks, CONFIG, groups, **sides)
    return len(corrected.masks), corrected.denominators.tolist()


def test_a_rank_without_sequences(ranks):
    assert ranks.run(without_sequences_on_the_second_rank, Layout(dp=2)) == [(2, [[5, 2, 5, 2]]), (0, [[5, 2, 5, 2]])]


def on_a_rank(clear):
    groups = ParallelGroups.from_megatron()
    mine = slice(groups.dp.rank(), None, 2)
    for name, (batch, expected) in clear.items():
        tensors, sides = sequences(batch.rows(torch.arange(len(batch.mask))[mine]))
        check(correct_sequences(*tensors, config_of(name), groups, **sides, **sizes(batch)), expected, mine)


def test_ranks_with_other_sequences(ranks):
    ranks.run(on_a_rank, Layout(dp=2), {name: clear_batch(name) for name in NAMES})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"train_log_probs": torch.zeros(2, 3)}, "train_log_probs is a Tensor: pass a list"),
        ({"train_log_probs": TWO[:1]}, "train_log_probs has 1 sequences, response_masks 2"),
        ({"rollout_log_probs": TWO[::-1]}, r"rollout_log_probs\[0\] has 3 tokens, response_masks\[0\] 2"),
        ({"rollout_log_probs": [*TWO[:1], TWO[1].view(1, 3)]}, r"rollout_log_probs\[1\] is a tensor \[1, 3\]"),
        ({"advantages": [torch.ones(2)]}, "advantages has 1 sequences"),
        ({"rollout_log_probs": [TWO[0] * torch.nan, TWO[1]]}, "rollout log-prob of sample 0"),
    ],
)
def test_wrong_sequences(changed, message):
    arguments = {"train_log_probs": TWO, "rollout_log_probs": TWO, "response_masks": MASKS} | changed
    with pytest.raises(ValueError, match=message):
        correct_sequences(**arguments, config=CONFIG)


def test_the_page():
    """The losses of two micro-batches add up to the formula's, with its gradient, from logits of a whole layer."""
    torch.manual_seed(4)
    hidden = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    layer = torch.nn.Linear(3, 7, bias=False, dtype=torch.float64)
    labels = torch.randint(0, 7, (5,))
    advantages = torch.tensor([1.0, 1, -0.5, -0.5, -0.5], dtype=torch.float64)
    log_probs = torch.log_softmax(layer(hidden), -1).gather(1, labels.unsqueeze(1)).squeeze(1)
    old = log_probs.detach()
    lengths = [2, 3]
    rollout = old - torch.tensor([0.1, -0.3, 0.9, 0.0, -0.1])
    mask = torch.tensor([True, False, True, True, True])
    weights = (old - rollout).exp().clamp(max=2)
    expected = -(log_probs * weights * advantages * mask).sum() / 4
    tensors = [list(values.split(lengths)) for values in (old, rollout, mask)]
    page = documented("A trainer with its own layout and loss")
    corrected, accepted = page["corrected_weights"](*tensors, CONFIG, ParallelGroups())
    parts = zip(*(values.split(lengths) for values in (hidden, labels, advantages)), corrected, strict=True)
    loss = sum(page["loss_of"](part, layer, label, weight, worth, accepted) for part, label, worth, weight in parts)
    torch.testing.assert_close(loss, expected)
    (gradient,), (expected_gradient,) = (
        torch.autograd.grad(loss, hidden, retain_graph=True) for loss in (loss, expected)
    )
    torch.testing.assert_close(gradient, expected_gradient)
