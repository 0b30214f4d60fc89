"""Configurations of the correction, spelled for the user and for the oracle, and batches for them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import yaml

from tests.support import correction_oracle as oracle

LN = math.log
LENGTHS = (9, 16, 0, 1, 12, 16, 3, 7, 2, 16, 5, 14)
ROWS = len(LENGTHS)
WIDTH = 16
NEAREST = 1e-3  # the least distance of every statistic from every bound


@dataclass(frozen=True)
class Case:
    """One configuration.

    Attributes:
        fields: fields of RolloutCorrectionConfig.
        settings: the oracle's settings.
        sides: names of side inputs; ``token_``: one value a token.
        spread: standard deviation of log ρ.
        shift: mean of log ρ of a token, in nats.
        bad: True: the batch has tokens with unusable log-probs.
        rejects: names of criteria that must reject between 10 % and 90 % of the tokens.
    """

    fields: dict[str, Any]
    settings: dict[str, Any]
    sides: tuple[str, ...] = ()
    spread: float = 0.55
    shift: float = 0.0
    bad: bool = False
    rejects: tuple[str, ...] = field(default=())


# Criteria of the settings have a name and two bounds: of k1 on ρ, of the others as they are.
_CASES = """
nothing:
  fields: {rollout_is: null}
  sides: [rewards]
token:
  fields: {rollout_is: token, rollout_is_threshold: 1.5, rollout_rs: 'token_k1, seq_mean_k3,seq_sum_k1',
    rollout_rs_threshold: '0.5_1.9,0.2,0.08_6'}
  settings: {level: token, upper: 1.5, criteria: [token_k1 0.5 1.9, seq_mean_k3 -inf 0.2, seq_sum_k1 0.08 6]}
  sides: [rewards, policy_versions]
token clamp:
  fields: {rollout_is: token, rollout_is_mode: clamp, rollout_is_threshold: 1.5, rollout_is_threshold_lower: 0.7,
    rollout_is_batch_normalize: true, rollout_rs: 'token_k2,seq_max_k3', rollout_rs_threshold: '0.3,0.6'}
  settings: {level: token, mode: clamp, lower: 0.7, upper: 1.5, batch_normalize: true, criteria: [token_k2 -inf 0.3,
    seq_max_k3 -inf 0.6]}
  sides: [token_policy_versions]
token icepop:
  fields: {rollout_is: token, rollout_is_threshold: 0.6_1.6, rejection_denominator: original, rollout_rs: token_k3,
    rollout_rs_threshold: 0.4}
  settings: {level: token, mode: mask, lower: 0.6, upper: 1.6, denominator: original, criteria: [token_k3 -inf 0.4]}
token kpop:
  fields: {rollout_is: token, rollout_is_threshold: 1.5, rejection_denominator: original, rollout_staleness_scale:
    '1:1.5,3:0.8', rollout_rs: 'token_kpop,seq_mean_k1', rollout_rs_threshold: '0.05,0.7_1.5'}
  settings: {level: token, upper: 1.5, denominator: original, staleness: [[1, 1.5], [3, 0.8]], criteria: [token_kpop
    -inf 0.05, seq_mean_k1 0.7 1.5]}
  sides: [token_policy_versions]
token accepted scope:
  fields: {rollout_is: token, rollout_is_threshold: 1.4, rollout_is_batch_normalize: true,
    rollout_is_batch_normalize_scope: accepted, rollout_token_veto_threshold: 0.4, rollout_rs: 'token,geometric,opsm',
    rollout_rs_threshold: '1.8,0.7_1.5,0.05'}
  settings: {level: token, upper: 1.4, batch_normalize: true, scope: accepted, veto: 0.4, criteria: [token_k1
    0.5555555555555556 1.8, seq_mean_k1 0.7 1.5, opsm -0.05 inf]}
  sides: [token_advantages]
sequence:
  fields: {rollout_is: sequence, rollout_is_batch_normalize: true, rollout_rs: 'seq_sum_k2,seq_sum_k3',
    rollout_rs_threshold: '2.2,2.5'}
  settings: {level: sequence, batch_normalize: true, criteria: [seq_sum_k2 -inf 2.2, seq_sum_k3 -inf 2.5]}
sequence icepop:
  fields: {rollout_is: sequence, rollout_is_threshold: 3, rollout_is_mode: mask, rollout_is_batch_normalize: true,
    rollout_is_batch_normalize_scope: accepted, rollout_rs: opsm, rollout_rs_threshold: 0.02}
  settings: {level: sequence, mode: mask, upper: 3.0, batch_normalize: true, scope: accepted, criteria: [opsm -0.02
    inf]}
  sides: [advantages, rewards]
geometric:
  fields: {rollout_is: geometric, rollout_is_mode: clamp, rollout_is_threshold: 1.1, rollout_rs:
    'seq_mean_k1,seq_mean_k2', rollout_rs_threshold: '1.2,0.25', rollout_rs_threshold_lower: 0.75}
  settings: {level: geometric, mode: clamp, upper: 1.1, criteria: [seq_mean_k1 0.75 1.2, seq_mean_k2 -inf 0.25]}
geometric and veto measured:
  fields: {rollout_is: geometric, rollout_is_threshold: 0.9_1.2, rollout_is_apply: false, rollout_rs: token_k1,
    rollout_rs_threshold: '0.4_2', rollout_token_veto_threshold: 0.5}
  settings: {level: geometric, mode: mask, apply: false, lower: 0.9, upper: 1.2, veto: 0.5, criteria: [token_k1 0.4 2]}
maxima and veto:
  fields: {rollout_is: null, rollout_token_veto_threshold: 0.4, rollout_rs: 'seq_max_k2,seq_mean_error',
    rollout_rs_threshold: '0.46,0.6'}
  settings: {veto: 0.4, criteria: [seq_max_k2 -inf 0.46, seq_mean_error -inf 0.6]}
groups:
  fields: {rollout_is: token, rollout_rs: 'group_any,seq_sum_k1,group_mean_k1,group_mean_k3', rollout_rs_threshold:
    '0.05_9,0.85_1.2,0.2'}
  settings: {level: token, criteria: [seq_sum_k1 0.05 9, group_mean_k1 0.85 1.2, group_mean_k3 -inf 0.2, group_any -inf
    inf]}
  sides: [group_ids]
  rejects: [seq_sum_k1, group_mean_k1]
group of the vetoed:
  fields: {rollout_is: token, rollout_token_veto_threshold: 0.4, rollout_rs: 'group_any,opsm,group_mean_k2',
    rollout_rs_threshold: '0.02,0.16'}
  settings: {level: token, veto: 0.4, criteria: [opsm -0.02 inf, group_mean_k2 -inf 0.16, group_any -inf inf]}
  sides: [group_ids, advantages]
token by staleness:
  fields: {rollout_is: token, rollout_is_mode: clamp, rollout_is_threshold: 0.7_1.4, rollout_staleness_scale:
    '1:1.5,3:0.8', rollout_rs: 'token_k1,token_k2,seq_max_k3', rollout_rs_threshold: '0.6_1.6,0.3,0.5'}
  settings: {level: token, mode: clamp, lower: 0.7, upper: 1.4, staleness: [[1, 1.5], [3, 0.8]], criteria: [token_k1
    0.6 1.6, token_k2 -inf 0.3, seq_max_k3 -inf 0.5]}
  sides: [token_policy_versions]
sequence by staleness:
  fields: {rollout_is: sequence, rollout_is_threshold: 2.5, rollout_is_batch_normalize: true, rollout_staleness_scale:
    '1:0.5,4:2', rollout_rs: 'seq_sum_k1,seq_mean_k3,opsm', rollout_rs_threshold: '0.2_4,0.15,0.04'}
  settings: {level: sequence, upper: 2.5, batch_normalize: true, staleness: [[1, 0.5], [4, 2.0]], criteria: [seq_sum_k1
    0.2 4, seq_mean_k3 -inf 0.15, opsm -0.04 inf]}
  sides: [policy_versions, advantages]
icepop by staleness:
  fields: {rollout_is: geometric, rollout_is_threshold: 0.85_1.2, rollout_staleness_scale: '4:0.6'}
  settings: {level: geometric, mode: mask, lower: 0.85, upper: 1.2, staleness: [[4, 0.6]]}
  sides: [token_policy_versions]
prefix:
  fields: {rollout_is: prefix, rollout_is_threshold: 1.8, rollout_is_batch_normalize: true, rollout_rs: 'token_k1',
    rollout_rs_threshold: '0.5_1.9'}
  settings: {level: prefix, upper: 1.8, batch_normalize: true, criteria: [token_k1 0.5 1.9]}
prefix icepop:
  fields: {rollout_is: prefix, rollout_is_threshold: 0.4_2.5, bad_log_probs: reject_token}
  settings: {level: prefix, mode: mask, lower: 0.4, upper: 2.5, bad: reject_token}
  bad: true
min prefix:
  fields: {rollout_is: min_prefix, rollout_is_mode: clamp, rollout_is_threshold: 0.3_1.5, rollout_rs: seq_mean_k1,
    rollout_rs_threshold: 1.15, rollout_rs_threshold_lower: 0.85}
  settings: {level: min_prefix, mode: clamp, lower: 0.3, upper: 1.5, criteria: [seq_mean_k1 0.85 1.15]}
turns:
  fields: {rollout_is: turn, rollout_is_threshold: 1.6, rollout_rs: 'turn_sum_k1,turn_mean_k3,turn_max_k2',
    rollout_rs_threshold: '0.3_3,0.18,0.42'}
  settings: {level: turn, upper: 1.6, criteria: [turn_sum_k1 0.3 3, turn_mean_k3 -inf 0.18, turn_max_k2 -inf 0.42]}
turns by id:
  fields: {rollout_is: turn_geometric, rollout_is_threshold: 0.7_1.4, rollout_rs:
    'turn_mean_k1,turn_sum_k2,turn_sum_k3,turn_mean_k2', rollout_rs_threshold: '0.6_1.5,0.9,0.9,0.24'}
  settings: {level: turn_geometric, mode: mask, lower: 0.7, upper: 1.4, criteria: [turn_mean_k1 0.6 1.5, turn_sum_k2
    -inf 0.9, turn_sum_k3 -inf 0.9, turn_mean_k2 -inf 0.24]}
  sides: [turn_ids]
turns of the vetoed:
  fields: {rollout_is: turn, rollout_is_threshold: 3, rollout_is_mode: mask, rollout_is_batch_normalize: true,
    rollout_is_batch_normalize_scope: accepted, bad_log_probs: reject_token, rollout_rs: 'turn_max_k3,seq_mean_k2',
    rollout_rs_threshold: '0.6,0.25'}
  settings: {level: turn, mode: mask, upper: 3.0, batch_normalize: true, scope: accepted, bad: reject_token, criteria: [
    turn_max_k3 -inf 0.6, seq_mean_k2 -inf 0.25]}
  bad: true
# Log weights of -18 for one token to -288 for 16.
small sequence weights:
  fields: {rollout_is: sequence, rollout_is_batch_normalize: true, rollout_rs: seq_mean_k1, rollout_rs_threshold:
    1.1e-8_1.9e-8}
  settings: {level: sequence, batch_normalize: true, criteria: [seq_mean_k1 1.1e-8 1.9e-8]}
  shift: -18
small prefix weights:
  fields: {rollout_is: prefix, rollout_is_batch_normalize: true, rollout_is_batch_normalize_scope: accepted, rollout_rs:
    seq_mean_k1, rollout_rs_threshold: 1.1e-8_1.9e-8}
  settings: {level: prefix, batch_normalize: true, scope: accepted, criteria: [seq_mean_k1 1.1e-8 1.9e-8]}
  shift: -18
small turn weights:
  fields: {rollout_is: turn, rollout_is_batch_normalize: true, rollout_rs: seq_mean_k1, rollout_rs_threshold:
    1.1e-8_1.9e-8}
  settings: {level: turn, batch_normalize: true, criteria: [seq_mean_k1 1.1e-8 1.9e-8]}
  sides: [turn_ids]
  shift: -18
bad tokens:
  fields: {rollout_is: sequence, bad_log_probs: reject_token, rejection_denominator: original, rollout_rs: token_k1,
    rollout_rs_threshold: 2}
  settings: {level: sequence, bad: reject_token, denominator: original, criteria: [token_k1 0.5 2]}
  bad: true
bad sequences:
  fields: {rollout_is: token, bad_log_probs: reject_sequence, rollout_is_batch_normalize: true}
  settings: {level: token, bad: reject_sequence, batch_normalize: true}
  bad: true
"""


def _case(fields: dict[str, Any], settings: dict[str, Any] | None = None, **more: Any) -> Case:
    settings = dict(settings or {})
    criteria = []
    for criterion in settings.pop("criteria", []):
        name, *bounds = criterion.split()
        criteria.append((name, *(LN(float(x)) if name.endswith("_k1") else float(x) for x in bounds)))
    settings |= {"criteria": tuple(criteria)} if criteria else {}
    settings |= {name: tuple(map(tuple, settings[name])) for name in ("staleness",) if name in settings}
    more |= {name: tuple(more[name]) for name in ("sides", "rejects") if name in more}
    return Case(fields, settings, **{"rejects": tuple(name for name, *_ in criteria)} | more)


CASES = {name: _case(**given) for name, given in yaml.safe_load(_CASES).items()}


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
    train = rollout + case.spread * torch.randn(ROWS, WIDTH, generator=generator).clamp(-1.8, 1.8) + case.shift
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
        # Turns of 5 tokens, which do not end where the mask has holes; the last one comes back to the first one's id.
        "turn_ids": torch.tensor([0, 2, -1, 9, 2])[torch.arange(WIDTH) // 3 % 5].expand(ROWS, WIDTH).contiguous(),
    }
    if case.bad:
        for row, column, value in ((1, 0, math.nan), (5, 3, math.inf), (9, 7, -math.inf), (0, 0, 0.01)):
            mask[row, column] = True
            (train if row % 2 else rollout)[row, column] = value
    names = {"sequence_ids", "mini_batch_ids", *case.sides}
    chosen = {name.removeprefix("token_"): value for name, value in sides.items() if name in names}
    train, rollout = (torch.where(mask, values, filler).double() for values in (train, rollout))
    return Batch(train, rollout, mask, chosen)


def sizes(batch: Batch) -> dict[str, int]:
    """The counts that belong to the side inputs."""
    counts = dict(SIZES)
    for name, more in MORE_SIZES.items():
        counts |= more if name in batch.sides else {}
    return counts


def sides_of(batch: Batch) -> dict[str, Any]:
    """The side inputs that decide about tokens, under the oracle's names."""
    names = {name: name for name in ("advantages", "group_ids", "turn_ids")} | {"policy_versions": "versions"}
    inputs = {
        name_of_oracle: batch.sides[name].tolist() for name, name_of_oracle in names.items() if name in batch.sides
    }
    return inputs | {"current_version": sizes(batch).get("current_version")}


@functools.cache
def clear_batch(name: str) -> tuple[Batch, oracle.Result]:
    """A batch that decides clearly and not vacuously under a case, and the oracle's result."""
    case = CASES[name]
    for seed in range(500):
        batch = make_batch(case, seed)
        whole = [tensor.tolist() for tensor in (batch.train, batch.rollout, batch.mask)]
        if oracle.distance_to_bounds(*whole, case.settings, **sides_of(batch)) < NEAREST:
            continue
        more = {name: batch.sides[name].tolist() for name in ("rewards", "mini_batch_ids") if name in batch.sides}
        more |= {"max_staleness": sizes(batch).get("max_staleness", 0)} | SIZES
        result = oracle.correct(*whole, case.settings, **sides_of(batch), **more)
        shares = [result.metrics[f"rollout_rs_{criterion}_masked_fraction"] for criterion in case.rejects]
        if all(0.1 < share < 0.9 for share in shares) and result.metrics["rollout_rs_masked_fraction"] < 0.95:
            return batch, result
    raise AssertionError(f"no seed decides clearly: {name}")
