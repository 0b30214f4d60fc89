"""Rollouts as slime's samples, in dicts (``Sample.to_dict()``); docs/rollouts.md has the tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_rc.records.formats.rows import (
    experts_of,
    flags_of,
    log_probs_of,
    one_sequence,
    sampled_log_probs,
    scored_log_probs,
    spans,
    tensor_of,
    version_of,
    versions_of,
)
from megatron_rc.records.rollout import FINISH_REASONS, NO_EXPERT, RolloutBatch, SamplingParams
from megatron_rc.records.support import offsets_of, support_of

_REASON_OF_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "abort"}
_STATUS_OF_REASON = {"stop": "completed", "length": "truncated", "abort": "aborted"}


def from_slime(
    samples: Sequence[Mapping[str, Any]],
    *,
    sampling: SamplingParams,
    policy_version: int | None = None,
    reward_key: str | None = None,
) -> RolloutBatch:
    """The records of samples that were generated and scored.

    slime's log-probs have one entry for each token of the response, the last ``response_length`` of ``tokens``.

    Args:
        samples: tokens, response_length, rollout_log_probs, reward, status, index, group_index; optionally loss_mask,
            remove_sample, rollout_id, weight_versions, rollout_routed_experts, rollout_top_p_token_ids with
            rollout_top_p_token_offsets (in miles rollout_sampling_mask_ids and ..._offsets) and the trainer's
            log_probs. Other keys are ignored.
        sampling: the sampling parameters, which a sample does not have.
        policy_version: version of the weights that sampled; needed if ``weight_versions`` are not numbers. Default:
            the oldest of ``weight_versions``, or 0 without any, as in a synchronous run.
        reward_key: the key to take if a reward is a dict.

    Returns:
        The records. Not validated.

    Raises:
        ValueError: names the sample and the field.
    """
    sequences = []
    for row, sample in enumerate(samples):
        try:
            sequences.append(_sequence(sample, row, sampling, policy_version, reward_key))
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
            reason = f"{problem} is missing" if isinstance(problem, KeyError) else problem
            raise ValueError(f"sample {row} of the list: {reason}") from None
    return RolloutBatch.concatenate(sequences)


def to_slime(batch: RolloutBatch) -> list[dict[str, Any]]:
    """Make one dict for each sequence, with the fields that slime's trainer reads; ``Sample.from_dict`` takes it.

    The response is the tokens from the first sampled one to the last.

    Raises:
        ValueError: old_log_probs lack some of the tokens.
    """
    rollout_log_probs = sampled_log_probs(batch)
    old_log_probs = scored_log_probs(batch, "slime")
    first, end = spans(batch)
    ranges = zip(first.tolist(), end.tolist(), strict=True)
    supports = batch.support_of_rows()
    versions = versions_of(batch)
    samples = []
    for row, (row_first, row_end) in enumerate(ranges):
        sample = _sample(batch, row, row_first, row_end)
        sample |= _support_fields(supports[row], row_first, row_end)
        sample["rollout_log_probs"] = rollout_log_probs[row, row_first:row_end].tolist()
        if old_log_probs is not None:
            sample["log_probs"] = old_log_probs[row, row_first:row_end].tolist()
        sample["weight_versions"] = [str(version) for version in versions[row]]
        samples.append(sample)
    return samples


def _sequence(
    sample: Mapping[str, Any],
    row: int,
    sampling: SamplingParams,
    policy_version: int | None,
    reward_key: str | None,
) -> RolloutBatch:
    """A batch of the one sequence of a sample, the ``row``-th of the list."""
    tokens = tensor_of(sample, "tokens", (None,), integers=True).long()
    length = len(tokens)
    response_length = sample["response_length"]
    if not isinstance(response_length, int) or not 0 <= response_length <= length:
        raise ValueError(f"response_length is {response_length!r}: expected 0 to {length}, the number of tokens")
    prompt_length = length - response_length

    def behind_prompt(name: str, remedy: str = "") -> Tensor:
        """The response's log-probs behind zeros for the prompt, [length]."""
        values = log_probs_of(sample, name, (response_length,), remedy).float()
        return torch.nn.functional.pad(values, (prompt_length, 0))

    rollout_log_probs = torch.zeros(length)
    if response_length:
        rollout_log_probs = behind_prompt("rollout_log_probs", "the engine was not asked for log-probs")
    old_log_probs = None if sample.get("log_probs") is None else behind_prompt("log_probs")

    mask = torch.zeros(length, dtype=torch.bool)
    if not sample.get("remove_sample"):
        # Without a mask, slime trains on every token of the response.
        mask[prompt_length:] = True
        if sample.get("loss_mask") is not None:
            mask[prompt_length:] = flags_of(sample, "loss_mask", (response_length,))
    version = version_of(policy_version, sample.get("weight_versions") or (), row)
    return one_sequence(
        {
            "tokens": tokens,
            "response_mask": mask,
            "rollout_log_probs": rollout_log_probs,
            "policy_versions": torch.full_like(tokens, version, dtype=torch.int32),
            "routed_experts": _experts(sample, length),
            "old_log_probs": old_log_probs,
        },
        sample_id=_index(sample, "index"),
        group_id=_index(sample, "group_index"),
        rollout_id=None if sample.get("rollout_id") is None else _index(sample, "rollout_id"),
        reward=_reward(sample, reward_key),
        finish_reason=_finish_reason(sample),
        sampling=sampling,
        support=_support(sample, length),
    )


def _sample(batch: RolloutBatch, row: int, first: int, end: int) -> dict[str, Any]:
    """The fields of one row for slime but log-probs and kept tokens; its response has columns ``first`` to ``end``."""
    mask = batch.response_mask[row, first:end]
    experts = None if batch.routed_experts is None else batch.routed_experts[row, : max(end - 1, 0)].clone()
    return {
        "index": int(batch.sample_ids[row]),
        "group_index": int(batch.group_ids[row]),
        **({} if batch.rollout_ids is None else {"rollout_id": int(batch.rollout_ids[row])}),
        "tokens": batch.tokens[row, :end].tolist(),
        "response_length": end - first,
        "loss_mask": mask.int().tolist(),
        "reward": float(batch.rewards[row]),
        "status": _STATUS_OF_REASON[FINISH_REASONS[int(batch.finish_reasons[row])]],
        "rollout_routed_experts": experts,
    }


def _support_fields(support: tuple[Tensor, Tensor] | None, first: int, end: int) -> dict[str, Any]:
    """The fields for slime of the tokens that the engine kept for a response, which has columns ``first`` to ``end``.

    ``support``: (ids, counts) of all positions of the row; None: no fields.
    """
    if support is None:
        return {}
    ids, counts = support
    offsets = offsets_of(counts)
    return {
        "rollout_top_p_token_ids": ids[offsets[first] : offsets[end]].clone(),
        "rollout_top_p_token_offsets": (offsets[first : end + 1] - offsets[first]).int(),
    }


def _experts(sample: Mapping[str, Any], length: int) -> Tensor | None:
    """The routed experts, [length, layers, top_k]; None if they are not recorded.

    SGLang has no route for the last token, since no token was sampled after it: it gets no experts.
    """
    experts = experts_of(sample, "rollout_routed_experts", (length - 1,))
    if experts is None:
        return None
    return torch.cat([experts, experts.new_full((1, *experts.shape[1:]), NO_EXPERT)])


def _support(sample: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor] | None:
    """The tokens that SGLang kept, as (ids, counts [length]); None if they are not recorded.

    slime has offsets for the response alone; a position of the prompt gets no ids.
    """
    for name in ("rollout_top_p_token", "rollout_sampling_mask"):
        if sample.get(f"{name}_ids") is not None:
            ids, counts = support_of(sample[f"{name}_ids"], offsets=sample[f"{name}_offsets"])
            response_length = sample["response_length"]
            if len(counts) != response_length:
                raise ValueError(f"{name}_offsets has {len(counts) + 1} numbers: expected {response_length + 1}")
            return ids, torch.nn.functional.pad(counts, (length - response_length, 0))
    return None


def _finish_reason(sample: Mapping[str, Any]) -> str:
    """The record's finish reason for slime's ``status``."""
    status = sample["status"]
    # The status may be a member of slime's enumeration.
    status = getattr(status, "value", status)
    if status not in _REASON_OF_STATUS:
        raise ValueError(f"status is {status!r}: expected one of {', '.join(_REASON_OF_STATUS)}")
    return _REASON_OF_STATUS[status]


def _reward(sample: Mapping[str, Any], key: str | None) -> float:
    """The sample's reward: the number, or that under the ``key`` of a dict of rewards."""
    reward = sample["reward"]
    if isinstance(reward, Mapping):
        if key not in reward:
            raise ValueError(f"reward has {', '.join(map(str, reward))}: pass one of them as reward_key")
        reward = reward[key]
    if reward is None:
        raise ValueError("reward is None: score the responses first")
    return float(reward)


def _index(sample: Mapping[str, Any], name: str) -> int:
    """A field that is an integer of 64 bits; ValueError if it is none."""
    index = sample[name]
    if not isinstance(index, int) or isinstance(index, bool) or abs(index) >= 2**63:
        raise ValueError(f"{name} is {index!r}: expected an integer of 64 bits")
    return index
