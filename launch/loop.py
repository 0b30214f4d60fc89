"""The PPO loop: sync weights, sample, plan the correction, update; stop and save together."""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import torch
import torch.distributed as dist

from megatron_rc.batch import RolloutBatch
from megatron_rc.launch.distributed import agree
from megatron_rc.launch.report import Reporter
from megatron_rc.launch.rollout import RolloutCollector
from megatron_rc.launch.sync_check import SyncCheck
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.trainer import Trainer
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_max, all_reduce_sum


class StopRequest:
    """Set by SIGINT or SIGTERM; the loop looks at it between two optimizer steps."""

    def __init__(self) -> None:
        self.signal: str | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        """Take note of the signal; it can arrive more than once."""
        self.signal = signal.Signals(number).name

    @contextmanager
    def installed(self) -> Iterator[StopRequest]:
        """Handle both signals inside the block, as before after it."""
        before = {number: signal.signal(number, self) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def train(args: argparse.Namespace, task: Task) -> None:
    """Run ``--train-iters`` optimizer steps of PPO; process groups exist.

    Raises:
        AgreedError: on every rank alike: an engine, a reward, a record or the loss failed.
        ValueError: on every rank alike: unusable log-probs, or a checkpoint that does not fit.
    """
    groups = ParallelGroups.from_megatron()
    trainer = Trainer(args, groups)
    collector = RolloutCollector(args, task, groups)
    sync = _Sync(args, trainer, collector, groups)
    reporter = Reporter(args, trainer.iteration) if dist.get_rank() == 0 else None
    saved = trainer.iteration if args.load == args.save else -1
    with StopRequest().installed() as request:
        stop = False
        while trainer.iteration < args.train_iters and not stop:
            synced = sync()
            _evaluate(args, trainer, collector, reporter)
            for row in _rollout_steps(args, trainer, collector, groups, synced):
                if reporter is not None:
                    reporter.step(trainer.iteration, row)
                stop = agree(args, stop=request.signal is not None)
                if args.save and args.save_interval and trainer.iteration % args.save_interval == 0:
                    trainer.save()
                    saved = trainer.iteration
                if stop or trainer.iteration >= args.train_iters:
                    break
        if args.save and saved != trainer.iteration:
            trainer.save()
        if args.eval_interval and not stop:
            sync()
            _evaluate(args, trainer, collector, reporter)
    if reporter is not None:
        kept = f", saved to {args.save}" if args.save else ""
        done = f"stopped by {request.signal or 'another rank'}" if stop else "finished"
        reporter.close(f"{done} at step {trainer.iteration}{kept}")


class _Sync:
    """Hands the trainer's weights to the engines and sees that they arrived."""

    def __init__(
        self, args: argparse.Namespace, trainer: Trainer, collector: RolloutCollector, groups: ParallelGroups
    ) -> None:
        self.trainer, self.collector = trainer, collector
        self.check = None if args.load_rollouts else SyncCheck(args, trainer, collector, groups)

    def __call__(self) -> dict[str, float]:
        begun = time.monotonic()
        self.collector.sync_weights(self.trainer.chunks, self.trainer.iteration)
        found = {} if self.check is None else self.check()
        return found | {"perf/sync_seconds": time.monotonic() - begun}


def _evaluate(
    args: argparse.Namespace, trainer: Trainer, collector: RolloutCollector, reporter: Reporter | None
) -> None:
    """Where ``--eval-interval`` asks for it, and at the end of the run."""
    step = trainer.iteration
    if args.eval_interval and (step % args.eval_interval == 0 or step >= args.train_iters):
        metrics = collector.evaluate()
        if reporter is not None:
            reporter.evaluation(step, metrics)


def _rollout_steps(
    args: argparse.Namespace,
    trainer: Trainer,
    collector: RolloutCollector,
    groups: ParallelGroups,
    synced: dict[str, float],
) -> Iterator[dict[str, float]]:
    """One rollout batch, and the metrics of each of its optimizer steps."""
    clock = time.monotonic()
    begun = clock - synced["perf/sync_seconds"]
    times: dict[str, float] = {}

    def lap(name: str) -> None:
        nonlocal clock
        now = time.monotonic()
        times[f"perf/{name}_seconds"], clock = now - clock, now

    batch = collector.collect(trainer.iteration)
    lap("rollout")
    prepared = trainer.prepare(batch)
    lap("plan")
    common = synced | summarize_rollouts(batch, groups) | prepared.plan.metrics()
    mini_batches = args.updates_per_rollout // args.grpo_iterations
    for update in range(args.updates_per_rollout):
        metrics = trainer.update(prepared, update % mini_batches)
        lap("update")
        if update == 0:
            times["perf/tokens_per_second"] = common["rollout/tokens"] / (time.monotonic() - begun)
        yield common | metrics | times


def summarize_rollouts(batch: RolloutBatch, groups: ParallelGroups) -> dict[str, float]:
    """Rewards and lengths over all replicas: one SUM and one MAX over DP."""
    rewards, lengths = batch.rewards.double(), batch.response_mask.sum(dim=1).double()
    stopped = (batch.finish_reasons == 0).double()
    ones = torch.ones_like(rewards)
    columns = torch.stack([ones, rewards, rewards.square(), lengths, stopped])
    count, reward, squared, tokens, stops = all_reduce_sum(columns.sum(dim=1), groups.dp).tolist()
    highest, lowest = all_reduce_max(torch.stack([rewards.max(), -rewards.min()]), groups.dp).tolist()
    mean = reward / count
    return {
        "reward/mean": mean,
        "reward/std": max(squared / count - mean**2, 0.0) ** 0.5,
        "reward/max": highest,
        "reward/min": -lowest,
        "rollout/tokens": tokens,
        "rollout/response_length": tokens / count,
        "rollout/stopped_fraction": stops / count,
    }
