"""Check that replayed experts belong to the rollouts: with them the trainer must not be further from the engine.

Experts that are shifted by a token, of another sample, or in another order of layers are numbers like any other. But
with the right ones the trainer's log-probs come closer to the engine's than with the routers' own choice, and with
wrong ones they move away. So both are computed on the first rollout batch of a run, and on every batch that
``--load-rollouts`` reads: each comes from other files, so that a good one says nothing about the next.

The distance is k3 = ρ - 1 - log ρ of a token, in nats, with ρ the trainer's probability divided by the engine's.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_rc.launch.distributed import largest_over_ranks
from megatron_rc.launch.errors import RunError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalTokens
from megatron_rc.numerics import k3
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_size

FEWEST_TOKENS = 1024  # fewer tokens give no verdict
_LARGEST_INCREASE = 0.1  # share by which replay may make k3 larger
_STANDARD_ERRORS = 3.0  # an increase by fewer standard errors may be chance
# Nats. k3 is compared as it is, and once more with each token's limited to this: a few tokens with a huge k3 make the
# standard error as large as the mean, and so hide all others.
_LARGEST_K3 = 10.0
_MOST_UNKNOWN = 0.05  # largest share of tokens without known experts of which nothing is said


class K3Sums(NamedTuple):
    """Sums over tokens of k3 between engine and trainer, with replayed experts and with the routers' own choice."""

    tokens: float = 0.0
    with_replay: float = 0.0  # nats
    without_replay: float = 0.0  # nats
    squared_differences: float = 0.0  # of the two k3 of each token, nats²

    def plus(self, other: K3Sums) -> K3Sums:
        """Sums over the tokens of both."""
        return K3Sums(*map(sum, zip(self, other, strict=True)))

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
        # Mean of the squares less the square of the mean; over n - 1 it is the unbiased variance of the mean.
        variance = max(self.squared_differences / self.tokens - increase**2, 0.0)
        standard_error = math.sqrt(variance / (self.tokens - 1))
        return increase > _LARGEST_INCREASE * without_replay and increase > _STANDARD_ERRORS * standard_error


class ReplayCheck:
    """Comparison of both choices of experts on rollout batches, in a run that replays the engine's experts.

    A verdict needs ``FEWEST_TOKENS`` tokens: smaller batches are added up until they have them.

    Attributes:
        lines: what the run should say, in order; the caller says them, and empties the list.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups) -> None:
        self.config = config
        self.groups = groups
        self.lines: list[str] = []
        self._not_judged = (K3Sums(), K3Sums())  # of batches that were too small for a verdict
        self._is_first = self._awaits_verdict = True
        self._has_said_unknown = False

    def is_due(self, iteration: int) -> bool:
        """Whether the rollout batch that starts after so many optimizer steps has to be measured."""
        routing = self.config.routing
        interval = None if routing is None else routing.moe_routing_replay_check_interval
        batch = iteration // self.config.updates_per_rollout
        return self._verdict_is_due or (interval is not None and batch % interval == 0)

    @property
    def _verdict_is_due(self) -> bool:
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

        Collectives: one SUM over DP×CP and one broadcast over PP of eight numbers; with a verdict that of
        :func:`largest_over_ranks`.

        Raises:
            RunError: on every rank, if the replayed experts cannot be those of the rollouts.
        """
        whole, limited = self._over_all_ranks(local, replayed, unreplayed)
        if self._verdict_is_due:
            self._judge(iteration, whole, limited)
        with_replay, without_replay = whole.means
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
    ) -> tuple[K3Sums, K3Sums]:
        """Return the sums of k3 over all ranks, and those in which each k3 is at most ``_LARGEST_K3``."""
        sums = torch.zeros(2, len(K3Sums._fields), dtype=torch.float64, device=self.config.launch.device)
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
        whole, limited = broadcast(sums, last_stage, self.groups.pp).tolist()
        return K3Sums(*whole), K3Sums(*limited)

    def _judge(self, iteration: int, whole: K3Sums, limited: K3Sums) -> None:
        """Judge a batch, with those before it that had too few tokens; RunError on every rank if replay is wrong."""
        whole_before, limited_before = self._not_judged
        whole = whole.plus(whole_before)
        limited = limited.plus(limited_before)
        words = _in_words(whole, limited)
        # Each tensor-parallel rank has added up its own numbers, whose last digits may differ: one verdict for all.
        is_wrong = whole.is_worse_with_replay or limited.is_worse_with_replay
        (is_wrong_on_any,) = largest_over_ranks(self.config, [is_wrong])
        if is_wrong_on_any:
            raise RunError(
                f"the experts that are replayed are not those of the rollout batch after step {iteration}: {words}: "
                "routed_experts are likely shifted by a token, of other samples, or in another order of layers: repair "
                "the record or the engine, or leave out --moe-enable-routing-replay"
            )

        has_verdict = whole.tokens >= FEWEST_TOKENS
        if has_verdict or self._is_first:
            too_few = "" if has_verdict else ", too few to judge: the next batches are added"
            self.lines.append(f"routing replay: {words}{too_few}")
        self._not_judged = (K3Sums(), K3Sums()) if has_verdict else (whole, limited)
        self._awaits_verdict = self._awaits_verdict and not has_verdict
        self._is_first = False


def _sums(with_replay: Tensor, without_replay: Tensor) -> Tensor:
    """Return the fields of :class:`K3Sums`, [4] float64, from k3 of each token with and without replay, [tokens]."""
    squared_differences = (with_replay - without_replay).square()
    return torch.stack(
        [
            with_replay.new_tensor(len(with_replay)),
            with_replay.sum(),
            without_replay.sum(),
            squared_differences.sum(),
        ]
    )


def _in_words(whole: K3Sums, limited: K3Sums) -> str:
    with_replay, without_replay = whole.means
    limited_with_replay, limited_without_replay = limited.means
    of_limited = (
        f" ({limited_with_replay:.3g} and {limited_without_replay:.3g} if no token counts for more than "
        f"{_LARGEST_K3:g} nats)"
    )
    return (
        f"k3 between engine and trainer is {with_replay:.3g} nats a token with the replayed experts, "
        f"{without_replay:.3g} with the routers' own choice{'' if limited == whole else of_limited}, over "
        f"{whole.tokens:,.0f} tokens"
    )
