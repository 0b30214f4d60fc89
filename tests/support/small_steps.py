"""Optimizer steps of the correction on a model of one number a token, with the expected gradient."""

import dataclasses

import torch

from megatron_rc import (
    MicroBatch,
    PlanInputs,
    PolicyLossConfig,
    RolloutCorrection,
    RolloutCorrectionConfig,
    masked_loss,
    wrap_finalize,
)
from megatron_rc.parallel import ParallelGroups, SequenceLayout

ROWS = 8
WIDTH = 6
PER_MICRO_BATCH = 2
MINI_BATCHES = (range(0, 4), range(4, 8))
BOUNDS = (0.8, 1.3)
LIMIT = 1.1
CONFIG = {
    "rollout_is": "token",
    "rollout_is_threshold": LIMIT,
    "rollout_rs": "token_k1",
    "rollout_rs_threshold": f"{BOUNDS[0]}_{BOUNDS[1]}",
}
MODES = {"decoupled": {}, "bypass": {"bypass_mode": True, "loss_type": "reinforce"}}


class Model(torch.nn.Module):
    """One number a token; its chunk of gradients is scaled and zeroed as in Megatron's DDP."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64))
        self.logits.main_grad = torch.zeros_like(self.logits)
        self.logits.register_post_accumulate_grad_hook(self._add_up)

    @staticmethod
    def _add_up(parameter):
        parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    def forward(self, rows):
        return torch.nn.functional.logsigmoid(self.logits[list(rows)])

    def scale_gradients(self, factor):
        self.logits.main_grad *= factor

    def zero_grad_buffer(self):
        self.logits.main_grad.zero_()

    @property
    def gradient(self):
        return self.logits.main_grad.clone()


class Training:
    """A model, its rollouts, and a schedule that runs the loss function as Megatron's does."""

    def __init__(self, mode, fields=CONFIG, groups=None, **loss):
        algorithm = {"algorithm": "reinforce"} if mode == "decoupled" else {}
        config = RolloutCorrectionConfig(**fields, **MODES[mode])
        groups = ParallelGroups.given(groups)
        self.correction = RolloutCorrection(config, groups, loss=PolicyLossConfig(**algorithm, **loss))
        self.mode = mode
        self.model = Model()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            self.old = self.model(range(ROWS))
        noise = 0.2 * torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        self.rollout = (self.old + noise).clamp(max=-1e-3)
        self.mask = torch.rand(ROWS, WIDTH, generator=generator) > torch.linspace(0.1, 0.6, ROWS).unsqueeze(1)
        self.advantages = torch.linspace(-1, 2, ROWS, dtype=torch.float64)
        self.finalize = wrap_finalize(self.correction, lambda model: None)

    def make_alike(self):
        """Give every row equally many accepted tokens, with weights of 1."""
        self.rollout = self.old.clone()
        self.mask = torch.ones_like(self.mask)

    def planned(self):
        """The plan of both mini-batches."""
        old = None if self.mode == "bypass" else self.old
        ids = torch.arange(ROWS) // 4
        plan = self.correction.plan(
            PlanInputs(old, self.rollout, self.mask, mini_batch_ids=ids), num_mini_batches=len(MINI_BATCHES)
        )
        plan.check()
        return plan

    def micro_batch(self, plan, rows):
        layout = SequenceLayout.padded(len(rows), WIDTH)
        results = {}
        if self.mode == "decoupled":
            results = {"weights": plan.weights, "mask": plan.mask, "sequence_lengths": plan.sequence_lengths}
            results = {name: None if value is None else value[list(rows)] for name, value in results.items()}
        old = self.old[list(rows)] if results else None
        rollout, mask, advantages = (value[list(rows)] for value in (self.rollout, self.mask, self.advantages))
        return MicroBatch(old, rollout, mask, layout, advantages, **results)

    def scale(self, plan, mini_batch):
        number = len(MINI_BATCHES[mini_batch]) // PER_MICRO_BATCH
        return plan.loss_scale(mini_batch, num_microbatches=number)

    def schedule(self, plan, mini_batch, scale=None, *, forward_only=False, fails_at=None, finalize=True):
        """Run forward and backward of every micro-batch, in place as Megatron does, then the end of the step."""
        scale = scale or self.scale(plan, mini_batch)
        rows = list(MINI_BATCHES[mini_batch])
        for index, start in enumerate(range(0, len(rows), PER_MICRO_BATCH)):
            if index == fails_at:
                raise OSError("out of memory")
            piece = rows[start : start + PER_MICRO_BATCH]
            loss, count, _ = masked_loss(self.correction, self.micro_batch(plan, piece), self.model(piece), None, scale)
            loss /= count
            loss /= scale.num_microbatches
            if not forward_only:
                loss.backward()
        if finalize and not forward_only:
            self.finalize([self.model])

    def step(self, plan, mini_batch):
        """(gradient, metrics) of an undisturbed step."""
        self.model.zero_grad_buffer()
        self.schedule(plan, mini_batch)
        if self.correction.step is not None:
            self.correction.step.check()
        return self.model.gradient, self.correction.loss_metrics()

    def expected(self, mini_batch):
        """The gradient of -w A log π_θ over the accepted tokens, divided by their number."""
        rows = list(MINI_BATCHES[mini_batch])
        logits = self.model.logits.detach().clone().requires_grad_()
        ratio = (self.old - self.rollout).exp()
        accepted = (self.mask & (ratio >= BOUNDS[0]) & (ratio <= BOUNDS[1]))[rows]
        loss = -(ratio.clamp(max=LIMIT) * self.advantages.unsqueeze(1) * torch.nn.functional.logsigmoid(logits))[rows]
        (loss[accepted].sum() / accepted.sum()).backward()
        return logits.grad


def listed(training):
    """The plan's inputs, in micro-batches."""
    rows = [slice(start, start + PER_MICRO_BATCH) for start in range(0, ROWS, PER_MICRO_BATCH)]
    old = None if training.mode == "bypass" else [training.old[row] for row in rows]
    tensors = ([value[row] for row in rows] for value in (training.rollout, training.mask))
    ids = [torch.full((PER_MICRO_BATCH,), index // 2) for index in range(len(rows))]
    return PlanInputs(old, *tensors, advantages=[training.advantages[row] for row in rows], mini_batch_ids=ids)


def planned(training, sequence_ids=None):
    """(the plan of the inputs in micro-batches, the four that it makes; the first two are a mini-batch)."""
    inputs = listed(training)
    if sequence_ids is not None:
        inputs = dataclasses.replace(inputs, sequence_ids=list(sequence_ids.split(PER_MICRO_BATCH)))
    plan = training.correction.plan(inputs, num_mini_batches=2)
    plan.check()
    return plan, plan.micro_batches(inputs)


def run(training, scale, micro_batches):
    """One step of (place, micro-batch): the model has the micro-batch's rows at its place."""
    training.model.zero_grad_buffer()
    for index, micro_batch in micro_batches:
        log_probs = training.model(range(PER_MICRO_BATCH * index, PER_MICRO_BATCH * (index + 1)))
        loss, count, _ = masked_loss(training.correction, micro_batch, log_probs, None, scale)
        (loss / count / scale.num_microbatches).backward()
    training.finalize([training.model])
