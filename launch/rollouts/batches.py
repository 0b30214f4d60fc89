"""Rollout batches of responses, and the responses of such a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_rc.launch.engines import EngineError, Sample
from megatron_rc.launch.rollouts.turns import Conversation
from megatron_rc.records.rollout import FINISH_REASONS, NO_EXPERT, RolloutBatch, SamplingParams


def batch_of(
    samples: Sequence[Conversation],
    length: int,
    pad: int,
    sampling: SamplingParams,
    *,
    has_experts: bool,
    has_support: bool,
    has_turns: bool = False,
) -> RolloutBatch:
    """The batch of some responses, with the numbers 0, 1, … as sample ids and group ids, and rewards 0.

    Args:
        samples: at least one response. Every turn has its versions.
        length: columns of the batch.
        pad: token id of the padding.
        sampling: parameters that the responses were sampled with.
        has_experts: whether the batch has the experts of each token; EngineError if the engine reported none or others.
        has_support: whether the batch has the kept tokens; EngineError as for experts.
        has_turns: whether the batch has the rewards of earlier turns.
    """
    rows, position = len(samples), torch.arange(length)
    starts = torch.tensor([len(sample.prompt) for sample in samples]).unsqueeze(1)
    ends = starts + torch.tensor([len(sample.token_ids) for sample in samples]).unsqueeze(1)
    used, mask = position < ends, torch.zeros(rows, length, dtype=torch.bool)
    mask[used & (position >= starts)] = torch.tensor([one for sample in samples for one in sample.sampled]).bool()
    tokens = torch.full((rows, length), pad)
    tokens[used] = torch.tensor([token for sample in samples for token in (*sample.prompt, *sample.token_ids)])
    log_probs, versions = torch.zeros(rows, length), torch.zeros(rows, length, dtype=torch.int32)
    log_probs[mask] = torch.tensor([value for sample in samples for value in sample.log_probs])
    versions[mask] = torch.tensor([one for sample in samples for one in sample.versions], dtype=torch.int32)
    return RolloutBatch(
        tokens=tokens,
        response_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=versions,
        sample_ids=torch.arange(rows),
        group_ids=torch.arange(rows),
        rewards=torch.zeros(rows),
        finish_reasons=torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples]),
        sampling=sampling,
        routed_experts=_routed_experts(samples, length) if has_experts else None,
        turn_rewards=_turn_rewards(samples, mask) if has_turns else None,
        **(_support(samples, mask) if has_support else {}),
    )


def samples_of(batch: RolloutBatch) -> list[tuple[list[int], Sample]]:
    """The prompt and the response of each row of a batch of single turns; the inverse of :func:`batch_of`."""
    found = []
    for row, support in enumerate(batch.support_of_rows()):
        mask, tokens = batch.response_mask[row], batch.tokens[row]
        begin, end = int(mask.nonzero()[0]), int(mask.nonzero()[-1]) + 1
        sample = Sample(
            tokens[mask].tolist(),
            batch.rollout_log_probs[row][mask].tolist(),
            FINISH_REASONS[int(batch.finish_reasons[row])],
            routed_experts=None if batch.routed_experts is None else batch.routed_experts[row, : end - 1],
            support=None if support is None else (support[0], support[1][mask]),
            versions=batch.policy_versions[row][mask].tolist(),
        )
        found.append((tokens[:begin].tolist(), sample))
    return found


def _turn_rewards(samples: Sequence[Conversation], mask: Tensor) -> Tensor:
    """[responses, length] float32; ``mask`` has the sampled tokens."""
    rewards = torch.zeros(mask.shape)
    rewards[mask] = torch.tensor([reward for sample in samples for reward in sample.turn_rewards])
    return rewards


def _support(samples: Sequence[Conversation], mask: Tensor) -> dict[str, Tensor]:
    """The batch's fields of the tokens that the engine kept; ``mask`` has the sampled tokens."""
    for sample in samples:
        given = None if sample.support is None else len(sample.support[1])
        if given != len(sample.log_probs) and sample.token_ids:
            raise EngineError(
                f"the engine reported the kept tokens of {given} of {len(sample.log_probs)} sampled tokens: "
                "--rollout-top-p, --rollout-top-k and --rollout-min-p need all of them"
            )
    none = torch.zeros(0, dtype=torch.int32)
    supports = [(none, none) if sample.support is None else sample.support for sample in samples]
    ids, sizes = (torch.cat(parts) for parts in zip(*supports, strict=True))
    counts = torch.zeros(mask.shape, dtype=torch.int32)
    counts[mask] = sizes
    return {"support_ids": ids, "support_counts": counts}


def _routed_experts(samples: Sequence[Conversation], length: int) -> Tensor:
    """[responses, length, layers, top_k] int16 experts of each token, −1 if they are not known."""
    of_each = [sample.routed_experts for sample in samples]
    known = [experts for experts in of_each if experts is not None]
    if not known:
        raise EngineError("the engine reported the experts of no response: --moe-enable-routing-replay needs them")
    experts = torch.full((len(samples), length, *known[0].shape[1:]), NO_EXPERT, dtype=torch.int16)
    for row, sample, given in zip(experts, samples, of_each, strict=True):
        if not sample.token_ids:
            continue
        tokens = len(sample.prompt) + len(sample.token_ids) - 1
        if given is None or given.shape != (tokens, *row.shape[1:]):
            found = "none" if given is None else list(given.shape)
            raise EngineError(
                f"a response of {len(sample.token_ids)} tokens to {len(sample.prompt)} has experts of shape "
                f"{found}, expected {[tokens, *row.shape[1:]]}: one row for each token but the last"
            )
        row[:tokens] = given
    return experts
