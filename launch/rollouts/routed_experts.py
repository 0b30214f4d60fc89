"""The experts that an engine chose for each token: their checks, and their way to the pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.family import experts_of
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import broadcast
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.records.rollout import NO_EXPERT, RolloutBatch

# In place of an expert's number: no sampled token depends on the choice for this token.
NOT_NEEDED = -2


def check_routed_experts(batch: RolloutBatch, config: RunConfig) -> None:
    """Check that a batch's experts fit the model; ValueError names the sample and the token."""
    settings, given = experts_of(config), batch.routed_experts
    if given is None:
        raise ValueError(
            "the rollouts have no routed_experts, which --moe-enable-routing-replay needs: sample them with an engine "
            "that reports them, or use --moe-routing-replay-source old"
        )
    layers, top_k = given.shape[2:]
    all_layers, number = config.transformer.num_layers, settings.num_moe_experts
    with_experts = sum(config.layers_with_experts)
    if layers not in (all_layers, with_experts) or top_k != settings.moe_router_topk:
        raise ValueError(
            f"routed_experts has {layers} layers of {top_k} experts, the model {all_layers} layers, {with_experts} of "
            f"them with {settings.moe_router_topk} experts for each token: record the rollouts with this model"
        )
    chosen = in_layers_with_experts(given, config)
    outside = ((chosen < NO_EXPERT) | (chosen >= number)).any(dim=(2, 3))
    ordered = chosen.sort(dim=-1).values
    twice = ((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any(dim=(2, 3))
    for wrong, words in ((outside, f"outside of 0 to {number - 1}"), (twice, "an expert twice")):
        if wrong.any():
            row, token = wrong.nonzero()[0].tolist()
            place = f"sample {int(batch.sample_ids[row])}, token {token}"
            raise ValueError(f"routed_experts of {place} has {words}: record the rollouts with this model")


def in_layers_with_experts(experts: Tensor, config: RunConfig) -> Tensor:
    """[n, s, layers with experts, top_k] of a table of these layers, or of all layers."""
    if experts.shape[2] != config.transformer.num_layers:
        return experts
    return experts[:, :, torch.tensor(config.layers_with_experts, device=experts.device)]


def without_unused(experts: Tensor, response_mask: Tensor) -> Tensor:
    """The experts, with ``NOT_NEEDED`` from each row's last sampled token on: no sampled token comes after it."""
    is_before = response_mask.flip(1).cumsum(1).flip(1)[:, 1:] > 0
    is_needed = torch.nn.functional.pad(is_before, (0, 1))
    return torch.where(is_needed.view(*is_needed.shape, 1, 1), experts, NOT_NEEDED)


class ExpertsBroadcast:
    """Sends a replica's routed experts from its first rank to all; every rank gets the layers of its own stage."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups = config, groups
        layers = [layer for layer, has_experts in enumerate(config.layers_with_experts) if has_experts]
        stages = range(config.parallel.pipeline_model_parallel_size)
        # For each stage, the places of its layers among the layers with experts.
        self._places = [[layers.index(layer) for layer in config.expert_layers_of_stage(stage)] for stage in stages]

    def __call__(self, batch: RolloutBatch | None, rows: int, length: int) -> Tensor:
        """[rows, length, layers with experts of this stage, top_k] int16; the other ranks give None.

        Collectives: a scatter over PP from the first rank, a broadcast over the TP×CP ranks of each stage.
        """
        groups, most = self.groups, max(map(len, self._places))
        shape = (rows, length, most, experts_of(self.config).moe_router_topk)
        own = torch.zeros(shape, dtype=torch.int16, device=self.config.launch.device)
        if group_rank(groups.tp) == group_rank(groups.cp) == 0:
            own = self._scattered(own, None if batch is None else self._of_stages(batch, most))
        # Neither gloo nor NCCL sends int16.
        sent = broadcast(own.view(torch.uint8), 0, parallel_state.get_tensor_and_context_parallel_group())
        return sent.view(torch.int16)[:, :, : len(self._places[group_rank(groups.pp)])]

    def _of_stages(self, batch: RolloutBatch, most: int) -> Sequence[Tensor]:
        """The experts of each stage's layers, padded to equally many layers."""
        experts = in_layers_with_experts(cast(Tensor, batch.routed_experts), self.config).to(torch.int16)
        experts = without_unused(experts, batch.response_mask).to(self.config.launch.device)
        return [
            torch.nn.functional.pad(experts[:, :, places], (0, 0, 0, most - len(places))).contiguous()
            for places in self._places
        ]

    def _scattered(self, own: Tensor, parts: Sequence[Tensor] | None) -> Tensor:
        """This stage's part; the first stage gives the parts of all."""
        pp = self.groups.pp
        if pp is None or group_size(pp) == 1:
            return own if parts is None else parts[0]
        sent = None if parts is None else [part.view(torch.uint8) for part in parts]
        received = own.view(torch.uint8)
        dist.scatter(received, sent, src=dist.get_global_rank(pp, 0), group=pp)
        return received.view(torch.int16)
