"""Configurations of the correction, spelled for the user and for the oracle, and batches for them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.support import correction_oracle as oracle

LN = math.log
NONE = -math.inf
LENGTHS = (9, 16, 0, 1, 12, 16, 3, 7, 2, 16, 5, 14)
ROWS, WIDTH = len(LENGTHS), 16
NEAREST = 1e-3  # the least distance of every statistic from every bound


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        fields: fields of RolloutCorrectionConfig.
        settings: the oracle's settings.
        sides: names of the side inputs: advantages, token_advantages, groups, versions, token_versions.
        spread: standard deviation of log ρ.
        bad: True: the batch has tokens with unusable log-probs.
        rejects: names of criteria that must reject between 10 % and 90 % of the tokens.
    """

    fields: dict[str, Any]
    settings: dict[str, Any]
    sides: tuple[str, ...] = ()
    spread: float = 0.55
    bad: bool = False
    rejects: tuple[str, ...] = field(default=())


def rs(names, thresholds, **more):
    return {"rollout_rs": names, "rollout_rs_threshold": thresholds, **more}


def k1(name, lower, upper):
    return (name, LN(lower), LN(upper))


NO_IS = {"rollout_is": None}
CASES = {
    "nothing": Case(NO_IS, {}, ("rewards",)),
    "token": Case(
        {
            "rollout_is": "token",
            "rollout_is_threshold": 1.5,
            **rs("token_k1, seq_mean_k3,seq_sum_k1", "0.5_1.9,0.2,0.08_6"),
        },
        {
            "level": "token",
            "upper": 1.5,
            "criteria": (k1("token_k1", 0.5, 1.9), ("seq_mean_k3", NONE, 0.2), k1("seq_sum_k1", 0.08, 6)),
        },
        ("rewards", "versions"),
        rejects=("token_k1", "seq_mean_k3", "seq_sum_k1"),
    ),
    "token clamp": Case(
        {
            "rollout_is": "token",
            "rollout_is_mode": "clamp",
            "rollout_is_threshold": 1.5,
            "rollout_is_threshold_lower": 0.7,
            "rollout_is_batch_normalize": True,
            **rs("token_k2,seq_max_k3", "0.3,0.6"),
        },
        {
            "level": "token",
            "mode": "clamp",
            "lower": 0.7,
            "upper": 1.5,
            "batch_normalize": True,
            "criteria": (("token_k2", NONE, 0.3), ("seq_max_k3", NONE, 0.6)),
        },
        ("token_versions",),
        rejects=("token_k2", "seq_max_k3"),
    ),
    "token icepop": Case(
        {
            "rollout_is": "token",
            "rollout_is_threshold": "0.6_1.6",
            "rejection_denominator": "original",
            **rs("token_k3", 0.4),
        },
        {
            "level": "token",
            "mode": "mask",
            "lower": 0.6,
            "upper": 1.6,
            "denominator": "original",
            "criteria": (("token_k3", NONE, 0.4),),
        },
        rejects=("token_k3",),
    ),
    "token accepted scope": Case(
        {
            "rollout_is": "token",
            "rollout_is_threshold": 1.4,
            "rollout_is_batch_normalize": True,
            "rollout_is_batch_normalize_scope": "accepted",
            "rollout_token_veto_threshold": 0.4,
            **rs("token,geometric,opsm", "1.8,0.7_1.5,0.05"),
        },
        {
            "level": "token",
            "upper": 1.4,
            "batch_normalize": True,
            "scope": "accepted",
            "veto": 0.4,
            "criteria": (k1("token_k1", 1 / 1.8, 1.8), k1("seq_mean_k1", 0.7, 1.5), ("opsm", -0.05, math.inf)),
        },
        ("token_advantages",),
        rejects=("token_k1", "seq_mean_k1", "opsm"),
    ),
    "sequence": Case(
        {"rollout_is": "sequence", "rollout_is_batch_normalize": True, **rs("seq_sum_k2,seq_sum_k3", "2.2,2.5")},
        {
            "level": "sequence",
            "batch_normalize": True,
            "criteria": (("seq_sum_k2", NONE, 2.2), ("seq_sum_k3", NONE, 2.5)),
        },
        rejects=("seq_sum_k2", "seq_sum_k3"),
    ),
    "sequence icepop": Case(
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": 3,
            "rollout_is_mode": "mask",
            "rollout_is_batch_normalize": True,
            "rollout_is_batch_normalize_scope": "accepted",
            **rs("opsm", 0.02),
        },
        {
            "level": "sequence",
            "mode": "mask",
            "upper": 3.0,
            "batch_normalize": True,
            "scope": "accepted",
            "criteria": (("opsm", -0.02, math.inf),),
        },
        ("advantages", "rewards"),
        rejects=("opsm",),
    ),
    "geometric": Case(
        {
            "rollout_is": "geometric",
            "rollout_is_mode": "clamp",
            "rollout_is_threshold": 1.1,
            **rs("seq_mean_k1,seq_mean_k2", "1.2,0.25", rollout_rs_threshold_lower=0.75),
        },
        {
            "level": "geometric",
            "mode": "clamp",
            "upper": 1.1,
            "criteria": (k1("seq_mean_k1", 0.75, 1.2), ("seq_mean_k2", NONE, 0.25)),
        },
        rejects=("seq_mean_k1", "seq_mean_k2"),
    ),
    "geometric measured": Case(
        {
            "rollout_is": "geometric",
            "rollout_is_threshold": "0.9_1.2",
            "rollout_is_apply": False,
            **rs("token_k1", "0.4_2"),
        },
        {
            "level": "geometric",
            "mode": "mask",
            "apply": False,
            "lower": 0.9,
            "upper": 1.2,
            "criteria": (k1("token_k1", 0.4, 2),),
        },
        rejects=("token_k1",),
    ),
    "maxima and veto": Case(
        {**NO_IS, "rollout_token_veto_threshold": 0.4, **rs("seq_max_k2,seq_mean_error", "0.46,0.6")},
        {"veto": 0.4, "criteria": (("seq_max_k2", NONE, 0.46), ("seq_mean_error", NONE, 0.6))},
        rejects=("seq_max_k2", "seq_mean_error"),
    ),
    "groups": Case(
        {"rollout_is": "token", **rs("group_any,seq_sum_k1,group_mean_k1,group_mean_k3", "0.05_9,0.85_1.2,0.2")},
        {
            "level": "token",
            "criteria": (
                k1("seq_sum_k1", 0.05, 9),
                k1("group_mean_k1", 0.85, 1.2),
                ("group_mean_k3", NONE, 0.2),
                ("group_any", NONE, math.inf),
            ),
        },
        ("groups",),
        rejects=("seq_sum_k1", "group_mean_k1"),
    ),
    "group of the vetoed": Case(
        {"rollout_is": "token", "rollout_token_veto_threshold": 0.4, **rs("group_any,opsm,group_mean_k2", "0.02,0.16")},
        {
            "level": "token",
            "veto": 0.4,
            "criteria": (("opsm", -0.02, math.inf), ("group_mean_k2", NONE, 0.16), ("group_any", NONE, math.inf)),
        },
        ("groups", "advantages"),
        rejects=("opsm", "group_mean_k2", "group_any"),
    ),
    "token by staleness": Case(
        {
            "rollout_is": "token",
            "rollout_is_mode": "clamp",
            "rollout_is_threshold": "0.7_1.4",
            "rollout_staleness_scale": "1:1.5,3:0.8",
            **rs("token_k1,token_k2,seq_max_k3", "0.6_1.6,0.3,0.5"),
        },
        {
            "level": "token",
            "mode": "clamp",
            "lower": 0.7,
            "upper": 1.4,
            "staleness": ((1, 1.5), (3, 0.8)),
            "criteria": (k1("token_k1", 0.6, 1.6), ("token_k2", NONE, 0.3), ("seq_max_k3", NONE, 0.5)),
        },
        ("token_versions",),
        rejects=("token_k1", "token_k2", "seq_max_k3"),
    ),
    "sequence by staleness": Case(
        {
            "rollout_is": "sequence",
            "rollout_is_threshold": 2.5,
            "rollout_is_batch_normalize": True,
            "rollout_staleness_scale": "1:0.5,4:2",
            **rs("seq_sum_k1,seq_mean_k3,opsm", "0.2_4,0.15,0.04"),
        },
        {
            "level": "sequence",
            "upper": 2.5,
            "batch_normalize": True,
            "staleness": ((1, 0.5), (4, 2.0)),
            "criteria": (k1("seq_sum_k1", 0.2, 4), ("seq_mean_k3", NONE, 0.15), ("opsm", -0.04, math.inf)),
        },
        ("versions", "advantages"),
        rejects=("seq_sum_k1", "seq_mean_k3", "opsm"),
    ),
    "icepop by staleness": Case(
        {"rollout_is": "geometric", "rollout_is_threshold": "0.85_1.2", "rollout_staleness_scale": "4:0.6"},
        {"level": "geometric", "mode": "mask", "lower": 0.85, "upper": 1.2, "staleness": ((4, 0.6),)},
        ("token_versions",),
    ),
    "bad tokens": Case(
        {
            "rollout_is": "sequence",
            "bad_log_probs": "reject_token",
            "rejection_denominator": "original",
            **rs("token_k1", 2),
        },
        {"level": "sequence", "bad": "reject_token", "denominator": "original", "criteria": (k1("token_k1", 0.5, 2),)},
        bad=True,
        rejects=("token_k1",),
    ),
    "bad sequences": Case(
        {"rollout_is": "token", "bad_log_probs": "reject_sequence", "rollout_is_batch_normalize": True},
        {"level": "token", "bad": "reject_sequence", "batch_normalize": True},
        bad=True,
    ),
}


@dataclass(frozen=True)
class Batch:
    """Whole sequences, [ROWS, WIDTH] float64 whose values are float32, and their side inputs; ids are unique."""

    train: torch.Tensor
    rollout: torch.Tensor
    mask: torch.Tensor
    sides: dict[str, torch.Tensor]

    def rows(self, index: torch.Tensor) -> Batch:
        """A part of the sequences."""
        sides = {name: value[index] for name, value in self.sides.items()}
        return Batch(self.train[index], self.rollout[index], self.mask[index], sides)


# Numbers that must be equal on all ranks.
SIZES = {"num_mini_batches": 3}
MORE_SIZES = {"group_ids": {"num_groups": 5}, "policy_versions": {"current_version": 7, "max_staleness": 2}}


def make_batch(case: Case, seed: int, filler: float = math.nan) -> Batch:
    """A ragged batch with holes, an empty sequence and one of a single token; fillers outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -2 * torch.rand(ROWS, WIDTH, generator=generator) - 1.0
    train = rollout + case.spread * torch.randn(ROWS, WIDTH, generator=generator).clamp(-1.8, 1.8)
    mask = torch.arange(WIDTH).expand(ROWS, WIDTH) < torch.tensor(LENGTHS).unsqueeze(1)
    mask = mask & ((torch.rand(ROWS, WIDTH, generator=generator) > 0.2) | (torch.arange(WIDTH) == 0))
    sides: dict[str, torch.Tensor] = {
        "sequence_ids": torch.randperm(ROWS, generator=generator) + 100,
        "mini_batch_ids": torch.arange(ROWS) % 3,
        "rewards": torch.tensor([1.0, -0.5, 0.0] * 4),
        "advantages": torch.randn(ROWS, generator=generator),
        "token_advantages": torch.randn(ROWS, WIDTH, generator=generator),
        "group_ids": torch.arange(ROWS) % 5,
        "policy_versions": torch.tensor([7, 6, 2] * 4),
        "token_policy_versions": torch.randint(3, 8, (ROWS, WIDTH), generator=generator),
    }
    if case.bad:
        for row, column, value in ((1, 0, math.nan), (5, 3, math.inf), (9, 7, -math.inf), (0, 0, 0.01)):
            mask[row, column] = True
            (train if row % 2 else rollout)[row, column] = value
    wanted = {"sequence_ids", "mini_batch_ids", *(_SIDE[name] for name in case.sides)}
    chosen = {name.removeprefix("token_"): value for name, value in sides.items() if name in wanted}
    train, rollout = (torch.where(mask, values, filler).double() for values in (train, rollout))
    return Batch(train, rollout, mask, chosen)


_SIDE = {
    "rewards": "rewards",
    "advantages": "advantages",
    "token_advantages": "token_advantages",
    "groups": "group_ids",
    "versions": "policy_versions",
    "token_versions": "token_policy_versions",
}


def sizes(batch: Batch) -> dict[str, int]:
    """The counts that belong to the side inputs."""
    found = dict(SIZES)
    for name, more in MORE_SIZES.items():
        found |= more if name in batch.sides else {}
    return found


def ask_oracle(case: Case, batch: Batch) -> oracle.Result:
    """The oracle's result for the whole batch."""
    given, known = {name: value.tolist() for name, value in batch.sides.items()}, sizes(batch)
    return oracle.correct(
        *(tensor.tolist() for tensor in (batch.train, batch.rollout, batch.mask)),
        case.settings,
        advantages=given.get("advantages"),
        rewards=given.get("rewards"),
        group_ids=given.get("group_ids"),
        versions=given.get("policy_versions"),
        current_version=known.get("current_version"),
        max_staleness=known.get("max_staleness", 0),
        mini_batch_ids=given["mini_batch_ids"],
        num_mini_batches=3,
    )


@functools.cache
def clear_batch(name: str) -> tuple[Batch, oracle.Result]:
    """A batch that decides clearly and not vacuously under a case, and the oracle's result."""
    case = CASES[name]
    for seed in range(500):
        batch = make_batch(case, seed)
        sides: dict[str, Any] = {
            key: batch.sides[key].tolist() for key in ("advantages", "group_ids") if key in batch.sides
        }
        if "policy_versions" in batch.sides:
            sides |= {"versions": batch.sides["policy_versions"].tolist(), "current_version": 7}
        whole = (tensor.tolist() for tensor in (batch.train, batch.rollout, batch.mask))
        if oracle.distance_to_bounds(*whole, case.settings, **sides) < NEAREST:
            continue
        found = ask_oracle(case, batch)
        shares = [found.metrics[f"rollout_rs_{criterion}_masked_fraction"] for criterion in case.rejects]
        if all(0.1 < share < 0.9 for share in shares) and found.metrics["rollout_rs_masked_fraction"] < 0.95:
            return batch, found
    raise AssertionError(f"no seed decides clearly: {name}")
