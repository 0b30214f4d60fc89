"""Routing replay: the policy's routers take the experts that another pass chose for each token.

R3 (``--moe-routing-replay-source rollout``) replays the engine's experts in every pass of the policy, R2 (``old``)
those of the forward-only pass in the optimizer steps: Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by
Aligning Training and Inference Routers", arXiv 2510.11370. Gradients flow through the router's scores of the replayed
experts.

Megatron's router asks its ``router_replay`` for the experts. The objects here stand in that place, on the routers of
one model alone: Megatron's own are in one list of the process, which a second model and layers for further tokens
share, and have no choice for a token whose experts are not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import Cut, LocalBatch
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.records.rollout import NO_EXPERT

# Numbers that a router counts: replayed choices, replayed choices that it would not make now, choices not known.
_COUNTS = 3


class ReplayedRouter:
    """The ``router_replay`` of one router, in place of Megatron's ``RouterReplay``.

    Attributes:
        layer: number of its layer in the whole model, from 0.
        experts: [rows, top_k] experts of the micro-batch that is run; None: the router chooses.
        is_running: whether a micro-batch runs forward; else a call computes activations again for the backward pass.
        keeps: whether the router's choices are kept in ``chosen``.
        chosen: [rows, top_k] int16 of each micro-batch of the pass, in order.
        counts: [3] int64, see ``_COUNTS``; of training passes.
    """

    def __init__(self, layer: int, device: torch.device) -> None:
        self.layer = layer
        self.counts = torch.zeros(_COUNTS, dtype=torch.int64, device=device)
        self.begin_pass()

    def begin_pass(self, *, keeps: bool = False, trains: bool = False) -> None:
        """Forget the pass before."""
        self.experts: Tensor | None = None
        self.is_running = False
        self.keeps = keeps
        self._trains = trains
        self.chosen: list[Tensor] = []
        self._to_run_again: list[Tensor] = []

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """(scores, experts) of each token, [rows, topk], from scores [rows, experts]; Megatron's router calls this.

        Tokens whose experts are not known get the router's own choice.
        """
        if default_compute_topk is None:
            raise RuntimeError("Megatron's router gave no function for its own choice")
        values, chosen = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.keeps:
            self.chosen.append(chosen.to(torch.int16))
        replayed = self._experts_of_call()
        if replayed is None:
            return values, chosen
        replayed = replayed.long()
        is_known = (replayed >= 0).all(dim=1, keepdim=True)
        if self._trains and self.is_running:
            self._count(replayed, is_known, chosen)
        experts = torch.where(is_known, replayed, chosen)
        return scores.gather(1, experts), experts

    def _experts_of_call(self) -> Tensor | None:
        """The experts of the micro-batch; backward passes come in the order of the forward passes."""
        if not self.is_running:
            return self._to_run_again.pop(0) if self._to_run_again else None
        if self._trains and self.experts is not None:
            self._to_run_again.append(self.experts)
        return self.experts

    def _count(self, replayed: Tensor, is_known: Tensor, chosen: Tensor) -> None:
        differ = (replayed.unsqueeze(2) != chosen.unsqueeze(1)).all(dim=2) & is_known
        counts = torch.stack([is_known.sum(), differ.sum(), (replayed == NO_EXPERT).any(dim=1).sum()])
        self.counts += counts * counts.new_tensor([replayed.shape[1], 1, replayed.shape[1]])


class RoutingReplay:
    """Routing replay in the policy on this rank."""

    def __init__(self, config: RunConfig, groups: ParallelGroups, chunks: Sequence[ModelChunk]) -> None:
        self.config = config
        self.groups = groups
        self._of_chunk = {id(chunk): _put_into(chunk) for chunk in chunks}
        self._own = [router for routers in self._of_chunk.values() for router in routers]
        self._place = {router.layer: place for place, router in enumerate(self._own)}
        self._recorded: list[tuple[Cut, Tensor]] = []

    @contextmanager
    def in_pass(
        self, batch: LocalBatch, cuts: Sequence[Cut], *, forward_only: bool
    ) -> Iterator[Sequence[Tensor | None]]:
        """Context of one pass over some micro-batches; gives the experts of each, for :meth:`in_forward`.

        With ``--moe-routing-replay-source old`` a forward-only pass keeps the routers' choices, and a training pass
        replays them.
        """
        records = forward_only and not self.config.replays_rollouts
        for router in self._own:
            router.begin_pass(keeps=records, trains=not forward_only)
        try:
            if records:
                yield [None] * len(cuts)
                self._recorded = [(cut, self._kept(number)) for number, cut in enumerate(cuts)] if self._own else []
            else:
                yield [self._experts_of(batch, cut) for cut in cuts]
        finally:
            # In passes without replay the routers choose.
            for router in self._own:
                router.begin_pass()

    @contextmanager
    def in_forward(self, chunk: ModelChunk, experts: Tensor | None) -> Iterator[None]:
        """Context of a chunk's forward pass of one micro-batch; ``experts``: [rows, layers of this rank, top_k]."""
        routers = self._of_chunk[id(chunk)]
        for router in routers:
            router.experts = None if experts is None else experts[:, self._place[router.layer]]
            router.is_running = True
        yield
        for router in routers:
            router.experts = None
            router.is_running = False

    def metrics(self) -> dict[str, float]:
        """Metrics of the training passes since the last call, equal on all ranks. Collectives: one SUM over all ranks.

        ``routing/differing``: share of the replayed choices that the router would not make now, of all layers and of
        each; ``routing/unknown``: share of the tokens, over all layers, whose experts are not known.
        """
        layers = [layer for layer, has_experts in enumerate(self.config.layers_with_experts) if has_experts]
        device = self._own[0].counts.device if self._own else self.config.launch.device
        counts = torch.zeros(len(layers), _COUNTS, dtype=torch.int64, device=device)
        for router in self._own:
            counts[layers.index(router.layer)] = router.counts
            router.counts.zero_()
        numbers: list[list[int]] = all_reduce_sum(counts, dist.group.WORLD).tolist()
        replayed, differing, unknown = (sum(column) for column in zip(*numbers, strict=True))
        shares = {
            "routing/differing": differing / max(replayed, 1),
            "routing/unknown": unknown / max(replayed + unknown, 1),
        }
        for layer, (known_here, differing_here, _) in zip(layers, numbers, strict=True):
            shares[f"routing/differing_layer_{layer}"] = differing_here / max(known_here, 1)
        return shares

    def _kept(self, number: int) -> Tensor:
        """[rows, layers of this rank, top_k] int16, the choices of all routers for a micro-batch of the pass."""
        return torch.stack([router.chosen[number] for router in self._own], dim=1)

    def _experts_of(self, batch: LocalBatch, cut: Cut) -> Tensor | None:
        """[rows, layers of this rank, top_k], the experts to replay for a micro-batch; None if no router is here."""
        if not self._own:
            return None
        if not self.config.replays_rollouts:
            return next(experts for recorded, experts in self._recorded if recorded is cut)
        experts = batch.local.routed_experts
        if experts is None:
            raise ValueError(
                "--moe-enable-routing-replay: the rollouts have no routed_experts; record them, or replay the "
                "forward-only pass with --moe-routing-replay-source old"
            )
        return self._rows(experts[cut.tokens])

    def _rows(self, experts: Tensor) -> Tensor:
        """[rows, layers, top_k] of a micro-batch's tokens, in the order of a router's rows on this rank."""
        by_position = (experts if experts.dim() == 4 else experts.unsqueeze(0)).transpose(0, 1)
        if self.config.parallel.sequence_parallel:
            by_position = by_position.chunk(group_size(self.groups.tp))[group_rank(self.groups.tp)]
        return by_position.flatten(0, 1)


def _put_into(chunk: ModelChunk) -> list[ReplayedRouter]:
    """Put an object into each router of a chunk's decoder, not of its layers for further tokens; return the objects."""
    routers = []
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router.router_replay = ReplayedRouter(layer.layer_number - 1, router.weight.device)
            routers.append(router.router_replay)
    return routers
