"""The example's training loop gives the same numbers in every layout, and the formula's numbers."""

import ast
import sys

import pytest
import torch

from tests.support.paths import ROOT
from tests.support.ranks import Layout

EXAMPLES = ROOT / "examples"


def loop_of(layout):
    """The example on this rank of the pool, which has process groups already."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import next_digit
    import own_loop

    return own_loop, next_digit, own_loop.Loop(layout.tp, layout.pp, layout.cp)


def learn(layout, batches):
    """Metrics of each batch on this rank."""
    _, digits, loop = loop_of(layout)
    return [loop.learn(digits.sample(number)) for number in range(batches)]


def by_hand(layout):
    """(the example's metrics of one step on a whole batch, the same in float64 by the formula)."""
    example, digits, loop = loop_of(layout)
    example.STEPS, before = 1, example.STEPS
    batch = digits.sample(0)
    positions = torch.arange(digits.LENGTH)
    logits = loop.model(batch["tokens"], positions, None).double()
    new = logits.log_softmax(-1).gather(-1, batch["labels"].unsqueeze(-1)).squeeze(-1)
    mask = batch["response_mask"]
    log_ratio = new.detach() - batch["rollout_log_probs"].double()
    weights = log_ratio.exp().clamp(max=2)
    loss = -(weights * batch["advantages"] * new)[mask].sum() / mask.sum()
    gradients = torch.autograd.grad(loss, list(loop.model.parameters()))
    expected = {
        "loss/total": -float((weights * batch["advantages"])[mask].mean()),
        "grad_norm": float(torch.cat([gradient.flatten() for gradient in gradients]).norm()),
        "rollout_corr/kl": -float(log_ratio[mask].mean()),
        "rollout_corr/rollout_is_mean": float(weights[mask].mean()),
        "right": float(new.exp()[batch["right"]].mean()),
    }
    try:
        return loop.learn(batch), expected
    finally:
        example.STEPS = before


def test_one_step_is_that_of_the_formula(ranks):
    ((losses, expected),) = ranks.run(by_hand, Layout(), Layout())
    assert expected["rollout_corr/kl"] > 0.1
    assert expected["grad_norm"] > 0.1
    assert {name: losses[name] for name in expected} == pytest.approx(expected, rel=1e-5)


@pytest.fixture(scope="module")
def alone(ranks):
    return ranks.run(learn, Layout(), Layout(), 3)[0]


def test_the_policy_learns(alone):
    assert alone[-1]["right"] > 1.2 * alone[0]["right"]


@pytest.mark.parametrize("layout", [Layout(tp=2), Layout(pp=2), Layout(cp=2)], ids=str)
def test_every_layout_gives_the_same_numbers(ranks, alone, layout):
    everywhere = ranks.run(learn, layout, layout, 3)
    for rank, batches in enumerate(everywhere):
        knows_right = rank >= layout.world - layout.world // layout.pp
        for batch, expected in zip(batches, alone, strict=True):
            assert ("right" in batch) == knows_right
            assert batch == pytest.approx({name: expected[name] for name in batch}, rel=2e-4, abs=1e-6)
            assert len(batch) >= len(expected) - 1


def checked(*sizes):
    """The example's error for these numbers, or None."""
    _, digits, _ = loop_of(Layout())
    try:
        return digits.check(*sizes)
    except SystemExit as end:
        return end.code


def test_a_split_that_cannot_be_is_one_sentence(ranks):
    for sizes in ((8, 2, 2, 2), (4, 4, 1, 1), (4, 1, 1, 1)):
        assert ranks.run(checked, Layout(), *sizes) == [None]
    for sizes in ((4, 2, 2, 2), (3, 3, 1, 1), (4, 1, 4, 1), (3, 1, 1, 3), (8, 1, 1, 1), (0, 1, 1, 1), (1, 0, 1, 1)):
        (message,) = ranks.run(checked, Layout(), *sizes)
        assert message.startswith(
            f"--tp {sizes[1]} --pp {sizes[2]} --cp {sizes[3]} on {sizes[0]} processes of torchrun: tp"
        )


def test_the_loop_needs_nothing_of_the_launcher():
    text = (EXAMPLES / "own_loop.py").read_text(encoding="utf-8")
    imported = [node for node in ast.walk(ast.parse(text)) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {getattr(node, "module", None) or node.names[0].name for node in imported}
    assert {name for name in names if name.startswith("megatron_rc")} == {"megatron_rc", "megatron_rc.parallel"}
