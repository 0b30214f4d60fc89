"""slime: its built-in truncation and IcePop, beside the adaptor's on whole responses and on context-parallel chunks."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.adaptors.check.comparison import ROWS, Batch, Comparison
from megatron_rc.adaptors.check.shards import RANKS, joined, on_ranks
from megatron_rc.adaptors.slime import Chunks, SlimeCorrection
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.settings.config import RolloutCorrectionConfig

NEEDS = "slime.backends.megatron_utils.loss"
# The function's name in slime, slime's arguments, and the same settings here.
SETTINGS: dict[str, tuple[str, dict[str, float], dict[str, Any]]] = {
    "truncated weights": (
        "vanilla_tis_function",
        {"tis_clip": 1.5, "tis_clip_low": 0.0},
        {"rollout_is_threshold": 1.5},
    ),
    "IcePop": (
        "icepop_function",
        {"tis_clip": 1.5, "tis_clip_low": 0.6},
        {"rollout_is_threshold": "0.6_1.5", "rollout_is_mode": "mask"},
    ),
}


def comparisons(seed: int) -> Iterator[Comparison]:
    """All comparisons on the batch of a seed."""
    from slime.backends.megatron_utils import loss as theirs

    call = _call(Batch.random(seed))
    trained = torch.cat(call["loss_masks"]) != 0
    shards = on_ranks(losses_of_chunks, seed)[0]
    for name, (function, args, fields) in SETTINGS.items():
        their_loss, masks, _ = getattr(theirs, function)(Namespace(use_tis=True, **args), **call)
        # Losses of tokens that are not trained do not count.
        their_loss = torch.where(trained, their_loss, 0)
        our_loss, accepted, _ = _ours(fields, None, call)
        yield Comparison.of(f"{name}, loss, whole responses", our_loss, their_loss)
        yield Comparison.of(f"{name}, masks, whole responses", torch.cat(accepted), torch.cat(masks), 0)
        yield Comparison.of(f"{name}, loss, {RANKS} context ranks", torch.tensor(shards[name]), their_loss)


def _call(batch: Batch) -> dict[str, Any]:
    """Arguments of slime for whole responses, each behind a prompt of one to five tokens."""
    lengths = batch.mask.sum(1).tolist()
    rows = range(ROWS)

    def cut(values: Tensor) -> list[Tensor]:
        return [values[row, : lengths[row]] for row in rows]

    ratio = (batch.new - batch.old).exp()
    # A hole in every other response.
    masks = [torch.ones(length) for length in lengths]
    for mask in masks[::2]:
        mask[len(mask) // 2] = 0
    return {
        "pg_loss": torch.cat(cut(-batch.advantages * ratio)),
        "train_log_probs": cut(batch.old),
        "rollout_log_probs": cut(batch.rollout),
        "loss_masks": masks,
        "total_lengths": [length + 1 + row % 5 for row, length in enumerate(lengths)],
        "response_lengths": lengths,
    }


def _ours(fields: Mapping[str, Any], cp: Any, call: Mapping[str, Any]) -> tuple[Tensor, list[Tensor], Any]:
    correct = SlimeCorrection(RolloutCorrectionConfig(rollout_is="token", **fields), ParallelGroups(cp=cp, dp_cp=cp))
    return correct(Namespace(use_tis=True), **call)


def losses_of_chunks(seed: int) -> dict[str, list[float]]:
    """The losses of all responses' tokens, from the chunks of all ranks, for each setting."""
    group = dist.group.WORLD
    call = _call(Batch.random(seed))
    chunks = Chunks(call["total_lengths"], call["response_lengths"], group)

    def cut(values: Sequence[Tensor]) -> list[Tensor]:
        return list(chunks.select_local("values", values).split(chunks.counts))

    places = torch.cat(cut(torch.arange(len(call["pg_loss"])).split(call["response_lengths"])))
    local = call | {name: cut(call[name]) for name in ("train_log_probs", "rollout_log_probs")}
    local["pg_loss"] = call["pg_loss"][places]
    number = len(call["pg_loss"])
    return {name: joined(places, _ours(fields, group, local)[0], number) for name, (_, _, fields) in SETTINGS.items()}
