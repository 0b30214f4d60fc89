"""The experts that an engine chose for each token: their checks, and their way to the pipeline stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from numpy.typing import NDArray
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.weights.family import experts_of
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import broadcast
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.records.rollout import NO_EXPERT, RolloutBatch

# In place of an expert's number: no sampled token depends on the choice for this token.
NOT_NEEDED = -2
# Choices of one token in one layer that are checked at once; they stay in a processor's cache.
_CHOICES_AT_ONCE = 32768


def check_routed_experts(batch: RolloutBatch, config: RunConfig) -> None:
    """Check that a batch's experts fit the model; ValueError names the sample, the token, the layer and the number.

    Tokens from a row's last sampled one on are not looked at: no sampled token depends on their experts. A few
    megabytes of memory are used beside the table.
    """
    if batch.routed_experts is None:
        raise ValueError(
            "the rollouts have no routed_experts, which --moe-enable-routing-replay needs: sample them with an engine "
            "that reports them, or use --moe-routing-replay-source old"
        )
    table = batch.routed_experts
    _check_shape(table, config)

    num_experts = experts_of(config).num_moe_experts
    layers_with_experts = [layer for layer, has_experts in enumerate(config.layers_with_experts) if has_experts]
    columns = columns_with_experts(table, config)
    tokens_at_once = max(1, _CHOICES_AT_ONCE // len(columns))
    for row, length in enumerate(needed_lengths(batch.response_mask).tolist()):
        for begin in range(0, length, tokens_at_once):
            part = table[row, begin : min(begin + tokens_at_once, length)]
            if len(columns) < table.shape[2]:
                part = part[:, columns]
            fault = _first_fault(part.numpy(), num_experts)
            if fault is not None:
                sample = int(batch.sample_ids[row])
                layer = layers_with_experts[fault.layer]
                raise ValueError(
                    f"routed_experts of sample {sample}, token {begin + fault.token}, layer {layer} has "
                    f"{fault.description}: replay rollouts of this model, and write -1 where the experts are not known"
                )


def _check_shape(table: Tensor, config: RunConfig) -> None:
    """Check that a table [n, s, layers, top_k] has the model's layers and number of experts for each token."""
    layers, top_k = table.shape[2:]
    model_layers = config.transformer.num_layers
    model_layers_with_experts = sum(config.layers_with_experts)
    model_top_k = experts_of(config).moe_router_topk
    if layers not in (model_layers, model_layers_with_experts) or top_k != model_top_k:
        raise ValueError(
            f"routed_experts has {layers} layers with {top_k} choices for each token, the model {model_layers} layers, "
            f"{model_layers_with_experts} of them with experts and {model_top_k} choices for each token: record the "
            "rollouts with this model"
        )


class _Fault(NamedTuple):
    """The first wrong choice of a part of a table."""

    token: int  # place in the part
    layer: int  # the same, among the layers with experts
    description: str


def _first_fault(choices: NDArray[np.integer[Any]], num_experts: int) -> _Fault | None:
    """Return the first choice of [tokens, layers, top_k] with a number that is no expert's, or with an expert twice.

    NumPy compares whole columns of int16 by vector instructions: this takes a tenth of the time of torch's sort.
    """
    lowest = choices.min()
    if lowest < NO_EXPERT or choices.max() >= num_experts:
        token, layer, slot = np.argwhere((choices < NO_EXPERT) | (choices >= num_experts))[0]
        wrong = choices[token, layer, slot]
        return _Fault(int(token), int(layer), f"expert {wrong}, expected 0 to {num_experts - 1}, or -1 if unknown")

    top_k = choices.shape[2]
    slots = np.ascontiguousarray(choices.reshape(-1, top_k).T, dtype=np.int16)
    if lowest < 0:
        # Unknown experts get another number in each slot, so that no two of them are equal.
        for slot, experts in enumerate(slots):
            np.copyto(experts, NO_EXPERT - slot, where=experts < 0)
    is_twice = np.zeros(slots.shape[1], dtype=bool)
    for first_slot, second_slot in combinations(slots, 2):
        is_twice |= first_slot == second_slot
    if not is_twice.any():
        return None

    token, layer = divmod(int(is_twice.argmax()), choices.shape[1])
    experts_of_token = choices[token, layer].tolist()
    repeated = next(expert for expert in experts_of_token if expert >= 0 and experts_of_token.count(expert) > 1)
    return _Fault(token, layer, f"expert {repeated} twice")


def columns_with_experts(experts: Tensor, config: RunConfig) -> list[int]:
    """Places of the layers with experts in a table of these layers, or of all layers: [n, s, layers, top_k]."""
    layers = experts.shape[2]
    if layers != config.transformer.num_layers:
        return list(range(layers))
    return [layer for layer, has_experts in enumerate(config.layers_with_experts) if has_experts]


def needed_lengths(response_mask: Tensor) -> Tensor:
    """Return how many tokens stand before each row's last sampled one, [n] int64: the training needs their experts.

    The experts that read the last sampled token would predict the token behind it. A row without a sampled token needs
    none.
    """
    positions = torch.arange(response_mask.shape[1], device=response_mask.device)
    return torch.where(response_mask, positions, 0).amax(dim=1)


class ExpertsBroadcast:
    """Sends a replica's routed experts from its first rank to all; every rank gets the layers of its own stage."""

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config = config
        self.groups = groups
        layers = [layer for layer, has_experts in enumerate(config.layers_with_experts) if has_experts]
        stages = range(config.parallel.pipeline_model_parallel_size)
        # For each stage, the places of its layers among the layers with experts.
        self._places = [[layers.index(layer) for layer in config.expert_layers_of_stage(stage)] for stage in stages]

    def __call__(self, batch: RolloutBatch | None, rows: int, length: int) -> Tensor:
        """[rows, length, layers with experts of this stage, top_k] int16; the other ranks give None.

        Collectives: a scatter over PP from the first rank, a broadcast over the TP×CP ranks of each stage.
        """
        groups = self.groups
        most_layers = max(map(len, self._places))
        shape = (rows, length, most_layers, experts_of(self.config).moe_router_topk)
        of_stage = torch.zeros(shape, dtype=torch.int16, device=self.config.launch.device)
        if group_rank(groups.tp) == group_rank(groups.cp) == 0:
            parts = None if batch is None else self._of_stages(batch, most_layers)
            of_stage = self._scattered(of_stage, parts)
        # Neither gloo nor NCCL sends int16.
        sent = broadcast(of_stage.view(torch.uint8), 0, parallel_state.get_tensor_and_context_parallel_group())
        return sent.view(torch.int16)[:, :, : len(self._places[group_rank(groups.pp)])]

    def _of_stages(self, batch: RolloutBatch, most: int) -> Sequence[Tensor]:
        """The experts of each stage's layers, with ``NOT_NEEDED`` from each row's last sampled token on.

        All stages get as many layers as the stage with most; the further ones of a stage hold zeros, and are not read.
        """
        experts = cast(Tensor, batch.routed_experts)
        columns = columns_with_experts(experts, self.config)
        positions = torch.arange(experts.shape[1], device=experts.device)
        is_not_needed = positions >= needed_lengths(batch.response_mask).to(experts.device).unsqueeze(1)

        parts = []
        for places in self._places:
            of_stage = experts.new_zeros((*experts.shape[:2], most, experts.shape[3]), dtype=torch.int16)
            for layer, number in enumerate(places):
                of_stage[:, :, layer] = experts[:, :, columns[number]]
            of_stage[is_not_needed] = NOT_NEEDED
            parts.append(of_stage.to(self.config.launch.device))
        return parts

    def _scattered(self, buffer: Tensor, parts: Sequence[Tensor] | None) -> Tensor:
        """This stage's part, which may lie in ``buffer``; the first stage gives the parts of all."""
        pp = self.groups.pp
        if pp is None or group_size(pp) == 1:
            return buffer if parts is None else parts[0]
        sent = None if parts is None else [part.view(torch.uint8) for part in parts]
        received = buffer.view(torch.uint8)
        dist.scatter(received, sent, src=dist.get_global_rank(pp, 0), group=pp)
        return received.view(torch.int16)
