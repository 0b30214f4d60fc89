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
    rows = len(samples)
    shape = (rows, length)
    position = torch.arange(length)
    starts = torch.tensor([len(sample.prompt) for sample in samples]).unsqueeze(1)
    ends = starts + torch.tensor([len(sample.token_ids) for sample in samples]).unsqueeze(1)
    is_used = position < ends

    # Tensors [rows, length] are filled at the places of a mask, row after row.
    tokens = torch.full(shape, pad)
    tokens[is_used] = torch.tensor([token for sample in samples for token in (*sample.prompt, *sample.token_ids)])
    mask = torch.zeros(shape, dtype=torch.bool)
    is_sampled = [is_sampled for sample in samples for is_sampled in sample.sampled]
    mask[is_used & (position >= starts)] = torch.tensor(is_sampled).bool()
    # Dtypes are named: this may run on a thread while transformers changes torch's default for all threads.
    log_probs = torch.zeros(shape, dtype=torch.float32)
    log_prob_of_each = [log_prob for sample in samples for log_prob in sample.log_probs]
    log_probs[mask] = torch.tensor(log_prob_of_each, dtype=torch.float32)
    versions = torch.zeros(shape, dtype=torch.int32)
    version_of_each = [version for sample in samples for version in sample.versions]
    versions[mask] = torch.tensor(version_of_each, dtype=torch.int32)
    support_ids = None
    support_counts = None
    if has_support:
        support_ids, support_counts = _support(samples, mask)
    return RolloutBatch(
        tokens=tokens,
        response_mask=mask,
        rollout_log_probs=log_probs,
        policy_versions=versions,
        sample_ids=torch.arange(rows),
        group_ids=torch.arange(rows),
        rewards=torch.zeros(rows, dtype=torch.float32),
        finish_reasons=torch.tensor([FINISH_REASONS.index(sample.finish_reason) for sample in samples]),
        sampling=sampling,
        routed_experts=_routed_experts(samples, length) if has_experts else None,
        turn_rewards=_turn_rewards(samples, mask) if has_turns else None,
        support_ids=support_ids,
        support_counts=support_counts,
    )


def samples_of(batch: RolloutBatch) -> list[tuple[list[int], Sample]]:
    """The prompt and the response of each row of a batch of single turns; the inverse of :func:`batch_of`."""
    prompts_and_samples = []
    for row, support in enumerate(batch.support_of_rows()):
        mask = batch.response_mask[row]
        tokens = batch.tokens[row]
        places = mask.nonzero()
        begin = int(places[0])
        end = int(places[-1]) + 1
        sample = Sample(
            tokens[mask].tolist(),
            batch.rollout_log_probs[row][mask].tolist(),
            FINISH_REASONS[int(batch.finish_reasons[row])],
            routed_experts=None if batch.routed_experts is None else batch.routed_experts[row, : end - 1],
            support=None if support is None else (support[0], support[1][mask]),
            versions=batch.policy_versions[row][mask].tolist(),
        )
        prompts_and_samples.append((tokens[:begin].tolist(), sample))
    return prompts_and_samples


def _turn_rewards(samples: Sequence[Conversation], mask: Tensor) -> Tensor:
    """[responses, length] float32; ``mask`` has the sampled tokens."""
    rewards = torch.zeros(mask.shape, dtype=torch.float32)
    reward_of_each = [reward for sample in samples for reward in sample.turn_rewards]
    rewards[mask] = torch.tensor(reward_of_each, dtype=torch.float32)
    return rewards


def _support(samples: Sequence[Conversation], mask: Tensor) -> tuple[Tensor, Tensor]:
    """``support_ids`` and ``support_counts`` of the batch; ``mask`` has the sampled tokens."""
    nothing = torch.zeros(0, dtype=torch.int32)
    ids = [nothing]
    sizes = [nothing]
    for sample in samples:
        support = sample.support
        num_positions = None if support is None else len(support[1])
        if num_positions != len(sample.log_probs) and sample.token_ids:
            raise EngineError(
                f"the engine reported the kept tokens of {num_positions} of {len(sample.log_probs)} sampled tokens: "
                "--rollout-top-p, --rollout-top-k and --rollout-min-p need all of them"
            )
        if support is not None:
            ids.append(support[0])
            sizes.append(support[1])
    counts = torch.zeros(mask.shape, dtype=torch.int32)
    counts[mask] = torch.cat(sizes)
    return torch.cat(ids), counts


def _routed_experts(samples: Sequence[Conversation], length: int) -> Tensor:
    """[responses, length, layers, top_k] int16 experts of each token, −1 if they are not known."""
    reported = [sample.routed_experts for sample in samples]
    shapes = [experts.shape[1:] for experts in reported if experts is not None]
    if not shapes:
        raise EngineError("the engine reported the experts of no response: --moe-enable-routing-replay needs them")
    table = torch.full((len(samples), length, *shapes[0]), NO_EXPERT, dtype=torch.int16)
    for row, sample, experts in zip(table, samples, reported, strict=True):
        if not sample.token_ids:
            continue
        num_read = len(sample.prompt) + len(sample.token_ids) - 1
        if experts is None or experts.shape != (num_read, *shapes[0]):
            shape = "none" if experts is None else list(experts.shape)
            raise EngineError(
                f"a response of {len(sample.token_ids)} tokens to {len(sample.prompt)} has experts of shape "
                f"{shape}, expected {[num_read, *shapes[0]]}: one row for each token but the last"
            )
        row[:num_read] = experts
    return table
