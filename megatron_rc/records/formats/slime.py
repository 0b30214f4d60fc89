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

_STATUS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "abort"}
_OWN_STATUS = {"stop": "completed", "length": "truncated", "abort": "aborted"}


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
            words = f"{problem} is missing" if isinstance(problem, KeyError) else problem
            raise ValueError(f"sample {row} of the list: {words}") from None
    return RolloutBatch.concatenate(sequences)


def to_slime(batch: RolloutBatch) -> list[dict[str, Any]]:
    """One dict a sequence, with the fields that slime's trainer reads; ``Sample.from_dict`` takes it.

    The response is the tokens from the first sampled one to the last.

    Raises:
        ValueError: old_log_probs lack some of the tokens.
    """
    columns = {"rollout_log_probs": sampled_log_probs(batch), "log_probs": scored_log_probs(batch, "slime")}
    known = {name: values for name, values in columns.items() if values is not None}
    first, end = (values.tolist() for values in spans(batch))
    supports = batch.support_of_rows()
    return [
        {
            **_sample(batch, row, first[row], end[row]),
            **_own_support(supports[row], first[row], end[row]),
            **{name: values[row, first[row] : end[row]].tolist() for name, values in known.items()},
            "weight_versions": [str(version) for version in versions],
        }
        for row, versions in enumerate(versions_of(batch))
    ]


def _sequence(
    sample: Mapping[str, Any],
    row: int,
    sampling: SamplingParams,
    policy_version: int | None,
    reward_key: str | None,
) -> RolloutBatch:
    tokens = tensor_of(sample, "tokens", (None,), integers=True).long()
    length, response = len(tokens), sample["response_length"]
    if not isinstance(response, int) or not 0 <= response <= length:
        raise ValueError(f"response_length is {response!r}: expected 0 to {length}, the number of tokens")

    def placed(name: str, remedy: str = "") -> Tensor:
        """[length]: the response's log-probs behind zeros for the prompt."""
        values = log_probs_of(sample, name, (response,), remedy).float()
        return torch.nn.functional.pad(values, (length - response, 0))

    log_probs = (
        placed("rollout_log_probs", "the engine was not asked for log-probs") if response else torch.zeros(length)
    )
    old = None if sample.get("log_probs") is None else placed("log_probs")
    mask = torch.zeros(length, dtype=torch.bool)
    if not sample.get("remove_sample"):
        # Without a mask, slime trains on every token of the response.
        given = sample.get("loss_mask") is not None
        mask[length - response :] = flags_of(sample, "loss_mask", (response,)) if given else True
    version = version_of(policy_version, sample.get("weight_versions") or (), row)
    return one_sequence(
        {
            "tokens": tokens,
            "response_mask": mask,
            "rollout_log_probs": log_probs,
            "policy_versions": torch.full_like(tokens, version, dtype=torch.int32),
            "routed_experts": _experts(sample, length),
            "old_log_probs": old,
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
        "status": _OWN_STATUS[FINISH_REASONS[int(batch.finish_reasons[row])]],
        "rollout_routed_experts": experts,
    }


def _own_support(support: tuple[Tensor, Tensor] | None, first: int, end: int) -> dict[str, Any]:
    """The fields of the kept tokens of one response, in columns ``first`` to ``end``."""
    if support is None:
        return {}
    ids, counts = support
    offsets = offsets_of(counts)
    return {
        "rollout_top_p_token_ids": ids[offsets[first] : offsets[end]].clone(),
        "rollout_top_p_token_offsets": (offsets[first : end + 1] - offsets[first]).int(),
    }


def _experts(sample: Mapping[str, Any], length: int) -> Tensor | None:
    """[length, layers, top_k]: SGLang has no route for the last token, after which no token follows."""
    experts = experts_of(sample, "rollout_routed_experts", (length - 1,))
    if experts is None:
        return None
    return torch.cat([experts, experts.new_full((1, *experts.shape[1:]), NO_EXPERT)])


def _support(sample: Mapping[str, Any], length: int) -> tuple[Tensor, Tensor] | None:
    """(ids, counts [length]) of the tokens that SGLang kept; slime has offsets for the response alone."""
    for name in ("rollout_top_p_token", "rollout_sampling_mask"):
        if sample.get(f"{name}_ids") is not None:
            ids, counts = support_of(sample[f"{name}_ids"], offsets=sample[f"{name}_offsets"])
            response = sample["response_length"]
            if len(counts) != response:
                raise ValueError(f"{name}_offsets has {len(counts) + 1} numbers: expected {response + 1}")
            return ids, torch.nn.functional.pad(counts, (length - response, 0))
    return None


def _finish_reason(sample: Mapping[str, Any]) -> str:
    status = sample["status"]
    status = getattr(status, "value", status)
    if status not in _STATUS:
        raise ValueError(f"status is {status!r}: expected one of {', '.join(_STATUS)}")
    return _STATUS[status]


def _reward(sample: Mapping[str, Any], key: str | None) -> float:
    reward = sample["reward"]
    if isinstance(reward, Mapping):
        if key not in reward:
            raise ValueError(f"reward has {', '.join(map(str, reward))}: pass one of them as reward_key")
        reward = reward[key]
    if reward is None:
        raise ValueError("reward is None: score the responses first")
    return float(reward)


def _index(sample: Mapping[str, Any], name: str) -> int:
    index = sample[name]
    if not isinstance(index, int) or isinstance(index, bool) or abs(index) >= 2**63:
        raise ValueError(f"{name} is {index!r}: expected an integer of 64 bits")
    return index
