"""What must hold for any batch: the same numbers however it is laid out and split, and finite ones.

Ranks are played by one process here: the pure functions between the collectives run on every shard, and their pairs are
added up by hand.
"""

import functools
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rc import (
    PlanInputs,
    RolloutCorrectionConfig,
    batch_sums,
    correct_rollouts,
    finish,
    group_sums,
    sequence_sums,
)
from megatron_rc.correction.inputs import AgreedCounts, collect_shards
from megatron_rc.parallel import SequenceLayout

WIDTH = 8
# Of weights: sums of log-probs to -1e4 round to 4e-12 at each step, otherwise in every order and layout.
ROUNDING = 1e-10
TRAIN = "train_log_probs"
ROLLOUT = "rollout_log_probs"
CONFIGS = {
    "token": {"rollout_is": "token", "rollout_rs": "token_k1,seq_mean_k3,seq_max_k2", "rollout_rs_threshold": "2,1,3"},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_2", "rollout_is_batch_normalize": True},
    "sequence": {
        "rollout_is": "sequence",
        "rollout_is_batch_normalize": True,
        "rollout_is_batch_normalize_scope": "accepted",
        "rollout_rs": "seq_sum_k1",
        "rollout_rs_threshold": 3,
        "rollout_token_veto_threshold": 1e-3,
    },
    "groups": {
        "rollout_is": "geometric",
        "rollout_rs": "token_k2,group_any,group_mean_k1,opsm",
        "rollout_rs_threshold": "1,1.5,0.1",
    },
}
log_prob = st.one_of(st.floats(-4, 0, width=32), st.sampled_from([-1e4, -50.0, -1e-6, 0.0]))


@st.composite
def batches(draw, max_rows=5):
    """Arguments of a whole batch: [n, WIDTH] float64, with side inputs."""
    n = draw(st.integers(1, max_rows))
    size = n * WIDTH
    train, rollout = (torch.tensor(draw(st.lists(log_prob, min_size=size, max_size=size))).double() for _ in range(2))
    mask = torch.tensor(draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    return {
        TRAIN: train.view(n, WIDTH),
        ROLLOUT: rollout.view(n, WIDTH),
        "response_mask": mask.view(n, WIDTH),
        "advantages": torch.tensor(draw(st.lists(st.sampled_from([-1.0, 0.5]), min_size=n, max_size=n))),
        "rewards": torch.tensor(draw(st.lists(st.sampled_from([-1.0, 0.0, 1.0]), min_size=n, max_size=n))),
        "group_ids": torch.tensor(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))),
        "policy_versions": torch.tensor(draw(st.lists(st.integers(0, 4), min_size=n, max_size=n))),
        "mini_batch_ids": torch.tensor(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))),
        "sequence_ids": torch.arange(n),
    }


SIZES = {"num_groups": 2, "num_mini_batches": 2, "current_version": 4, "max_staleness": 2}


def correct(batch, name, **more):
    return correct_rollouts(
        **batch, config=RolloutCorrectionConfig.from_dict(CONFIGS[name], "megatron_rc"), **SIZES, **more
    )


def rows_of(batch, index):
    return {name: value[index] for name, value in batch.items()}


def added(pairs):
    """The pair that a transport would bring back."""
    sums, maxima = zip(*pairs, strict=True)
    return sum(sums), functools.reduce(torch.maximum, maxima)


def correct_split(batch, config, sizes, replicas, cp_size, split):
    """(weights, mask) [n, s], metrics and denominators from shards whose pairs are added by hand."""
    shards = {}
    length = batch[TRAIN].shape[1] // cp_size
    for replica, rows in enumerate(replicas):
        for rank in range(cp_size):
            layout = SequenceLayout.padded(len(rows), length, cp_rank=rank, cp_size=cp_size, split=split)
            part = rows_of(batch, torch.tensor(rows, dtype=torch.int64))
            cut = {key: layout.cut(value) if value.dim() == 2 else value for key, value in part.items()}
            inputs = PlanInputs(**cut, layout=layout)
            shards[replica, rank] = sequence_sums(collect_shards(inputs, AgreedCounts(**sizes)), config)
    over_cp = {
        replica: added([shards[replica, rank].pair for rank in range(cp_size)]) for replica in range(len(replicas))
    }
    prompts = None
    if config.needs_prompts:
        prompts = added([group_sums(local, over_cp[replica]) for (replica, _), local in shards.items()])
    batches = {key: batch_sums(local, over_cp[key[0]], prompts) for key, local in shards.items()}
    header = added([sums.pair for sums in batches.values()])
    results = {key: finish(sums, header) for key, sums in batches.items()}
    weights = torch.zeros_like(batch[TRAIN])
    mask = torch.zeros_like(batch["response_mask"])
    for (replica, rank), result in results.items():
        rows = torch.tensor(replicas[replica], dtype=torch.int64).unsqueeze(1)
        layout = shards[replica, rank].shards.parts[0].layout
        weights[rows, layout.positions()] = result.weights
        mask[rows, layout.positions()] = result.mask
    every = list(results.values())
    assert all(result.metrics() == every[0].metrics() for result in every)
    return weights, mask, every[0].metrics(), every[0].denominators


def assert_equal(got, result):
    config = result.config
    weights, mask, metrics, denominators = got
    torch.testing.assert_close(weights, result.weights, rtol=ROUNDING, atol=1e-15)
    assert torch.equal(mask, result.mask)
    assert torch.equal(denominators, result.denominators)
    expected_metrics = result.metrics()
    assert metrics.keys() == expected_metrics.keys()
    for key, value in expected_metrics.items():
        rounding = 1e-9
        if key.endswith("_std"):
            # The difference v of two moments of w - 1, rounded to e. √(v + e) - √v is at most e/√v, and at most √e:
            # what is clamped alike at either end, to 5e8 or 2e-9, has a spread of 0 or of that rounding.
            error = 1e-15 * (1 + expected_metrics[key.removesuffix("std") + "mean"]) ** 2
            rounding = max(rounding, min(error / value, math.sqrt(error)) if value else math.sqrt(error))
        if key.endswith("eff_sample_size") and config.rollout_is == "token" and value:
            # mean² / E[w²], whose denominator of token weights is rounded by the same e.
            mean = expected_metrics[key.removesuffix("eff_sample_size") + "mean"]
            rounding = max(rounding, min(1.0, value**2 * 1e-15 * (1 + mean) ** 2 / mean**2))
        assert metrics[key] == pytest.approx(value, rel=1e-9, abs=rounding), key


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from(sorted(CONFIGS)), st.data())
def test_splitting_over_ranks_changes_nothing(batch, name, data):
    n = len(batch["rewards"])
    owners = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    replicas = [[row for row in range(n) if owners[row] == replica] for replica in range(3)]
    cp_size, split = data.draw(st.sampled_from([(1, "zigzag"), (2, "zigzag"), (4, "zigzag"), (4, "contiguous")]))
    result = correct(batch, name)
    assert_equal(correct_split(batch, result.config, SIZES, replicas, cp_size, split), result)


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from(sorted(CONFIGS)), st.data())
def test_packing_and_padding_give_the_same(batch, name, data):
    """Trailing padding is cut off every row, or more is added; micro-batches of any size."""
    n = len(batch["rewards"])
    pieces = data.draw(st.lists(st.integers(0, n), max_size=3).map(sorted))
    bounds = [0, *pieces, n]
    lists = {key: [] for key in batch}
    layouts = []
    for start, stop in pairwise(bounds):
        part = rows_of(batch, slice(start, stop))
        used = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in part["response_mask"]]
        layouts.append(SequenceLayout.packed([sum(used[:index]) for index in range(len(used) + 1)]))
        for key, value in part.items():
            flat = [row[:length] for row, length in zip(value, used, strict=True)] if value.dim() == 2 else [value]
            lists[key].append(torch.cat([*flat, value.new_empty(0)]))
    packed = correct(lists, name, layout=layouts)
    result = correct(batch, name)
    valid = batch["response_mask"]
    used = torch.cat([row[: int(row.nonzero().max()) + 1] if row.any() else row[:0] for row in valid])
    weights = torch.zeros_like(batch[TRAIN])
    mask = torch.zeros_like(valid)
    weights[valid] = torch.cat(packed.weights)[used]
    mask[valid] = torch.cat(packed.mask)[used]
    assert_equal((weights, mask, packed.metrics(), packed.denominators), result)


@settings(max_examples=20, deadline=None)
@given(batches(), st.sampled_from(sorted(CONFIGS)))
def test_everything_is_finite_and_rejection_leaves_weights_alone(batch, name):
    result = correct(batch, name)
    assert result.weights.isfinite().all()
    assert all(math.isfinite(value) for value in result.metrics().values())
    assert not (result.mask & ~batch["response_mask"]).any()
    assert (result.weights[~batch["response_mask"]] == 0).all()
    alone = {key: value for key, value in CONFIGS[name].items() if key in ("rollout_is", "rollout_is_threshold")}
    free = correct_rollouts(
        *(batch[key] for key in (TRAIN, ROLLOUT, "response_mask")), RolloutCorrectionConfig(**alone)
    )
    if not CONFIGS[name].get("rollout_is_batch_normalize"):
        torch.testing.assert_close(free.weights, result.weights, rtol=ROUNDING, atol=0)
