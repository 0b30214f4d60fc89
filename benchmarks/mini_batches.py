"""Dependence of an update on its number of optimizer steps (1, 2 and 4), decoupled and coupled.

``python -m benchmarks.mini_batches`` measures it for several learning rates, prints a table and draws
docs/mini_batches.png. One process on a CPU, about forty seconds.

Each log-prob of the engine is the trainer's with noise. The optimizer is plain SGD with one learning rate, and the loss
is a sum over tokens. So k small steps differ from one large step only by the effects of the first ones: a changed
policy, which PPO's ratio is meant to follow, and other clipped tokens. The decoupled loss clips π_θ / π_old, which
begins at 1. The coupled loss clips π_θ / π_rollout, which begins at any value.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.support.made_rollouts import near_rollouts
from tests.support.recorded_training import make_trainer, run_config

if TYPE_CHECKING:
    from megatron_rc.launch.training.trainer import Trainer
    from megatron_rc.records.rollout import RolloutBatch

SEQUENCES = 256
LENGTH = 16
NOISE = 0.2
PARTS = (1, 2, 4)
SEEDS = range(8)
LEARNING_RATES = (0.0025, 0.005, 0.01, 0.02)
MODES = {
    "decoupled": ["--rollout-is=token", "--rollout-is-threshold=2"],
    "coupled": ["--rollout-correction-preset=bypass_ppo_clip"],
}
MODEL = """--from-scratch --num-layers=2 --hidden-size=32 --ffn-hidden-size=48 --num-attention-heads=4
--group-query-attention --num-query-groups=2 --position-embedding-type=rope --normalization=RMSNorm --swiglu
--disable-bias-linear --init-method-std=0.2 --make-vocab-size-divisible-by=4""".split()
FLAGS = f"""--cpu --task=count_up --max-response-length=10 --seq-length={LENGTH} --micro-batch-size=64
--grpo-prompts-per-step=64 --grpo-group-size=4 --grpo-iterations=1 --train-iters=100 --optimizer=sgd --sgd-momentum=0
--clip-grad=0 --weight-decay=0 --lr-decay-style=constant --grpo-kl-beta=0 --grpo-clamp-eps-lower=0.2
--grpo-clamp-eps-upper=0.2 --loss-aggregation=token-sum --loss-scale-factor=1600""".split()


def words(mode: str, parts: int, learning_rate: float) -> list[str]:
    """The flags of one run."""
    return [*MODEL, *FLAGS, *MODES[mode], f"--global-batch-size={SEQUENCES // parts}", f"--lr={learning_rate}"]


def update(flags: list[str], parts: int, seed: int) -> Tensor:
    """The change of all weights by one rollout batch, in one vector; needs Megatron's process groups."""
    trainer = make_trainer(flags)
    before = _weights(trainer)
    prepared = trainer.prepare(_rollouts(trainer, seed))
    for index in range(parts):
        trainer.update(prepared, index)
    return _weights(trainer) - before


def distances(mode: str, learning_rate: float, seed: int) -> dict[int, float]:
    """For each number of steps the update's distance from that of one step, relative to the latter's norm."""
    updates = {parts: update(words(mode, parts, learning_rate), parts, seed) for parts in PARTS}
    whole = updates[1].norm()
    return {parts: float((change - updates[1]).norm() / whole) for parts, change in updates.items() if parts > 1}


def main(folder: Path) -> None:
    """Measure, print and draw."""
    from megatron_rc.launch.distributed import alone
    from megatron_rc.launch.training.models.cpu import cpu_backend

    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    with cpu_backend(), alone(run_config(words("decoupled", 1, 1.0), engine=False)):
        by_mode = {mode: {rate: _mean(mode, rate) for rate in LEARNING_RATES} for mode in MODES}
    for mode, by_rate in by_mode.items():
        for rate, by_parts in by_rate.items():
            shares = "  ".join(f"{parts} steps: {x:.1%}" for parts, x in by_parts.items())
            sys.stdout.write(f"{mode:10} lr {rate:<7} {shares}\n")
    _draw(by_mode, folder / "mini_batches.png")


def _weights(trainer: Trainer) -> Tensor:
    return torch.cat([parameter.detach().flatten() for chunk in trainer.chunks for parameter in chunk.parameters()])


def _mean(mode: str, learning_rate: float) -> dict[int, float]:
    by_seed = [distances(mode, learning_rate, seed) for seed in SEEDS]
    return {parts: sum(by_parts[parts] for by_parts in by_seed) / len(by_seed) for parts in by_seed[0]}


def _rollouts(trainer: Trainer, seed: int) -> RolloutBatch:
    """Random responses; the engine's log-probs are the trainer's with noise."""
    generator = torch.Generator().manual_seed(seed)
    begin = torch.randint(1, 4, (SEQUENCES, 1), generator=generator)
    end = begin + torch.randint(4, LENGTH - 4, (SEQUENCES, 1), generator=generator)
    position = torch.arange(LENGTH)
    return near_rollouts(trainer, (position >= begin) & (position < end), NOISE, generator)


def _draw(by_mode: dict[str, dict[float, dict[int, float]]], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5.5, 3.2), layout="constrained")
    for mode, color in (("decoupled", "tab:blue"), ("coupled", "tab:red")):
        for parts, style in ((2, "--"), (4, "-")):
            values = [100 * by_parts[parts] for by_parts in by_mode[mode].values()]
            axes.plot(LEARNING_RATES, values, style, color=color, marker="o", label=f"{mode}, {parts} mini-batches")
    axes.set(xlabel="learning rate (SGD)", ylabel="% away from one step", xscale="log", ylim=(0, None))
    axes.set_xticks(LEARNING_RATES, [str(rate) for rate in LEARNING_RATES])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "docs"))
