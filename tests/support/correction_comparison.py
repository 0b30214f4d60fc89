"""The library on the cases of the correction oracle, and the comparison of both results."""

import dataclasses
import re

import pytest
import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.correction import tokens
from megatron_rc.parallel import SequenceLayout
from tests.support.correction_cases import CASES, sizes

SIGNS = {"positive": "reward_positive", "negative": "reward_negative", "zero": "reward_zero"}


def config_of(name):
    return RolloutCorrectionConfig.from_dict(CASES[name].fields, "megatron_rc")


def correct(name, batch, **more):
    return correct_rollouts(
        batch.train, batch.rollout, batch.mask, config_of(name), **batch.sides, **sizes(batch), **more
    )


def numbers(result):
    """All numbers of the whole batch that a caller sees, in one vector."""
    return torch.cat([result.denominators.flatten(), result.denominators.new_tensor([*result.metrics().values()])])


def use_blocks(monkeypatch, num_tokens):
    """Cut all shards into blocks of this size."""
    monkeypatch.setattr(tokens, "MIN_BLOCK", num_tokens)
    monkeypatch.setattr(tokens, "WHOLE", 0)


def moved(batch, device):
    """The batch on another device."""
    sides = {name: value.to(device) for name, value in batch.sides.items()}
    tensors = {name: getattr(batch, name).to(device) for name in ("train", "rollout", "mask")}
    return dataclasses.replace(batch, **tensors, sides=sides)


def pack(batch):
    """The rows cut at the ends of their responses and concatenated: (batch, layout, mask of what is kept)."""
    ends = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]

    def join(tensor):
        return torch.cat([row[:end] for row, end in zip(tensor, ends, strict=True)]) if tensor.dim() == 2 else tensor

    sides = {name: join(value) for name, value in batch.sides.items()}
    packed = dataclasses.replace(
        batch, train=join(batch.train), rollout=join(batch.rollout), mask=join(batch.mask), sides=sides
    )
    kept = torch.arange(batch.mask.shape[1]) < torch.tensor(ends).unsqueeze(1)
    return packed, SequenceLayout.packed([0, *torch.tensor(ends).cumsum(0).tolist()]), kept


def is_quantile(name):
    """Whether a metric comes from a histogram, which test_histogram compares to the accuracy of its bins."""
    return re.search(r"(log_ratio|rollout_is|rollout_is_seq)_p\d\d$", name) is not None


def expected_metrics(expected):
    """All metrics of the oracle, under the library's names."""
    metrics = dict(expected.metrics)
    for bucket, row in expected.breakdowns["length"].items():
        metrics[f"rollout_rs_masked_fraction_length_{2**bucket}_{2 ** (bucket + 1) - 1}"] = row["masked_fraction"]
    for sign, row in expected.breakdowns.get("reward", {}).items():
        metrics[f"rollout_rs_masked_fraction_{SIGNS[sign]}"] = row["masked_fraction"]
    for kind in ("staleness", "turn"):
        for bucket, row in expected.breakdowns.get(kind, {}).items():
            metrics[f"rollout_rs_masked_fraction_{kind}_{bucket}"] = row["masked_fraction"]
            metrics[f"{kind}_{bucket}_token_fraction"] = row["token_fraction"]
            metrics[f"{kind}_{bucket}_kl"] = row["kl"]
    return {f"rollout_corr/{name}": value for name, value in metrics.items()}


def assert_metrics(got, result, rel):
    expected = expected_metrics(result)
    wrong = {
        name: (got.get(name), value)
        for name, value in expected.items()
        if got.get(name) != pytest.approx(value, rel=rel, abs=rel)
    }
    assert not wrong
    extra = {name for name in got if name not in expected and not is_quantile(name) and "bad_log_probs" not in name}
    extra.discard("rollout_corr/rollout_is_batch_norm_skipped")
    assert not extra


def assert_same(result, expected, rows=slice(None), columns=slice(None), rel=1e-9):
    """Assert that the local part of a result is the oracle's."""
    if expected.weights is None:
        assert result.weights is None
    else:
        want = torch.tensor(expected.weights, dtype=torch.float64)[rows][:, columns]
        torch.testing.assert_close(result.weights.double(), want, rtol=rel, atol=1e-12)
    assert torch.equal(result.mask, torch.tensor(expected.mask)[rows][:, columns])
    assert result.denominators.tolist() == expected.denominators
    assert result.skip.tolist() == expected.skip
    assert result.sequence_lengths.tolist() == torch.tensor(expected.sequence_lengths)[rows].tolist()
    assert_metrics(result.metrics(), expected, rel)
