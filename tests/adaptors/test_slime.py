"""slime's call by its shapes (commit 624b824): the oracle's numbers over CP ranks, and errors with its names."""

from types import SimpleNamespace

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig
from megatron_rc.adaptors import slime
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from tests.adaptors.pages import IN_A_MICRO_BATCH, documented
from tests.support.correction_cases import CASES, clear_batch
from tests.support.ranks import Layout

PROMPTS = (3, 1, 5, 2, 8, 1, 1, 4, 6, 3, 2, 7)
DTYPES = (torch.bool, torch.int32, torch.int64, torch.float32, torch.bfloat16)
ARGS = SimpleNamespace(use_tis=True)


def responses(name):
    """The rows of a batch as ragged responses, with masks of several dtypes."""
    batch, expected = clear_batch(name)
    lengths = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]
    rows = range(len(lengths))
    torch.manual_seed(0)
    return {
        "lengths": lengths,
        "totals": [length + prompt for length, prompt in zip(lengths, PROMPTS, strict=True)],
        "old": [batch.train[row, : lengths[row]] for row in rows],
        "rollout": [batch.rollout[row, : lengths[row]] for row in rows],
        "masks": [batch.mask[row, : lengths[row]].to(DTYPES[row % len(DTYPES)]) for row in rows],
        "advantages": torch.randn(len(lengths), dtype=torch.float64),
        "steps": [0.3 * torch.randn(length, dtype=torch.float64) for length in lengths],
    }, expected


def local_tokens(total, response, rank, size):
    """The local tokens of a response on a rank: those that its two chunks of the padded sequence predict."""
    chunk = -(-total // (2 * size))
    chunks = [range(rank * chunk, (rank + 1) * chunk), range((2 * size - rank - 1) * chunk, (2 * size - rank) * chunk)]
    first = total - response - 1
    everywhere = [range(total)] if size == 1 else chunks
    return [position - first for some in everywhere for position in some if 0 <= position - first < response]


def run_all(inputs, fields):
    return {name: call(inputs[name], fields[name]) for name in inputs}


def call(inputs, fields):
    """One micro-batch on this rank as in slime: (local loss, gradients and tokens of each response, results)."""
    cp = ParallelGroups.from_megatron().cp
    lengths = inputs["lengths"]
    totals = inputs["totals"]
    tokens = [local_tokens(*pair, group_rank(cp), group_size(cp)) for pair in zip(totals, lengths, strict=True)]

    def cut(rows):
        return [row[mine] for row, mine in zip(rows, tokens, strict=True)]

    old = cut(inputs["old"])
    moved = cut(inputs["steps"])
    # slime's own ratio is finite, even if the correction's log-probs are not.
    theta = [step.clone().requires_grad_() for step in moved]
    ratio = torch.cat(theta).exp()
    advantages = torch.cat([value.expand(len(mine)) for value, mine in zip(inputs["advantages"], tokens, strict=True)])
    correct = slime.SlimeCorrection(RolloutCorrectionConfig(**fields))
    loss, masks, metrics = correct(
        ARGS,
        pg_loss=-advantages * ratio,
        train_log_probs=old,
        rollout_log_probs=cut(inputs["rollout"]),
        loss_masks=inputs["masks"],
        total_lengths=totals,
        response_lengths=lengths,
    )
    # Each response's sum over its trained tokens before rejection, as in slime's reducer.
    sizes = [len(mine) for mine in tokens]
    counts = [mask.sum().clamp(min=1) for mask in inputs["masks"]]
    parts = zip(loss.split(sizes), cut(masks), counts, strict=True)
    total = sum((part * mask).sum() / count for part, mask, count in parts)
    total.backward()
    trained = torch.cat(cut([mask.bool() for mask in inputs["masks"]]))
    sums = {key: float((value.double() * trained).sum()) for key, value in metrics.items()}
    return float(total.detach()), [row.grad for row in theta], tokens, masks, sums


def expected_of(inputs, expected):
    """(loss, gradients of whole responses, masks) by the formula, from the oracle's weights and mask."""
    total = 0.0
    gradients = []
    masks = []
    for row, length in enumerate(inputs["lengths"]):
        count = max(float(inputs["masks"][row].float().sum()), 1)
        accepted = torch.tensor(expected.mask[row][:length], dtype=torch.bool)
        weights = torch.ones(length, dtype=torch.float64)
        if expected.weights is not None:
            weights = torch.tensor(expected.weights[row][:length], dtype=torch.float64)
        terms = -inputs["advantages"][row] * inputs["steps"][row].exp() * weights / count
        gradients.append(torch.where(accepted, terms, 0.0))
        total += float(gradients[-1].sum())
        masks.append(accepted)
    return total, gradients, masks


@pytest.mark.parametrize("cp", [1, 4])
def test_slime_gets_the_oracles_loss_gradients_and_masks(ranks, cp):
    made = {name: responses(name) for name in IN_A_MICRO_BATCH}
    fields = {name: {**CASES[name].fields, "rejection_denominator": "original"} for name in IN_A_MICRO_BATCH}
    of_ranks = ranks.run(run_all, Layout(cp=cp), {name: inputs for name, (inputs, _) in made.items()}, fields)
    assert len(IN_A_MICRO_BATCH) >= 7
    for name, (inputs, expected) in made.items():
        loss, gradients, masks = expected_of(inputs, expected)
        parts = [rank[name] for rank in of_ranks]
        assert sum(part[0] for part in parts) == pytest.approx(loss, rel=1e-9)
        for row, gradient in enumerate(gradients):
            got = torch.zeros_like(gradient)
            for _, local, tokens, _, _ in parts:
                got[tokens[row]] = local[row]
            torch.testing.assert_close(got, gradient, rtol=1e-9, atol=1e-12)
        for part in parts:
            for mask, accepted, mask_before in zip(part[3], masks, inputs["masks"], strict=True):
                assert mask.dtype == mask_before.dtype
                assert torch.equal(mask.bool(), accepted)
        if CASES[name].bad:  # slime's denominators count bad tokens
            continue
        tokens = sum(int(mask.sum()) for mask in inputs["masks"])
        for key in parts[0][4]:
            mean = sum(part[4][key] for part in parts) / tokens
            assert mean == pytest.approx(expected.metrics[key.removeprefix("rollout_corr/")], rel=1e-6, abs=1e-9)


def arguments(**changes):
    """Arguments of three responses of 2, 0 and 3 tokens on one rank."""
    defaults = {
        "pg_loss": torch.ones(5),
        "train_log_probs": [torch.tensor([-1.0, -0.5]), torch.empty(0), torch.tensor([-2.0, -0.1, -0.4])],
        "rollout_log_probs": [torch.tensor([-1.1, -0.9]), torch.empty(0), torch.tensor([-2.0, -3.1, -0.4])],
        "loss_masks": [torch.ones(2), torch.empty(0), torch.tensor([1, 1, 0])],
        "total_lengths": [4, 3, 5],
        "response_lengths": [2, 0, 3],
    }
    return defaults | changes


def correct(config=None, args=ARGS, **changes):
    return slime.SlimeCorrection(config, ParallelGroups())(args, **arguments(**changes))


TOKEN = RolloutCorrectionConfig.decoupled_token_is(threshold=1.25)


def test_metrics_alone_change_nothing():
    loss, masks, metrics = correct(TOKEN, SimpleNamespace(use_tis=False))
    assert torch.equal(loss, torch.ones(5))
    assert [mask.tolist() for mask in masks] == [[1, 1], [], [1, 1, 0]]
    assert {name: tuple(value.shape) for name, value in metrics.items()} == {
        f"rollout_corr/{name}": (5,) for name in ("kl", "k3_kl", "rollout_rs_masked_fraction", "rollout_is_mean")
    }


@pytest.mark.parametrize(
    ("settings", "weights"),
    [
        ({"tis_clip": 1.25, "tis_clip_low": 0.0}, [1.105171, 1.25, 1, 1.25, 0]),
        (
            {"tis_clip": 2.0, "tis_level": "token", "tis_mode": "truncate", "tis_upper_bound": 1.25},
            [1.105171, 1.25, 1, 1.25, 0],
        ),
        ({"mis_level": "sequence", "mis_upper_bound": 1.25, "mis_lower_bound": 0.8}, [1.25, 1.25, 1.25, 1.25, 0]),
    ],
    ids=["built in", "example", "its names of 2025"],
)
def test_settings_are_slimes_own(settings, weights):
    loss, *_ = correct(None, SimpleNamespace(use_tis=True, use_opsm=True, opsm_delta=0.1, **settings))
    torch.testing.assert_close(loss, torch.tensor(weights), rtol=1e-5, atol=0)


GEOMETRIC = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.9_1.1"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bypass_mode": True}, "bypass_mode=True: slime .*--use-rollout-logprobs"),
        ({"rollout_is": "token", "rollout_is_batch_normalize": True}, "rollout_is_batch_normalize=True: slime"),
        ({"rollout_rs": "opsm", "rollout_rs_threshold": 0.1}, "rollout_rs='opsm' .* --use-opsm"),
        ({"rollout_rs": "group_mean_k1", "rollout_rs_threshold": "0.9_1.1"}, "rollout_rs='group_mean_k1' needs"),
        (GEOMETRIC, "set rejection_denominator='original'"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:22],
)
def test_settings_that_a_micro_batch_cannot_have(fields, message):
    with pytest.raises(ValueError, match=message):
        slime.SlimeCorrection(RolloutCorrectionConfig(**fields))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tis_level": "token", "tis_batch_normalize": True}, "^tis_batch_normalize=True: slime .* set"),
        ({"mis_level": "token", "mis_batch_normalize": True}, "unknown setting 'mis_batch_normalize'"),
    ],
    ids=["normalisation", "of no version"],
)
def test_settings_of_slime_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        correct(None, SimpleNamespace(use_tis=True, **settings))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rollout_log_probs": None}, "rollout_log_probs is None"),
        ({"train_log_probs": [torch.zeros(2)]}, "train_log_probs has 1 entries: expected 3"),
        ({"response_lengths": [2, 0, 5]}, r"response_lengths\[2\]=5: expected 0 or more, below total_lengths 5"),
        ({"pg_loss": torch.ones(4)}, r"pg_loss has shape \(4,\): expected \(5,\)"),
        ({"config": "decoupled_token_is"}, r"pass the preset as RolloutCorrectionConfig.decoupled_token_is\(\)"),
        ({"max_seq_lens": [8, 8, 8]}, "max_seq_lens is no argument of slime's"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else value[:22],
)
def test_arguments_that_cannot_be(changes, message):
    with pytest.raises(ValueError, match=message):
        correct(**{"config": TOKEN} | changes)


def test_the_page_makes_the_object():
    """slime imports a module by name, and takes the attribute; the library has one without a configuration."""
    assert isinstance(slime.correct, slime.SlimeCorrection)
    assert slime.correct.config is None
    correction = documented("slime")["correct"]
    correction.groups = ParallelGroups()
    loss, masks, _ = correction(ARGS, **arguments())
    # The third response's mean of log ρ is 1.5; the first one's is 0.25.
    assert [mask.tolist() for mask in masks] == [[0, 0], [], [0, 0, 0]]
    assert not loss.any()
