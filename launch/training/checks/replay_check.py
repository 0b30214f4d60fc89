"""Check that replayed experts belong to the rollouts: with them the trainer must not be further from the engine.

Experts that are shifted by a token, of another sample, or in another order of layers are numbers like any other. But
with the right ones the trainer's log-probs come closer to the engine's than with the routers' own choice, and with
wrong ones they move away. So both are computed on the first rollout batch of a run, and on every batch of
``--load-rollouts``, each of which has files of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.launch.distributed import agree
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalTokens
from megatron_rc.numerics import k3
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_size

FEWEST_TOKENS = 1024  # fewer tokens give no verdict
_LARGEST_INCREASE = 0.1  # share by which replay may make k3 larger
_STANDARD_ERRORS = 3.0  # an increase by fewer standard errors may be chance
# Most nats of a token in the second comparison. In the first one, a few tokens with a huge k3 can hide all others: they
# make the standard error as large as the mean.
_LARGEST_K3 = 10.0
_MOST_UNKNOWN = 0.05  # share of tokens without known experts that is not worth a line


class Distances(NamedTuple):
    """Sums over tokens of k3 between engine and trainer, with replayed experts and with the routers' own choice."""

    tokens: float = 0.0
    with_replay: float = 0.0  # nats
    without_replay: float = 0.0  # nats
    squared_differences: float = 0.0  # of the two k3 of each token, nats²

    def plus(self, other: Distances) -> Distances:
        """Sums over the tokens of both."""
        return Distances(*map(sum, zip(self, other, strict=True)))

    @property
    def means(self) -> tuple[float, float]:
        """k3 with replay and without, nats a token; 0 without tokens."""
        tokens = max(self.tokens, 1.0)
        return self.with_replay / tokens, self.without_replay / tokens

    @property
    def is_worse_with_replay(self) -> bool:
        """Whether replay makes k3 larger by more than a tenth, and by more than three standard errors.

        The standard error is that of the mean of the tokens' differences, since both k3 are of the same tokens.
        """
        if self.tokens < FEWEST_TOKENS:
            return False
        with_replay, without_replay = self.means
        increase = with_replay - without_replay
        variance = max(self.squared_differences / self.tokens - increase**2, 0.0)
        standard_error = math.sqrt(variance / (self.tokens - 1))
        return increase > _LARGEST_INCREASE * without_replay and increase > _STANDARD_ERRORS * standard_error


class ReplayCheck:
    """Comparison of both choices of experts on rollout batches, in a run that replays the engine's experts.

    A verdict needs ``FEWEST_TOKENS`` tokens: smaller batches are added up until they have them.

    Attributes:
        lines: what the run should say, in order; the caller takes them out.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config, self.groups = config, groups
        self.lines: list[str] = []
        self._not_judged = (Distances(), Distances())
        self._is_first = self._awaits_verdict = True
        self._has_said_unknown = False

    def is_due(self, iteration: int) -> bool:
        """Whether the rollout batch that starts after so many optimizer steps has to be measured."""
        routing = self.config.routing
        interval = None if routing is None else routing.moe_routing_replay_check_interval
        batch = iteration // self.config.updates_per_rollout
        return self._is_judged or (interval is not None and batch % interval == 0)

    @property
    def _is_judged(self) -> bool:
        """Whether the next batch takes part in a verdict."""
        return self._awaits_verdict or self.config.rollouts.load_rollouts is not None

    def measure(
        self, iteration: int, local: LocalTokens, replayed: Tensor | None, unreplayed: Tensor | None
    ) -> dict[str, float]:
        """Return ``routing/k3`` and ``routing/k3_without`` of a batch, equal on all ranks; judge them if that is due.

        Args:
            iteration: number of optimizer steps before the batch.
            local: this rank's tokens.
            replayed: log-probs of their labels with the replayed experts; None before the last pipeline stage.
            unreplayed: the same with the routers' own choice.

        Collectives: one SUM over DP×CP and one broadcast over PP of eight numbers; with a verdict those of
        :func:`agree`.

        Raises:
            AgreedError: on every rank, if the replayed experts cannot be those of the rollouts.
        """
        plain, bounded = self._over_all_ranks(local, replayed, unreplayed)
        if self._is_judged:
            self._judge(iteration, plain, bounded)
        with_replay, without_replay = plain.means
        return {"routing/k3": with_replay, "routing/k3_without": without_replay}

    def hear_unknown(self, share: float) -> None:
        """Add a line, once, if this share of the tokens of a step has no known experts; see ``routing/unknown``."""
        if share > _MOST_UNKNOWN and not self._has_said_unknown:
            self._has_said_unknown = True
            self.lines.append(
                f"routing replay: {share:.1%} of the tokens have no known experts in the rollouts, so that the routers "
                "choose for them (routing/unknown)"
            )

    def _over_all_ranks(
        self, local: LocalTokens, replayed: Tensor | None, unreplayed: Tensor | None
    ) -> tuple[Distances, Distances]:
        """Return the sums of k3 over all ranks, and those in which each k3 is at most ``_LARGEST_K3``."""
        sums = torch.zeros(2, len(Distances._fields), dtype=torch.float64, device=self.config.launch.device)
        if replayed is not None and unreplayed is not None:
            rollout = local.rollout_log_probs
            # The correction may reject log-probs that are not finite.
            counts = local.response_mask & rollout.isfinite() & replayed.isfinite() & unreplayed.isfinite()
            with_replay = k3((replayed - rollout)[counts].double())
            without_replay = k3((unreplayed - rollout)[counts].double())
            sums[0] = _sums(with_replay, without_replay)
            sums[1] = _sums(with_replay.clamp(max=_LARGEST_K3), without_replay.clamp(max=_LARGEST_K3))
        sums = all_reduce_sum(sums, self.groups.dp_cp)
        last_stage = group_size(self.groups.pp) - 1
        plain, bounded = broadcast(sums, last_stage, self.groups.pp).tolist()
        return Distances(*plain), Distances(*bounded)

    def _judge(self, iteration: int, plain: Distances, bounded: Distances) -> None:
        """Judge a batch, with those before it that had too few tokens; AgreedError on every rank if replay is wrong."""
        plain_before, bounded_before = self._not_judged
        plain, bounded = plain.plus(plain_before), bounded.plus(bounded_before)
        words = _in_words(plain, bounded)
        error = None
        if plain.is_worse_with_replay or bounded.is_worse_with_replay:
            error = (
                f"the experts that are replayed are not those of the rollout batch of step {iteration}: {words}: "
                "routed_experts are likely shifted by a token, of other samples, or in another order of layers: repair "
                "the record, or leave out --moe-enable-routing-replay"
            )
        # Groups of tensor-parallel ranks add up the numbers apart from each other: so all ranks agree on the verdict.
        agree(self.config, error)

        has_verdict = plain.tokens >= FEWEST_TOKENS
        if has_verdict or self._is_first:
            too_few = "" if has_verdict else ", too few to judge: the next batches are added"
            self.lines.append(f"routing replay: {words}{too_few}")
        self._not_judged = (Distances(), Distances()) if has_verdict else (plain, bounded)
        self._awaits_verdict = self._awaits_verdict and not has_verdict
        self._is_first = False


def _sums(with_replay: Tensor, without_replay: Tensor) -> Tensor:
    """Return the fields of :class:`Distances`, [4] float64, from k3 of each token with and without replay, [tokens]."""
    squared_differences = (with_replay - without_replay).square()
    return torch.stack(
        [
            with_replay.new_tensor(len(with_replay)),
            with_replay.sum(),
            without_replay.sum(),
            squared_differences.sum(),
        ]
    )


def _in_words(plain: Distances, bounded: Distances) -> str:
    with_replay, without_replay = plain.means
    bounded_with_replay, bounded_without_replay = bounded.means
    of_bounded = (
        f" ({bounded_with_replay:.3g} and {bounded_without_replay:.3g} if no token counts for more than "
        f"{_LARGEST_K3:g} nats)"
    )
    return (
        f"k3 between engine and trainer is {with_replay:.3g} nats a token with the replayed experts, "
        f"{without_replay:.3g} with the routers' own choice{'' if bounded == plain else of_bounded}, over "
        f"{plain.tokens:,.0f} tokens"
    )
