"""A tiny model, recorded rollouts, and their training on the ranks of the pool."""

from __future__ import annotations

from pathlib import Path

import torch

from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.groups import group_rank
from megatron_rc.records.rollout import RolloutBatch
from tests.support.made_rollouts import made_batch

SEQUENCES = 16
LENGTH = 16
VOCABULARY = 13

# Tiny models with random weights, whose tokens are characters.
LLAMA = """--from-scratch --num-layers=4 --hidden-size=32 --ffn-hidden-size=48 --num-attention-heads=4
--group-query-attention --num-query-groups=2 --position-embedding-type=rope --normalization=RMSNorm --swiglu
--disable-bias-linear""".split()
GPT2 = "--from-scratch --num-layers=4 --hidden-size=32 --ffn-hidden-size=48 --num-attention-heads=4".split()
COMMON = f"""--cpu --seq-length={LENGTH} --make-vocab-size-divisible-by=4 --init-method-std=0.08 --task=count_up
--max-response-length=10 --micro-batch-size=4 --grpo-prompts-per-step=4 --grpo-group-size=4 --grpo-iterations=2
--global-batch-size={SEQUENCES} --train-iters=100 --lr=0.02 --lr-decay-style=constant --weight-decay=0
--rollout-is=token --rollout-is-threshold=1.5 --rollout-rs=token_k1,seq_mean_k3
--rollout-rs-threshold=0.5_2.5,0.27""".split()
CLIP = ("--grpo-clamp-eps-lower=0.02", "--grpo-clamp-eps-upper=0.03")


def flags(folder: Path, *more: str, model: list[str] = LLAMA) -> list[str]:
    """Flags of the tiny run; later flags override earlier ones."""
    clip = () if any(word.endswith("=reinforce") or "=bypass_pg_" in word for word in more) else CLIP
    return [*model, *COMMON, *clip, f"--runs-dir={folder}", *more]


def run_config(arguments: list[str], world_size: int = 1, *, engine: bool = True) -> RunConfig:
    """The checked settings of these flags."""
    return configure(arguments, world_size, engine=engine)[0]


def recorded_batch(index: int, replica: int = 0, replicas: int = 1) -> RolloutBatch:
    """One data-parallel rank's share of a rollout batch: ragged lengths, holes, some rejected tokens."""
    generator = torch.Generator().manual_seed(100 + index)
    shape = (SEQUENCES, LENGTH)
    prompt = torch.randint(1, 5, (SEQUENCES, 1), generator=generator)
    end = prompt + torch.randint(3, LENGTH - 5, (SEQUENCES, 1), generator=generator)
    position = torch.arange(LENGTH).expand(shape)
    mask = (position >= prompt) & (position < end)
    mask &= torch.rand(shape, generator=generator) > 0.15
    log_probs = -2.7 + 0.4 * torch.randn(shape, generator=generator)
    tokens = torch.randint(0, VOCABULARY, shape, generator=generator)
    batch = made_batch(tokens, mask, log_probs.clamp(max=-0.01), torch.rand(SEQUENCES, generator=generator))
    return batch.rows(slice(replica * SEQUENCES // replicas, (replica + 1) * SEQUENCES // replicas))


def make_trainer(arguments: list[str]):
    """A trainer on this rank of the pool, for recorded rollouts."""
    from megatron_rc.launch.training.trainer import Trainer

    config = run_config(arguments, torch.distributed.get_world_size(), engine=False)
    return Trainer(config, ParallelGroups.from_megatron())


def refusal(arguments: list[str]) -> str | None:
    """The error of a trainer that cannot be made; None if it can."""
    try:
        make_trainer(arguments)
    except (RuntimeError, ValueError) as error:
        return str(error)
    return None


def build_trainer(arguments: list[str]) -> None:
    """Make a trainer, and raise its error, which may be one of this rank alone."""
    make_trainer(arguments)


def share(trainer, index: int) -> RolloutBatch:
    """This rank's part of a recorded rollout batch."""
    return recorded_batch(index, group_rank(trainer.groups.dp), trainer.config.data_parallel_size)


def save_initial(arguments: list[str]) -> None:
    """Write the checkpoint that all layouts start from."""
    make_trainer(arguments).save()


def train_recorded(arguments: list[str], batches: int) -> list[dict[str, float]]:
    """Make two optimizer steps on each recorded batch; returns every step's metrics and the local size of the loss."""
    trainer = make_trainer(arguments)
    steps = []
    for index in range(batches):
        prepared = trainer.prepare(share(trainer, index))
        local = prepared.batch.local
        size = 0.0
        if local.weights is not None and group_rank(trainer.groups.tp) == 0:
            sizes = local.advantages.double().abs()
            terms = local.weights.double() * (
                sizes if sizes.shape == local.layout.shape else local.layout.expand(sizes)
            )
            size = float(torch.where(local.mask, terms, 0).sum())
        for _ in range(2):
            metrics = trainer.update(prepared, 0).metrics | prepared.plan.metrics()
            steps.append(metrics | {"size": size})
    return steps
