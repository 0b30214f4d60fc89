"""An optimizer step of one micro-batch, as Megatron's schedule makes it."""

import dataclasses

import torch

from megatron_rc import masked_loss, wrap_finalize
from tests.support.objectives_oracle import divergence_of


class Chunk(torch.nn.Linear):
    """A model chunk that records the factors of its gradients."""

    def __init__(self):
        super().__init__(1, 1)
        self.factors = []

    def scale_gradients(self, factor):
        self.factors.append(float(factor))


def planned(correction, inputs, **told):
    """(micro-batch, scale, function that ends the step) of a plan of one micro-batch."""
    end = wrap_finalize(correction, lambda *_, **__: None)
    plan = correction.plan(inputs)
    plan.check()
    (batch,) = plan.micro_batches(inputs)
    return batch, plan.loss_scale(num_microbatches=1, **told), end


def made(correction, inputs, log_probs, entropy=None, **more):
    """(loss, Megatron's divisor) of a whole step, with gradients; ``more`` are other fields of the micro-batch."""
    batch, scale, end = planned(correction, inputs)
    batch = dataclasses.replace(batch, **more)
    divergence = divergence_of(correction.loss.algorithm, log_probs)
    loss, count, log = masked_loss(correction, batch, log_probs, entropy, scale, divergence=divergence)
    loss.backward()
    assert list(log) == ["loss"]
    end([Chunk()])
    return loss.detach(), count
