"""Runs of the critic on the ranks of the pool, and the reference's results for them."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any

import torch

from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank, group_size
from tests.support import critic_oracle, training_cases, training_oracle
from tests.support.critic_oracle import Objective
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags, run_config
from tests.support.training_cases import BATCH

# Those of the policy's matrix in which work is cut in another way than in any other.
LAYOUTS = (
    Layout(tp=2, pp=2, sp=True),
    Layout(pp=2, vpp=True),
    Layout(tp=2, cp=2, sp=True),
    Layout(cp=2, dp=2),
    Layout(pp=2, cp=2),
)
# The flags of each objective, and the same objective for the reference.
OBJECTIVES = (
    (("--value-clip=0.05",), Objective(clip=0.05)),
    (
        ("--correct-values=weights", "--loss-aggregation=seq-mean-token-mean", "--value-clip=0.03"),
        Objective(clip=0.03, correct="weights", aggregation="seq-mean-token-mean"),
    ),
    (
        ("--correct-values=none", "--loss-aggregation=seq-mean-token-sum"),
        Objective(correct="none", aggregation="seq-mean-token-sum"),
    ),
    (
        (
            *("--rejection-denominator=original", "--loss-aggregation=seq-mean-token-sum-norm"),
            *("--loss-scale-factor=9", "--value-clip=0.05"),
        ),
        Objective(clip=0.05, aggregation="seq-mean-token-sum-norm", scale=9.0, denominator="original"),
    ),
)


@dataclass(frozen=True)
class Case:
    """One run: a layout, the critic's loss, and the cut of the work."""

    layout: Layout
    variant: int
    packed: bool
    per_token_loss: bool
    size: int
    experts: int = 0

    def words(self, folder: Any) -> list[str]:
        """The launcher's flags."""
        experts = (f"--num-experts={self.experts}", f"--moe-ffn-hidden-size={training_oracle.EXPERT_INNER}")
        arguments = training_cases.cut_words(self, *OBJECTIVES[self.variant][0], *(experts if self.experts else ()))
        return flags(folder, *BATCH, "--advantage-estimator=gae", "--grpo-kl-beta=0", *arguments, model=LLAMA)

    def __str__(self) -> str:
        return training_cases.label(self, self.variant)


def make_cases() -> list[Case]:
    """A case for every layout; the other values are spread over them."""
    return [
        Case(layout, index % len(OBJECTIVES), index % 3 != 1, index // 2 % 2 == 1, (8, 4)[index % 2])
        for index, layout in enumerate(LAYOUTS)
    ]


@functools.cache
def weights(experts: int = 0) -> tuple[training_oracle.Weights, training_oracle.Weights]:
    """The weights before the rollout batch, and the weights that train."""
    old = critic_oracle.make_weights(3, experts=experts)
    return old, training_oracle.moved(old, 4, 0.03)


@dataclass(frozen=True)
class Targets:
    """The critic's inputs, [n, s] at the positions of labels."""

    accepted: torch.Tensor
    weights: torch.Tensor
    returns: torch.Tensor


@functools.cache
def targets(experts: int = 0) -> Targets:
    """A fifth of the tokens rejected, and four sequences; returns near the values, so that some are clipped."""
    data = training_cases.make_data()
    generator = torch.Generator().manual_seed(5)
    shape = data.mask.shape
    accepted = data.mask & (torch.rand(shape, generator=generator) > 0.2)
    accepted[list(training_cases.REJECTED_ROWS)] = False
    with torch.no_grad():
        values = critic_oracle.values(
            {name: weight.double() for name, weight in weights(experts)[0].items()}, data.tokens
        )
    returns = (values + 0.5 * torch.randn(shape, generator=generator)).float()
    return Targets(accepted, 0.5 + torch.rand(shape, generator=generator), returns)


@functools.cache
def expected(variant: int, experts: int = 0) -> critic_oracle.Expected:
    """The reference's update."""
    data, given, (old, new) = training_cases.make_data(), targets(experts), weights(experts)
    return critic_oracle.update(
        OBJECTIVES[variant][1],
        data.tokens,
        data.mask,
        given.accepted,
        given.weights.double(),
        given.returns.double(),
        data.mini_batch_ids.tolist(),
        old,
        new,
    )


# On the ranks


@dataclass(frozen=True)
class Found(training_cases.OfRank):
    """The results of one rank; ``values``: [k], by the old weights, on the last stage."""

    values: torch.Tensor | None


def run_case(
    arguments: list[str],
    data: training_oracle.Data,
    given: Targets,
    old: training_oracle.Weights,
    new: training_oracle.Weights,
) -> Found:
    """Compute values at the old weights, then the gradients of each mini-batch at the new ones."""
    from megatron_rc.launch.training.batches.micro_batches import cut_batch
    from megatron_rc.launch.training.critic import Critic
    from megatron_rc.launch.training.models.passes import ModelPasses

    config = run_config(arguments, torch.distributed.get_world_size(), engine=False)
    groups = ParallelGroups.from_megatron()
    critic = Critic(config, config.critic, groups, ModelPasses(config, groups))
    training_cases.load(critic.chunks, old)
    batch, rows = training_cases.batch_of(data, group_rank(groups.dp), group_size(groups.dp))
    cut = cut_batch(batch, config, groups)
    values = critic.score(cut)
    places = training_cases.places_of(cut, rows)

    def here(whole: torch.Tensor) -> torch.Tensor:
        local = torch.where(places[:, 0] >= 0, whole[places[:, 0].clamp(min=0), places[:, 1]], whole.new_zeros(()))
        return local.view(cut.local.layout.shape)

    if values is not None:
        results = {"mask": here(given.accepted), "weights": here(given.weights)}
        cut = dataclasses.replace(cut, local=dataclasses.replace(cut.local, **results))
    prepared = critic.prepare(cut, values, None if values is None else here(given.returns))
    training_cases.load(critic.chunks, new)
    steps = training_cases.run_steps(groups, critic.chunks, lambda index: critic.accumulate(prepared, index, index))
    is_last = values is not None
    return Found(**steps, places=places if is_last else None, values=values.flatten() if is_last else None)
