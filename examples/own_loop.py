"""A training loop of one's own on Megatron-Core with Rollout Correction, decoupled mode. Copy the parts (1) to (6).

    torchrun --nproc-per-node 4 examples/own_loop.py --tp 2 --pp 2

A small GPT learns the next digit. Every layout prints the same lines, one for each rollout batch. The engine is a table
that takes no new weights: the more the policy learns, the larger the KL between them.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from typing import Any

import next_digit
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from next_digit import DIGITS, LENGTH, ROWS

import megatron_rc as rc
from megatron_rc.parallel import ParallelGroups, SequenceLayout, vocab_parallel_log_probs

# optimizer steps of a rollout batch, rows of a micro-batch
STEPS = 2
SIZE = 8


class Loop:
    """Model, optimizer and correction of this rank."""

    def __init__(self, tp: int, pp: int, cp: int) -> None:
        config = next_digit.settings(tp, pp, cp)
        ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
        gpt = GPTModel(config, next_digit.layers(config), DIGITS, LENGTH, *ends, position_embedding_type="rope")
        self.model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt.cuda())
        adam = OptimizerConfig(lr=0.01, weight_decay=0.0)
        self.optimizer = get_megatron_optimizer(adam, [self.model], use_gloo_process_groups=False)
        self.groups = ParallelGroups.from_megatron()
        # (1) Once: the correction with its objective, and a wrapper of the function that finishes Megatron's gradients.
        chosen = rc.RolloutCorrectionConfig.decoupled_token_is(threshold=2.0)
        self.correction = rc.RolloutCorrection(chosen, self.groups, loss=rc.PolicyLossConfig())
        config.finalize_model_grads_func = rc.wrap_finalize(self.correction)
        # (2) The tokens of the sequences on this rank: Megatron's cut over the context-parallel ranks.
        self.layout = SequenceLayout.padded(SIZE, LENGTH // cp, cp_rank=dist.get_rank(self.groups.cp), cp_size=cp)

    def run(self, function: Any, items: list[Any], forward_only: bool = False) -> list[Any]:
        """Run Megatron's schedule over micro-batches; ``function`` gets each item and its logits, [b, s/cp, v/tp]."""

        def forward_step(iterator: Iterator[Any], chunk: Any) -> tuple[torch.Tensor, Any]:
            item = next(iterator)
            return chunk(item[0]["tokens"], self.layout.positions().cuda(), None), partial(function, *item)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(items),
            model=[self.model],
            num_microbatches=len(items),
            seq_length=LENGTH,
            micro_batch_size=SIZE,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def log_probs(self, data: Any, logits: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
        """Log-probs of the labels, [b, s/cp], from the vocabulary rows of all tensor-parallel ranks."""
        return vocab_parallel_log_probs(logits, data["labels"], self.groups.tp, mask=data["response_mask"])

    def learn(self, whole: dict[str, torch.Tensor]) -> dict[str, float]:
        """Learn from one rollout batch; return metrics of it and its last step, alike on all ranks except ``right``."""
        dp_rank = dist.get_rank(self.groups.dp)
        dp_size = dist.get_world_size(self.groups.dp)
        rows = torch.arange(ROWS).view(STEPS, -1, SIZE)[:, dp_rank::dp_size].flatten(0, 1)
        local = [{name: self.layout.cut(full[some]).cuda() for name, full in whole.items()} for some in rows]
        # (3) log π_old: a forward-only pass over the same micro-batches, cut alike. Other stages get [].
        with torch.no_grad():
            old = self.run(self.log_probs, [(data,) for data in local], forward_only=True)
        # (4) The plan, on every stage: weights, masks, denominators, metrics. Only the last stage has log-probs.
        inputs = None
        a_step = len(local) // STEPS
        if old:
            given = {name: [data[name] for data in local] for name in next_digit.GIVEN}
            ids = [torch.full((SIZE,), index // a_step) for index in range(len(local))]
            inputs = rc.PlanInputs(old, layout=[self.layout] * len(local), mini_batch_ids=ids, **given)
        plan = self.correction.plan(inputs, num_mini_batches=STEPS)
        plan.check()  # bad log-probs raise here, on every rank alike
        batches = plan.micro_batches(inputs) if inputs else [None] * len(local)
        metrics = plan.metrics()
        for step in range(STEPS):
            if plan.skips(step):  # no accepted token
                continue
            # (5) The loss of each micro-batch, with the plan's results; Megatron's own gradients and optimizer.
            scale = plan.loss_scale(step, num_microbatches=a_step)
            self.model.zero_grad_buffer()
            self.optimizer.zero_grad()
            items = list(zip(local, batches, strict=True))[step * a_step : (step + 1) * a_step]
            self.run(partial(self.loss, scale), items)
            _, grad_norm, _ = self.optimizer.step()
            metrics |= self.correction.loss_metrics() | {"grad_norm": float(grad_norm)}
        # (6) Here an engine takes the new weights.
        return metrics | {"right": next_digit.share_of_right(local, old, self.groups.dp_cp)} if old else metrics

    def loss(self, scale: rc.LossScale, data: Any, batch: rc.MicroBatch, logits: torch.Tensor) -> Any:
        """A micro-batch's results for Megatron's schedule."""
        return rc.masked_loss(self.correction, batch, self.log_probs(data, logits), None, scale)


def main() -> None:
    """Print a line for each rollout batch, on the last rank."""
    parser = argparse.ArgumentParser()
    for name, default in (("tp", 1), ("pp", 1), ("cp", 1), ("batches", 12)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with next_digit.megatron(args.tp, args.pp, args.cp):
        loop = Loop(args.tp, args.pp, args.cp)
        for batch in range(args.batches):
            next_digit.show(batch, loop.learn(next_digit.sample(batch)))


if __name__ == "__main__":
    main()
