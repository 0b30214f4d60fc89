"""The divergence from a teacher in the loss: weights, coefficients, means over all responses of small policies, errors.

The policies of :mod:`tests.support.enumerated` are so small that a mean over their rows is an expectation.
"""

import math

import pytest
import torch

from megatron_rc import (
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    distillation_advantages,
    masked_loss,
    policy_loss,
)
from megatron_rc.numerics import UNTRUNCATED
from megatron_rc.parallel import ParallelGroups, top_k_divergence, vocab_parallel_divergence
from megatron_rc.parallel.divergence import DIVERGENCES
from megatron_rc.settings.levels import LEVELS
from tests.support import one_step
from tests.support.enumerated import enumerated, reached

LENGTH = 3
COEF = 0.4


def prefixes_of(tokens):
    """[n, T] the row of the logits from which each token was drawn."""
    columns = [torch.zeros(len(tokens), dtype=torch.int64)]
    for token in tokens.T[:-1]:
        columns.append(3 * columns[-1] + token + 1)
    return torch.stack(columns, dim=1)


def policies():
    """(the student and the engine, the teacher's logits after every prefix)."""
    toy = enumerated(LENGTH, distance=0.7)
    teacher = torch.randn(toy.logits.shape, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    return toy, teacher


def correction_of(mode, level, *, algorithm="distill", threshold=UNTRUNCATED, **loss):
    weights = {"rollout_is": level} | ({} if level is None else {"rollout_is_threshold": threshold})
    if mode == "bypass":
        weights |= {"bypass_mode": True, "loss_type": algorithm}
    loss = PolicyLossConfig(algorithm=algorithm, aggregation="seq-mean-token-sum", **loss)
    return RolloutCorrection(RolloutCorrectionConfig(**weights), ParallelGroups(), loss=loss)


def step(toy, correction, divergence, *, advantages=None, entropy=None, mask=None):
    """(gradient at the logits, metrics of the loss, weights) of a step over all responses."""
    mask = toy.mask if mask is None else mask
    train = None if correction.config.bypass_mode else toy.train.detach()
    advantages = torch.zeros_like(toy.rewards) if advantages is None else advantages
    inputs = PlanInputs(train, toy.rollout, mask, advantages=advantages)
    micro_batch, scale, end = one_step.planned(correction, inputs)
    loss, divisor, _ = masked_loss(correction, micro_batch, toy.train, entropy, scale, divergence=divergence)
    gradient = toy.gradient(loss / divisor)
    end([one_step.Chunk()])
    return gradient, correction.loss_metrics(), micro_batch.weights


def of_each_token(toy, teacher, kind):
    rows = prefixes_of(toy.tokens)
    return vocab_parallel_divergence(toy.logits[rows], teacher[rows], kind=kind)


def over_prefixes_of(policy, toy, teacher, kind):
    """The gradient of the divergence after each prefix, weighted by the policy's probability of reaching it."""
    after_prefixes = vocab_parallel_divergence(toy.logits, teacher, kind=kind)
    return toy.gradient((reached(policy.detach()) * after_prefixes).sum())


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
@pytest.mark.parametrize("kind", DIVERGENCES)
def test_weights_of_prefixes_and_sequences_move_the_mean_to_the_student(mode, kind):
    """With weights of tokens the tokens before are still the engine's: their mean given the prefix is 1."""
    toy, teacher = policies()
    divergence = of_each_token(toy, teacher, kind)
    of_student = over_prefixes_of(toy.logits.softmax(1), toy, teacher, kind)
    of_engine = over_prefixes_of(toy.engine, toy, teacher, kind)
    assert (of_student - of_engine).norm() > 1e-3
    expected = {None: of_engine, "token": of_engine, "prefix": of_student, "sequence": of_student}
    for level, gradient in expected.items():
        results, metrics, _ = step(toy, correction_of(mode, level), divergence)
        torch.testing.assert_close(results, gradient, rtol=1e-10, atol=1e-12)
        assert metrics["policy/divergence"] == pytest.approx(divergence.mean().item(), rel=1e-12)


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_the_sampled_token_stands_for_the_rest_if_weights_move_it_too(mode):
    toy, teacher = policies()
    rows = prefixes_of(toy.tokens)
    log_q = teacher.log_softmax(1)
    known = log_q.argmax(1, keepdim=True)
    of_tokens = top_k_divergence(
        toy.logits[rows],
        known[rows].flatten(),
        torch.arange(rows.numel() + 1),
        log_q.gather(1, known)[rows].flatten(),
        tail="sampled",
        labels=toy.tokens,
        teacher_label_log_probs=log_q[rows].gather(2, toy.tokens.unsqueeze(2)).squeeze(2),
    )
    expected = over_prefixes_of(toy.logits.softmax(1), toy, teacher, "reverse_kl")
    for level in ("prefix", "sequence"):
        results, _, _ = step(toy, correction_of(mode, level), of_tokens)
        torch.testing.assert_close(results, expected, rtol=1e-10, atol=1e-12)
    results, _, _ = step(toy, correction_of(mode, None), of_tokens)
    assert (results - expected).norm() > 1e-2
    # With weights of tokens it is the whole divergence, after prefixes of the engine.
    results, _, _ = step(toy, correction_of(mode, "token"), of_tokens)
    torch.testing.assert_close(
        results, over_prefixes_of(toy.engine, toy, teacher, "reverse_kl"), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
@pytest.mark.parametrize("level", LEVELS)
def test_bounded_weights_of_every_level_multiply_the_divergence(mode, level):
    toy, teacher = policies()
    divergence = of_each_token(toy, teacher, "reverse_kl")
    correction = correction_of(mode, level, threshold=1.2)
    results, _, weights = step(toy, correction, divergence)
    if mode == "bypass":
        # The loss finds them from the same log-probs as the plan of decoupled mode.
        _, _, weights = step(toy, correction_of("decoupled", level, threshold=1.2), divergence)
    assert weights.max() == pytest.approx(1.2)
    assert weights.std() > 0.05
    torch.testing.assert_close(
        results, toy.gradient((weights.double() * divergence).sum(1).mean()), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(("mode", "algorithm"), [("decoupled", "ppo_clip"), ("bypass", "reinforce")])
def test_a_coefficient_adds_the_weighted_divergence_to_an_objective(mode, algorithm):
    toy, teacher = policies()
    divergence = of_each_token(toy, teacher, "reverse_kl")
    advantages = toy.rewards
    both, metrics, _ = step(
        toy,
        correction_of(mode, "token", algorithm=algorithm, distillation_coef=COEF),
        divergence,
        advantages=advantages,
    )
    objective, alone, _ = step(toy, correction_of(mode, "token", algorithm=algorithm), None, advantages=advantages)
    distilled, _, _ = step(toy, correction_of(mode, "token"), divergence)
    torch.testing.assert_close(both, objective + COEF * distilled, rtol=1e-10, atol=1e-12)
    assert metrics["loss/total"] > alone["loss/total"]
    assert alone["policy/divergence"] == 0


def test_in_bypass_mode_an_objective_with_the_ratio_weighs_no_divergence():
    """PPO's ratio is the correction, and there are no weights."""
    toy, teacher = policies()
    divergence = of_each_token(toy, teacher, "reverse_kl")
    results, _, _ = step(toy, correction_of("bypass", None, algorithm="ppo_clip", distillation_coef=COEF), divergence)
    torch.testing.assert_close(
        results, COEF * over_prefixes_of(toy.engine, toy, teacher, "reverse_kl"), rtol=1e-10, atol=1e-12
    )


@pytest.mark.parametrize("filler", [math.nan, math.inf])
def test_what_stands_at_masked_positions_changes_no_bit(filler):
    toy, teacher = policies()
    mask = torch.rand(toy.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.7
    outcomes = []
    for value in (0.0, filler):
        divergence = torch.where(mask, of_each_token(toy, teacher, "reverse_kl"), value)
        for loss in ({}, {"algorithm": "reinforce", "distillation_coef": COEF}):
            correction = correction_of("decoupled", "token", **loss)
            gradient, metrics, _ = step(toy, correction, divergence, mask=mask)
            outcomes.append((gradient, metrics))
    for (gradient, metrics), (other, other_metrics) in zip(outcomes[:2], outcomes[2:], strict=True):
        assert torch.equal(gradient, other)
        assert metrics == other_metrics


def test_what_the_loss_needs_is_named():
    toy, teacher = policies()
    for loss, message in (
        ({}, r"algorithm='distill' needs the divergence"),
        ({"algorithm": "reinforce", "distillation_coef": COEF}, r"distillation_coef=0\.4 needs the divergence"),
    ):
        with pytest.raises(ValueError, match=message):
            step(toy, correction_of("decoupled", "token", **loss), None)
        with pytest.raises(ValueError, match=r"divergence has shape \(1, 3\)"):
            step(toy, correction_of("decoupled", "token", **loss), of_each_token(toy, teacher, "jsd")[:1])
    with pytest.raises(ValueError, match="divergence"):
        policy_loss(toy.train, toy.rollout, toy.rewards, toy.mask, algorithm="distill")


# Advantages of the sampled tokens


@pytest.mark.parametrize("mode", ["decoupled", "bypass"])
def test_reinforce_with_the_teachers_advantages_follows_the_reverse_kl(mode):
    """In the mean, and if the weights move tokens and prefixes to the student; without them it does not."""
    toy, teacher = policies()
    rows = prefixes_of(toy.tokens)
    of_teacher = teacher.log_softmax(1)[rows].gather(2, toy.tokens.unsqueeze(2)).squeeze(2)
    # π_old is π_θ before the step.
    advantages = distillation_advantages(of_teacher, toy.train.detach(), toy.mask)
    expected = over_prefixes_of(toy.logits.softmax(1), toy, teacher, "reverse_kl")
    for level, is_corrected in (("prefix", True), ("sequence", True), (None, False)):
        correction = correction_of(mode, level, algorithm="reinforce")
        results, _, _ = step(toy, correction, None, advantages=advantages)
        assert torch.allclose(results, expected, rtol=1e-10, atol=1e-12) == is_corrected


def test_teachers_are_averaged_by_their_weights():
    generator = torch.Generator().manual_seed(0)
    teachers = -torch.rand(3, 4, 5, generator=generator, dtype=torch.float64)
    old = -torch.rand(4, 5, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 5, generator=generator) < 0.8
    by_teacher = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    # One teacher for each response; the others have not scored it.
    domain = torch.tensor([0, 2, 2, 1])
    of_domain = (torch.arange(3).view(3, 1, 1) == domain.view(1, 4, 1)).expand(3, 4, 5).double()
    for weights, spoilt in ((None, None), (by_teacher, None), (of_domain, of_domain == 0)):
        scores = teachers if spoilt is None else teachers.masked_fill(spoilt, math.nan)
        results = distillation_advantages(
            torch.where(mask, scores, math.nan), torch.where(mask, old, math.inf), mask, teacher_weights=weights
        )
        for row in range(4):
            for column in range(5):
                total = 0.0
                for number in range(3):
                    weight = 1 / 3 if weights is None else weights[number]
                    weight = weight[row, column] if weights is of_domain else weight
                    total += float(weight) * float(teachers[number, row, column] - old[row, column])
                expected = total if mask[row, column] else 0
                assert float(results[row, column]) == pytest.approx(expected, rel=1e-12, abs=1e-15)
    alone = distillation_advantages(teachers[0].requires_grad_(), old, mask)
    assert not alone.requires_grad
    assert torch.equal(alone, torch.where(mask, teachers[0] - old, 0))
    assert distillation_advantages(teachers[0].bfloat16(), old.bfloat16(), mask).dtype == torch.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher_log_probs": torch.zeros(3, 4)}, r"teacher_log_probs .*\(3, 4\)"),
        ({"teacher_log_probs": torch.zeros(2, 3, 5), "teacher_weights": torch.ones(3)}, r"teacher_weights .*\(3,\)"),
        ({"teacher_weights": torch.ones(1)}, r"teacher_log_probs .*\(3, 5\)"),
        ({"response_mask": torch.ones(3, 5)}, "response_mask is torch.float32"),
        ({"response_mask": torch.ones(3, 4, dtype=torch.bool)}, "response_mask has shape"),
    ],
)
def test_advantages_that_cannot_be_are_refused(change, message):
    arguments = {
        "teacher_log_probs": torch.zeros(3, 5),
        "old_log_probs": torch.zeros(3, 5),
        "response_mask": torch.ones(3, 5, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=message):
        distillation_advantages(**arguments | change)
