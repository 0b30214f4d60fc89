"""The critic on this rank: a second model that predicts the value of each state, with its own optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.learning import CriticSection
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.training.batches.micro_batches import LocalBatch, LocalTokens
from megatron_rc.launch.training.checks.step_checks import StepChecks
from megatron_rc.launch.training.models.build import build_chunks
from megatron_rc.launch.training.models.offload import Offload, tensors_of_model, tensors_of_optimizer
from megatron_rc.launch.training.models.passes import ModelPasses
from megatron_rc.launch.training.models.trained_model import TrainedModel
from megatron_rc.launch.weights.contents import check_contents
from megatron_rc.launch.weights.load import load_weights
from megatron_rc.launch.weights.units import ExpertGroups
from megatron_rc.loss.aggregation import denominator, loss_sum
from megatron_rc.loss.values import SUMS, derive_value_metrics, value_loss
from megatron_rc.parallel import ParallelGroups
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.training.plan import LossScale
from megatron_rc.training.schedule import Returned, schedule_return


@dataclass(frozen=True)
class PreparedValues:
    """A rollout batch that is ready for the critic's steps."""

    batch: LocalBatch  # the tokens; on the last stage with values, returns, and the critic's mask, weights and n_i
    # [mini-batches][3] on every rank: the tokens and sequences in the loss's denominator, and the tokens with a loss.
    counted: list[list[float]]


class Critic(TrainedModel):
    """A model of the policy's shape with a scalar head, sharded as the policy; the policy's timers measure it too.

    With ``--critic-offload`` its tensors are empty outside :meth:`here`.
    """

    def __init__(self, config: RunConfig, settings: CriticSection, groups: ParallelGroups, passes: ModelPasses) -> None:
        self.config = config
        self.settings = settings
        self.groups = groups
        transformer = build_transformer_config(config)
        transformer.finalize_model_grads_func = finalize_model_grads
        super().__init__(_as_of_the_critic(config, settings), passes, build_chunks(config, transformer, is_critic=True))
        self.checks = StepChecks(config, "the critic's", "--critic-lr")
        self._sums = list[Tensor]()
        self._offloads: list[Offload] = []
        if settings.critic_offload:
            model = self.model
            optimizer = self.optimizer
            self._offloads.append(Offload(lambda: tensors_of_model(model)))
            self._offloads.append(Offload(lambda: tensors_of_optimizer(optimizer, model)))

    @contextmanager
    def here(self, *, with_optimizer: bool = True) -> Iterator[None]:
        """Context with weights, gradients and optimizer state on the device. Must not be nested.

        The critic's own methods enter it themselves.
        """
        with ExitStack() as stack:
            for offload in self._offloads if with_optimizer else self._offloads[:1]:
                stack.enter_context(offload.here())
            yield

    def start_from(self, policy: Sequence[torch.nn.Module]) -> None:
        """Load the layers from ``--critic-load-hf``, or copy the policy's; the head keeps its initial weight.

        Raises RunError if the directory does not hold a fitting model.
        """
        bodies = [_without_head(chunk) for chunk in self.chunks]
        folder = self.settings.critic_load_hf
        if folder is None:
            for body, chunk in zip(bodies, policy, strict=True):
                body.load_state_dict(_without_head(chunk).state_dict())
        else:
            tied = self.config.changed(model={"untie_embeddings_and_output_weights": False})
            try:
                check_contents(folder, "--critic-load-hf", tied, self.groups, has_output_layer=False)
                load_weights(bodies, tied, self.groups, folder, ExpertGroups.of_megatron())
            except ValueError as error:
                raise RunError(f"--critic-load-hf: {error}") from error
        self.optimizer.reload_model_params()

    def score(self, batch: LocalBatch) -> Tensor | None:
        """Compute values in a forward-only pass: float32, like the tokens; None on stages before the last.

        Position t has the value of the state before label t was sampled.
        """

        def values(chunk: torch.nn.Module, local: LocalTokens, output: Tensor, non_loss_data: bool = True) -> Tensor:
            return output.reshape(local.layout.shape)  # [b, s/cp, 1] before

        cuts = [cut for mini_batch in batch.cuts for cut in mini_batch]
        with self.here(with_optimizer=False), torch.no_grad():
            self.gather_weights()
            outputs = self.passes.run(self.model, batch, cuts, values, forward_only=True)
        return torch.cat(outputs) if outputs else None

    def prepare(self, batch: LocalBatch, values: Tensor | None, returns: Tensor | None) -> PreparedValues:
        """Prepare a rollout batch for the critic's steps, after the correction's plan.

        ``values`` come from :meth:`score`; ``returns``, on the last stage, are their targets, like the tokens.

        Collectives: one SUM of [n] over ``cp``; for three numbers per mini-batch, one SUM over ``dp_cp`` and one
        broadcast over ``pp``.
        """
        local = dataclasses.replace(batch.local, values=values, returns=returns)
        counted = torch.zeros(len(batch.cuts), 3, dtype=torch.float64, device=local.tokens.device)
        if self.groups.is_last_stage:
            local, counted = self._planned(local, batch.mini_batch_ids, counted)
        last_stage = group_size(self.groups.pp) - 1
        counts_of_mini_batches: list[list[float]] = broadcast(counted, last_stage, self.groups.pp).tolist()
        return PreparedValues(batch=dataclasses.replace(batch, local=local), counted=counts_of_mini_batches)

    def accumulate(self, prepared: PreparedValues, mini_batch: int, step: int) -> dict[str, float] | None:
        """Compute the gradients of one mini-batch into the critic's buffers; return metrics equal on all ranks.

        They are None if no token has a loss, so that no step must be made. Raises BadStepError on every rank if the
        loss or the gradient norm is not finite, or is refused by a guard; ``step`` is named in that error.
        """
        tokens, sequences, having_loss = prepared.counted[mini_batch]
        if not having_loss:
            return None
        self._sums.clear()
        batch = prepared.batch
        cuts = batch.cuts[mini_batch]
        loss = self.config.loss
        counts = torch.tensor([tokens, sequences], dtype=torch.float64, device=batch.local.tokens.device).clamp(min=1)
        scale = LossScale(
            denominator=denominator(loss.aggregation, loss.loss_scale_factor, *counts),
            num_microbatches=len(cuts),
            dp_cp_size=group_size(self.groups.dp_cp),
            calculate_per_token_loss=self.config.compute.calculate_per_token_loss,
            local_tokens=math.prod(cuts[0].layout.shape),
            total_tokens=batch.total_tokens[mini_batch],
        )
        with self.here(with_optimizer=False):
            self.clear_gradients()
            self.passes.run(self.model, batch, cuts, partial(self._loss, scale))
            metrics = self._metrics()
            self._check(step, metrics["loss/critic"])
        return metrics

    def step(self) -> dict[str, float]:
        """Make one optimizer step with the accumulated gradients; with ``--fp16``, none if they overflowed."""
        learning_rate = self.learning_rate
        with self.here():
            norm = self.optimizer_step()
        return {"critic/lr": learning_rate} | ({} if norm is None else {"critic/grad_norm": norm})

    def _planned(self, local: LocalTokens, mini_batch_ids: Tensor, counted: Tensor) -> tuple[LocalTokens, Tensor]:
        """The local tokens with the critic's mask, weights and n_i; and the summed counts of each mini-batch."""
        correction = self.settings.correct_values
        response = local.response_mask
        mask = response if correction == "none" or local.mask is None else local.mask
        divides = mask if self.config.correction.rejection_denominator == "accepted" else response
        lengths = all_reduce_sum(local.layout.sum_sequences(divides), self.groups.cp)
        is_first = float(group_rank(self.groups.cp) == 0)
        counts_of_sequences = torch.stack(
            [lengths * is_first, (lengths > 0) * is_first, local.layout.sum_sequences(mask)], dim=1
        )
        counted = counted.index_add(0, mini_batch_ids, counts_of_sequences.double())
        weights = local.weights if correction == "weights" else None
        local = dataclasses.replace(local, mask=mask, weights=weights, sequence_lengths=lengths)
        return local, all_reduce_sum(counted, self.groups.dp_cp)

    def _loss(self, scale: LossScale, chunk: torch.nn.Module, local: LocalTokens, output: Tensor) -> Returned:
        """Loss of a micro-batch on the last stage; local arithmetic, because ``scale`` has all global factors."""
        if local.returns is None or local.mask is None or local.sequence_lengths is None:
            raise ValueError("the critic's loss needs returns, mask and lengths: call prepare() first")
        values = value_loss(
            output.reshape(local.layout.shape),
            local.returns,
            local.mask,
            old_values=local.values,
            clip=self.settings.value_clip,
            weights=local.weights,
        )
        total = loss_sum(
            values.per_token, local.mask, self.config.loss.aggregation, local.sequence_lengths, local.layout
        )
        self._sums.append(torch.cat([values.sums, (total.detach() / scale.denominator).view(1)]))
        return schedule_return(total, {"loss": total}, scale, local.mask.numel())

    def _metrics(self) -> dict[str, float]:
        """Metrics of the last gradients. Collectives: a SUM over ``dp_cp`` and a broadcast over ``pp``."""
        sums = torch.zeros(len(SUMS) + 1, dtype=torch.float64, device=next(self.model[0].parameters()).device)
        if self.groups.is_last_stage:
            sums = all_reduce_sum(torch.stack(self._sums).sum(0), self.groups.dp_cp)
        *values, loss = broadcast(sums, group_size(self.groups.pp) - 1, self.groups.pp).tolist()
        metrics = {"loss/critic": loss} | derive_value_metrics(dict(zip(SUMS, values, strict=True)))
        if self.settings.value_clip is None:
            del metrics["critic/clip_fraction"]
        return metrics

    def _check(self, step: int, loss: float) -> None:
        """Check the loss and the gradient norm; called before the policy's step."""
        self.checks.loss(step, loss)
        if self.config.compute.fp16:
            return  # an overflow is no error with fp16: the optimizer lowers the loss scale
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        self.optimizer.zero_grad()  # clears the copies only; the buffers keep the gradients for the step
        self.checks.gradient(step, norm)


def _without_head(chunk: torch.nn.Module) -> torch.nn.Module:
    """A module with a chunk's embeddings and layers; it shares their parameters."""
    body = torch.nn.Module()
    for name, child in chunk.named_children():
        if name != "output_layer":
            body.add_module(name, child)
    return body


def _as_of_the_critic(config: RunConfig, critic: CriticSection) -> RunConfig:
    """Settings with the critic's learning-rate flags instead of the policy's."""
    megatron_flags = {name: value for name, value in config.megatron.given.items() if not name.startswith("decoupled_")}
    return config.changed(
        optimizer={"lr": critic.critic_lr, "min_lr": critic.critic_min_lr},
        schedule={
            "lr_decay_style": critic.critic_lr_decay_style,
            "lr_warmup_iters": critic.critic_lr_warmup_iters,
            "lr_warmup_fraction": None,
            "lr_warmup_init": 0.0,
            "lr_wsd_decay_iters": None,
        },
        megatron={"given": megatron_flags},
    )
