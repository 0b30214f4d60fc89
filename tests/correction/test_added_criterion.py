"""A criterion that is added as CONTRIBUTING says: one object. Everything else follows, on every layout."""

import argparse
import dataclasses
import math

import pytest
import torch

from examples.custom_criterion import SEQ_MIN
from megatron_rc import (
    RolloutCorrectionConfig,
    add_rollout_correction_args,
    correct_rollouts,
    rollout_correction_config_from_args,
)
from megatron_rc.settings.bounds import RATIO, UPPER
from megatron_rc.settings.criteria import CRITERIA, K1, K3, define
from megatron_rc.settings.criterion import Criterion, Divergence, Need
from megatron_rc.settings.definition import check_criterion
from tests.correction.test_properties import correct_split
from tests.support import user_objects

LOWER = 0.5
HIGHER = 1.0
DISTANCE = Divergence("distance", "|log ρ|", of=torch.abs, least=0.0)
MEAN = {"needs": (Need("sum", DISTANCE),), "statistic": lambda values: values.sum(DISTANCE) / values.num_tokens}
# With a divergence of its own, on tokens, sequences and prompts.
TOKEN_DISTANCE = Criterion("token_distance", "token", "tokens whose |log ρ|", UPPER, **MEAN, tested=DISTANCE)
SEQ_SPREAD = Criterion(
    "seq_spread",
    "sequence",
    "sequences whose log ρ differ by what",
    UPPER,
    needs=(Need("max", K1), Need("min", K1)),
    statistic=lambda values: values.max(K1) - values.min(K1),
)
GROUP_DISTANCE = Criterion("group_distance", "prompt", "responses of a prompt whose mean |log ρ|", UPPER, **MEAN)
FIELDS = {"rollout_is": "token", "rollout_rs": "seq_min_k1", "rollout_rs_threshold": f"{LOWER}_{HIGHER}"}


@pytest.fixture(autouse=True)
def added():
    """What one line each at the end of ``settings/criteria.py`` would do."""
    define(SEQ_MIN, TOKEN_DISTANCE, SEQ_SPREAD, GROUP_DISTANCE)
    yield
    for criterion in (SEQ_MIN, TOKEN_DISTANCE, SEQ_SPREAD, GROUP_DISTANCE):
        del CRITERIA[criterion.name]


def draw():
    """(train, rollout, mask) [6, 12], with an empty sequence."""
    generator = torch.Generator().manual_seed(0)
    rollout = -3 * torch.rand(6, 12, generator=generator, dtype=torch.float64) - 1
    # The further apart, the later the sequence.
    distance = torch.tensor([0.05, 0.1, 0.4, 0.5, 0.9, 0.2], dtype=torch.float64).unsqueeze(1)
    train = rollout + distance * torch.randn(6, 12, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 12, generator=generator) < 0.8
    mask[5] = False
    return train, rollout, mask


def smallest_ratios(train, rollout, mask):
    return [
        min(math.exp(float(x)) for x in row[valid]) if valid.any() else None
        for row, valid in zip(train - rollout, mask, strict=True)
    ]


def test_it_rejects_what_its_words_say():
    train, rollout, mask = draw()
    smallest = smallest_ratios(train, rollout, mask)
    inside = [ratio is not None and LOWER <= ratio <= HIGHER for ratio in smallest]
    assert 0 < sum(inside) < 5
    assert min(abs(math.log(ratio / bound)) for ratio in smallest[:5] for bound in (LOWER, HIGHER)) > 1e-3
    result = correct_rollouts(train, rollout, mask, RolloutCorrectionConfig(**FIELDS))
    assert torch.equal(result.mask, mask & torch.tensor(inside).unsqueeze(1))
    metrics = result.metrics()
    logs = [-math.log(ratio) for ratio in smallest[:5]]  # as of every criterion with bounds on ρ
    name = "rollout_corr/rollout_rs_seq_min_k1_"
    assert metrics[f"{name}seq_masked_fraction"] == pytest.approx(1 - sum(inside) / 5)
    assert metrics[f"{name}rho_fraction_below"] == pytest.approx(sum(ratio < LOWER for ratio in smallest[:5]) / 5)
    assert metrics[f"{name}seq_mean"] == pytest.approx(sum(logs) / 5, rel=1e-12)
    assert (metrics[f"{name}max"], metrics[f"{name}min"]) == pytest.approx((max(logs), min(logs)), rel=1e-12)


def test_flags_words_and_presets_know_it(tmp_path):
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_rollout_correction_args(parser)
    assert "seq_min_k1" in " ".join(parser.format_help().split())
    arguments = [
        "--rollout-correction-preset=decoupled_token_is",
        "--rollout-rs=seq_min_k1",
        "--rollout-rs-threshold=0.5_1.0",
    ]
    config = rollout_correction_config_from_args(parser.parse_args(arguments))
    assert config == RolloutCorrectionConfig(**FIELDS, rollout_is_threshold=2.0)
    assert "rejects sequences whose smallest ρ_t is outside [0.5, 1] (seq_min_k1)" in config.describe().splitlines()
    path = tmp_path / "min.yaml"
    path.write_text("rollout_is: token\nrollout_rs: seq_min_k1\nrollout_rs_threshold: 0.5_1.0\n")
    assert RolloutCorrectionConfig.from_yaml(path) == RolloutCorrectionConfig(**FIELDS)
    arguments[-1] = "--rollout-rs-threshold=2_1"
    with pytest.raises(ValueError, match="must not lie above the upper one"):
        rollout_correction_config_from_args(parser.parse_args(arguments))
    with pytest.raises(ValueError, match=r"use .*seq_min_k1"):
        RolloutCorrectionConfig(rollout_rs="seq_minimum", rollout_rs_threshold=1)


CASES = {
    "smallest": FIELDS,
    "several": {
        "rollout_rs": "token_distance,seq_spread,seq_min_k1,token_k2",
        "rollout_rs_threshold": "0.6,2.2,0.3_1.0,0.5",
        "rollout_is": None,
    },
    "prompts": {"rollout_rs": "group_distance,group_any,token_distance", "rollout_rs_threshold": "0.35,0.8"},
    "by staleness": {**FIELDS, "rollout_staleness_scale": "1:0.5"},
}


def whole(name):
    """(result, its inputs)."""
    train, rollout, mask = draw()
    sides = {}
    if name == "prompts":
        sides = {"group_ids": torch.tensor([0, 1, 0, 1, 0, 1]), "num_groups": 2}
    if name == "by staleness":
        sides = {"policy_versions": torch.tensor([4, 3, 4, 3, 4, 3]), "current_version": 4, "max_staleness": 2}
    config = RolloutCorrectionConfig(**CASES[name])
    result = correct_rollouts(train, rollout, mask, config, **sides)
    assert 0 < int(result.mask.sum()) < int(mask.sum())
    return result, config, (train, rollout, mask), sides


@pytest.mark.parametrize(("name", "split"), list(zip(CASES, ["zigzag", "contiguous"] * 2, strict=True)))
def test_shards_give_the_same(name, split):
    """Two replicas of two or three context-parallel ranks, whose pairs are added by hand."""
    _, config, tensors, sides = whole(name)
    counts = {key: sides.pop(key) for key in ("num_groups", "current_version", "max_staleness") if key in sides}
    batch = {"train_log_probs": tensors[0], "rollout_log_probs": tensors[1], "response_mask": tensors[2], **sides}
    config = dataclasses.replace(config, rollout_is="token")
    want = correct_rollouts(**batch, config=config, **counts)
    cp_size = 3 if split == "contiguous" else 2
    weights, accepted, metrics, _ = correct_split(batch, config, counts, [[0, 1, 5], [2, 3, 4]], cp_size, split)
    assert torch.equal(accepted, want.mask)
    torch.testing.assert_close(weights, want.weights, rtol=1e-12, atol=0)
    assert metrics == pytest.approx(want.metrics(), rel=1e-9, abs=1e-12)


BOTH = Divergence("gap", "|p - q|", of=None, least=0.0, of_both=lambda p, q: (p.exp() - q.exp()).abs())
SUM_OF_BOTH = {"needs": (Need("sum", BOTH),), "statistic": lambda values: values.sum(BOTH) / values.num_tokens}
REQUIRED = ("name", "unit", "words", "bounds", "needs", "statistic")
SOUND = {name: getattr(user_objects.TAKEN, name) for name in REQUIRED} | {"name": "another"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "Another one"}, "name"),
        ({"unit": "batch"}, "unit='batch'"),
        ({"unit": "token"}, "tested"),
        ({"unit": "prompt", "needs": (Need("max", K3),), "statistic": lambda values: values.max(K3)}, "sums"),
        ({"bounds": RATIO}, "bounds"),
        ({"needs": (Need("max", K3),)}, "needs .*: max of k3"),
        ({"needs": (Need("mean", K3),)}, "need"),
        ({"statistic": lambda values: values.sum(K3) / 0}, "finite"),
        ({"statistic": lambda values: values.sum(K3).sum()}, "statistic .*each sequence"),
        ({"unit": "prompt", "follows_others": True}, "follows_others"),
    ],
)
def test_one_that_does_not_fit_together_cannot_be_defined(changed, message):
    check_criterion(Criterion(**SOUND))
    with pytest.raises(ValueError, match=f"criterion '.*{message}"):
        define(Criterion(**SOUND | changed))
    assert SOUND["name"] not in CRITERIA


def define_with(divergence):
    """Define a criterion of this divergence."""
    define(
        Criterion(**SOUND | {"needs": (Need("sum", divergence),), "statistic": lambda values: values.sum(divergence)})
    )


@pytest.mark.parametrize(
    ("divergence", "changed", "message"),
    [
        (DISTANCE, {"of": "abs"}, "of must be a function"),
        (DISTANCE, {"of": lambda x: x}, "of gives -50, below least"),
        (DISTANCE, {"of": torch.exp}, "0 where log ρ is 0"),
        (DISTANCE, {"of": lambda x: x.abs().sum()}, "each"),
        (DISTANCE, {"of": None}, "least must be -inf"),
        (BOTH, {"of": torch.abs}, "of and of_both"),
        (BOTH, {"of_both": lambda p, q: p - q}, "of_both gives -3e.38"),
        (BOTH, {"of_both": lambda p, q: ((p.exp() - q.exp()) / torch.expm1(q)).abs()}, "of_both must be finite"),
    ],
)
def test_a_divergence_that_is_not_what_it_says_cannot_be_defined(divergence, changed, message):
    with pytest.raises(ValueError, match=f"divergence '{divergence.name}': .*{message}"):
        define_with(dataclasses.replace(divergence, **changed))


@pytest.mark.parametrize("unit", ["token", "turn", "sequence"])
def test_every_unit_has_both_log_probs(unit, monkeypatch):
    """The mean of |p - q| over each unit, in loops; a turn is a run of trained tokens."""
    tested = {"tested": BOTH} if unit == "token" else {}
    criterion = Criterion(**SOUND | SUM_OF_BOTH | tested | {"name": f"{unit}_gap", "unit": unit})
    monkeypatch.setitem(CRITERIA, criterion.name, criterion)
    train, rollout, mask = draw()
    want = torch.zeros_like(mask)
    for i, valid in enumerate(mask.tolist()):
        runs: list[list[int]] = []
        for t in (t for t in range(12) if valid[t]):
            joins = runs and (unit == "sequence" or (unit == "turn" and runs[-1][-1] == t - 1))
            runs[-1].append(t) if joins else runs.append([t])
        for run in runs:
            mean = sum(abs(math.exp(train[i, t]) - math.exp(rollout[i, t])) for t in run) / len(run)
            assert abs(mean - 0.03) > 1e-4
            want[i, run] = mean <= 0.03
    config = RolloutCorrectionConfig(rollout_is=None, rollout_rs=criterion.name, rollout_rs_threshold=0.03)
    result = correct_rollouts(train, rollout, mask, config)
    assert 0 < want.sum() < mask.sum()
    assert torch.equal(result.mask, want)


def test_a_name_stands_for_one_criterion_and_one_divergence():
    with pytest.raises(ValueError, match="'seq_min_k1' is defined already"):
        define(SEQ_MIN)
    with pytest.raises(ValueError, match="'token' is defined already"):
        define(Criterion(**SOUND | {"name": "token"}))
    other_k3 = Divergence("k3", "another k3", of=torch.abs, least=0.0)
    needs = {"needs": (Need("sum", other_k3),), "statistic": lambda values: values.sum(other_k3)}
    with pytest.raises(ValueError, match="another divergence is named 'k3'"):
        define(Criterion(**SOUND | needs))
    assert SOUND["name"] not in CRITERIA
