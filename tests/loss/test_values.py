"""The loss of values, token by token: by hand, against loops, and what is refused."""

import pytest
import torch

from megatron_rc.loss.values import SUMS, derive_value_metrics, value_loss
from tests.support import critic_oracle

VALUES = torch.tensor([[0.0, 1.0, 0.4, 3.0]])
RETURNS = torch.tensor([[1.0, 1.0, 1.0, 0.0]])
OLD = torch.tensor([[0.5, 0.5, 0.5, 2.9]])
MASK = torch.tensor([[True, True, True, True]])


def metrics(objective):
    return derive_value_metrics(dict(zip(SUMS, objective.sums.tolist(), strict=True)))


def random_case(seed, shape=(5, 40)):
    generator = torch.Generator().manual_seed(seed)
    values, returns, old = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(shape, generator=generator) > 0.3
    return values, returns, values + 0.3 * old, mask, torch.rand(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize(("clip", "weighed"), [(None, False), (0.2, True)])
def test_loss_and_gradient_are_those_of_loops(clip, weighed):
    values, returns, old, mask, weights = random_case(1)
    values.requires_grad_()
    objective_of_values = value_loss(
        values, returns, mask, old_values=old, clip=clip, weights=weights if weighed else None
    )
    objective = critic_oracle.Objective(clip=clip)
    total = 0.0
    clipped = 0
    for row, t in mask.nonzero().tolist():
        loss, is_clipped = critic_oracle.token_loss(objective, values[row, t], old[row, t], returns[row, t])
        total = total + loss * (weights[row, t] if weighed else 1)
        clipped = clipped + is_clipped
    (want,) = torch.autograd.grad(total, values)
    (got,) = torch.autograd.grad(objective_of_values.per_token.sum(), values)
    torch.testing.assert_close(objective_of_values.per_token.sum(), total)
    torch.testing.assert_close(got, want)
    assert (clipped > 10) == (clip is not None)
    expected_metrics = {"clip_fraction": clipped / int(mask.sum()), "value_mean": values[mask].mean().item()}
    expected_metrics["return_mean"] = returns[mask].mean().item()
    assert {name: metrics(objective_of_values)[f"critic/{name}"] for name in expected_metrics} == pytest.approx(
        expected_metrics
    )


def test_what_stands_at_masked_positions_changes_no_bit():
    values, returns, old, mask, weights = random_case(2)
    spoilt = [torch.where(mask, one, torch.nan) for one in (values, returns, old, weights)]
    results = []
    for one in ((values, returns, old, weights), spoilt):
        leaf = one[0].clone().requires_grad_()
        objective = value_loss(leaf, one[1], mask, old_values=one[2], clip=0.2, weights=one[3])
        objective.per_token.sum().backward()
        results.append((objective.per_token.detach(), objective.sums, leaf.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_narrow_values_are_reckoned_with_in_float32():
    """Squares of 300 are no float16."""
    dtype = torch.float16
    narrow = [value.to(dtype) for value in (300 * VALUES, RETURNS, 300 * OLD)]
    losses = []
    gradients = []
    for values, returns, old in (narrow, [value.double() for value in narrow]):
        leaf = values.clone().requires_grad_()
        objective = value_loss(leaf, returns, MASK, old_values=old, clip=0.2)
        objective.per_token.sum().backward()
        losses.append(objective.per_token.detach())
        gradients.append(leaf.grad)
    assert losses[0].dtype == torch.float32
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradients[0], gradients[1].to(dtype))


def test_explained_variance():
    returns = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    assert metrics(value_loss(returns + 5, returns, MASK))["critic/explained_variance"] == pytest.approx(1)
    assert metrics(value_loss(torch.zeros(1, 4), returns, MASK))["critic/explained_variance"] == pytest.approx(0)
    assert metrics(value_loss(returns, torch.ones(1, 4), MASK))["critic/explained_variance"] == 0
    assert metrics(value_loss(returns, returns, ~MASK))["critic/explained_variance"] == 0


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"clip": 0.2}, r"clip=0\.2 .*old_values"),
        ({"clip": 0.0, "old_values": OLD}, r"clip=0\.0"),
        ({"weights": torch.ones(4)}, r"weights .*\(4,\)"),
        ({"returns": torch.ones(2, 4)}, r"returns .*\(2, 4\)"),
        ({"mask": torch.ones(1, 4)}, "mask"),
    ],
)
def test_what_cannot_be_is_refused(how, message):
    with pytest.raises(ValueError, match=message):
        value_loss(**({"values": VALUES, "returns": RETURNS, "mask": MASK} | how))
