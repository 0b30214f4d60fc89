"""Log-probs and entropy from vocabulary shards, forward and gradients, against plain softmax."""

import pytest
import torch
import torch.distributed as dist

from megatron_rc.parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from tests.ranks import Layout

VOCABULARY, PADDED, TEMPERATURE = 11, 16, 0.7


def make(dtype=torch.float64):
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(2, 5, PADDED, generator=generator, dtype=torch.float64)
    logits[0, 0] += 500  # would overflow without the maximum
    logits[..., VOCABULARY:] = 1e4  # padding must not be seen
    labels = torch.randint(0, VOCABULARY, (2, 5), generator=generator)
    labels[1, 3] = -100
    coefficients = torch.randn(2, 2, 5, generator=generator, dtype=torch.float64)
    return logits.to(dtype), labels, coefficients


def plain(dtype=torch.float64):
    """(log-probs, entropy, gradient at the logits) by autograd of the textbook formulas, in float64."""
    logits, labels, coefficients = make(dtype)
    logits = logits.double().requires_grad_()
    log_pi = torch.log_softmax(logits[..., :VOCABULARY] / TEMPERATURE, dim=-1)
    counted = labels != -100
    chosen = log_pi.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    log_probs, entropy = torch.where(counted, chosen, 0), torch.where(counted, -(log_pi.exp() * log_pi).sum(-1), 0)
    (coefficients[0] * log_probs + coefficients[1] * entropy).sum().backward()
    return log_probs.detach(), entropy.detach(), logits.grad


def local(dtype):
    """The same on one TP rank, from its rows of the vocabulary."""
    logits, labels, coefficients = make(dtype)
    width = PADDED // dist.get_world_size()
    start = dist.get_rank() * width
    shard = logits[..., start : start + width].clone().requires_grad_()
    group = dist.group.WORLD
    before = shard.detach().clone()
    log_probs, entropy = vocab_parallel_log_probs_and_entropy(
        shard, labels, group, vocab_size=VOCABULARY, temperature=TEMPERATURE
    )
    (coefficients[0] * log_probs + coefficients[1] * entropy).sum().backward()
    assert torch.equal(shard.detach(), before), "the caller's logits were written to"
    return log_probs.detach(), entropy.detach(), shard.grad


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-4), (torch.bfloat16, 2e-2)]
)
def test_shards_match_plain_softmax(ranks, tp, dtype, tolerance):
    # The reference sees the same rounded logits, so bfloat16 differs by the rounding of its gradient alone.
    log_probs, entropy, grad = plain(dtype)
    results = ranks.run(local, Layout(tp=tp), dtype)
    for got_log_probs, got_entropy, _ in results:
        assert got_log_probs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        torch.testing.assert_close(
            got_log_probs.double(), log_probs, rtol=min(tolerance, 3e-4), atol=3e-4 * (tolerance > 1e-9)
        )
        torch.testing.assert_close(
            got_entropy.double(), entropy, rtol=min(tolerance, 3e-4), atol=3e-4 * (tolerance > 1e-9)
        )
    whole = torch.cat([shard for _, _, shard in results], dim=-1)
    assert whole.dtype == dtype
    torch.testing.assert_close(whole.double(), grad, rtol=tolerance, atol=tolerance)
    assert torch.equal(whole[..., VOCABULARY:], torch.zeros_like(whole[..., VOCABULARY:]))


def test_gradients_pass_gradcheck():
    logits, labels, _ = make()
    small = (logits[..., :VOCABULARY] % 7).clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: vocab_parallel_log_probs_and_entropy(x, labels, temperature=TEMPERATURE), (small,)
    )


def test_masked_positions_are_zero_whatever_stands_there():
    logits, labels, _ = make()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, 1] = True
    logits[1] = torch.nan
    labels[1] = 10**6
    logits.requires_grad_()
    log_probs = vocab_parallel_log_probs(logits, labels, vocab_size=VOCABULARY, mask=mask)
    log_probs.sum().backward()
    assert (log_probs == 0).sum() == 9
    assert logits.grad[0].isfinite().all()
    assert torch.equal(logits.grad[1].nan_to_num(0), torch.zeros(5, PADDED, dtype=torch.float64))


@pytest.mark.parametrize("label", [VOCABULARY, PADDED, -1])
def test_a_label_out_of_range_is_nan(label):
    logits, labels, _ = make()
    labels[0, 2] = label
    log_probs = vocab_parallel_log_probs(logits, labels, vocab_size=VOCABULARY)
    assert log_probs[0, 2].isnan()
    assert log_probs.isnan().sum() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": torch.zeros(2, 5, 8, dtype=torch.int64)}, "expected a float dtype"),
        ({"logits": torch.zeros(2, 4, 16)}, "differ before the vocabulary"),
        ({"mask": torch.ones(2, 5)}, "expected bool"),
        ({"temperature": 0.0}, "must be positive"),
        ({"vocab_size": 17}, "no padding of vocab_size=17"),
        ({"logits": torch.zeros(2, 5, 1000), "vocab_size": 500}, "pass each rank its own shard"),
    ],
)
def test_wrong_input_is_named(change, message):
    arguments = {"logits": torch.zeros(2, 5, 16), "labels": torch.zeros(2, 5, dtype=torch.int64), "vocab_size": 11}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(**(arguments | change))
