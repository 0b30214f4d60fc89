"""Attribution of a rollout batch's mismatch to the policy's parameters, through Megatron's schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import Router
from torch import Tensor

from megatron_rc.attribution import Attribution, attribute, megatron_shards
from megatron_rc.attribution.midpoint import EngineWeights
from megatron_rc.attribution.names import place_of
from megatron_rc.attribution.picture import write_picture
from megatron_rc.launch.engines.rounding import round_weight
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.training.batches.micro_batches import LocalBatch, LocalTokens
from megatron_rc.launch.training.models.build import unwrap
from megatron_rc.launch.training.models.passes import ModelPasses, Scoring
from megatron_rc.launch.training.models.routing_replay import RoutingReplay
from megatron_rc.numerics import is_log_prob
from megatron_rc.parallel.collectives import all_reduce_max
from megatron_rc.parallel.groups import group_rank

PICTURE = "attribution.png"
# Functions of Megatron's config that would reduce gradients, gather weights or scale the loss.
_HOOKS = ("finalize_model_grads_func", "no_sync_func", "grad_sync_func", "param_sync_func", "grad_scale_func")
# Kinds of parameters whose matrices are linear layers.
_LINEAR = ("attention", "mlp", "experts")


def attribute_batch(
    model: Sequence[Any],
    passes: ModelPasses,
    batch: LocalBatch,
    train_log_probs: Tensor | None,
    engine_weights: EngineWeights,
    *,
    replay: RoutingReplay | None = None,
    nodes: int = 1,
    intended_weights: EngineWeights | None = None,
    check: bool = False,
) -> Attribution:
    """Attribute the differences log π_train - log π_rollout of a rollout batch; call it between two optimizer steps.

    The pass is that of an update, with the differences as advantages: the same schedule, micro-batches, log-probs and
    replayed experts. No gradient is reduced, because the products of each rank's own gradients are summed.

    Args:
        model: this rank's chunks under DDP, with gathered weights.
        passes: makes the passes.
        batch: this rank's tokens.
        train_log_probs: log π_train of the labels, like the tokens; None on stages before the last.
        engine_weights: the engine's shards; see :func:`megatron_rc.attribution.attribute`.
        replay: experts that the routers take.
        nodes: forward and backward passes.
        intended_weights: the shards that the engine should have, for the excess; None: there is no excess.
        check: make one more forward-only pass with the engine's weights, for the completeness.

    Returns:
        The attribution, equal on all ranks.
    """
    groups = passes.groups
    local = batch.local
    cuts = [cut for mini_batch in batch.cuts for cut in mini_batch]

    def differences_to(other_log_probs: Tensor | None) -> Tensor | None:
        """Trainer's log-probs minus other ones, 0 at tokens that do not count; None on stages before the last."""
        if train_log_probs is None or other_log_probs is None:
            return None
        is_valid = local.response_mask & is_log_prob(local.rollout_log_probs) & is_log_prob(train_log_probs)
        return torch.where(is_valid, train_log_probs - other_log_probs, 0.0)

    def backward(coefficients: Tensor | None) -> None:
        # Stages before the last compute no loss, and their advantages stay 0.
        weighted = batch if coefficients is None else batch.with_advantages(coefficients)
        with _local_gradients(model):
            passes.run(model, weighted, cuts, _weighted_log_probs(len(cuts)), scoring=Scoring(), replay=replay)

    def differences_of_weights() -> Tensor | None:
        # With --moe-routing-replay-source old a forward-only pass would replace the experts that the next step replays.
        is_replayed = replay is not None and passes.config.replays_rollouts
        scored = passes.score(model, batch, replay=replay if is_replayed else None)
        return differences_to(None if scored is None else scored.log_probs)

    try:
        return attribute(
            megatron_shards(model),
            engine_weights,
            backward,
            differences_to(local.rollout_log_probs),
            nodes=nodes,
            intended_weights=intended_weights,
            differences_of_weights=differences_of_weights if check else None,
            group=dist.group.WORLD,
            counts_tokens=group_rank(groups.tp) == 0,
        )
    finally:
        if replay is not None:
            # The next step's metrics must not count this pass.
            replay.metrics()


def rounded_weights(model: Sequence[Any], dtype: str) -> Callable[[str, Tensor], Tensor]:
    """The engine's shards if its weights are the trainer's, rounded by the launcher to ``dtype`` (``--rollout-dtype``).

    Collectives of the returned function: for the weight of a linear layer whose columns are split over TP ranks, one
    MAX of a number for each row.
    """
    weights = {shard.name: shard.weight for shard in megatron_shards(model)}

    def rounded(name: str, shard: Tensor) -> Tensor:
        is_linear = shard.dim() == 2 and place_of(name).kind in _LINEAR
        weight = weights[name]
        columns_are_split = getattr(weight, "tensor_model_parallel", False) and getattr(weight, "partition_dim", 0) == 1
        if not is_linear or not columns_are_split:
            return round_weight(shard, dtype, is_linear)

        if getattr(weight, "allreduce", True):
            tp_group = parallel_state.get_tensor_model_parallel_group()
        else:
            tp_group = parallel_state.get_expert_tensor_parallel_group()
        return round_weight(shard, dtype, True, lambda largest: all_reduce_max(largest, tp_group))

    return rounded


def drawn(result: Attribution, config: RunConfig) -> str:
    """Draw an attribution into the run's folder; return a line with the picture's path, or why there is none."""
    path = Path(config.launch.runs_dir) / config.launch.run_name / PICTURE
    try:
        write_picture(result, path)
    except (ImportError, OSError) as error:
        return f"attribution {path} could not be written ({error})"
    return f"attribution {path}"


def _weighted_log_probs(num_micro_batches: int) -> Callable[..., tuple[Tensor, Tensor, dict[str, Tensor]]]:
    """Megatron's loss function of Σ a_t log π(t) of a micro-batch, with a_t as advantages."""

    def loss(
        chunk: torch.nn.Module, local: LocalTokens, output: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        # torch.where, because 0 times an infinite log-prob is NaN.
        weighted = torch.where(local.advantages != 0, local.advantages * output[0], 0.0).sum()
        if not unwrap(chunk).config.calculate_per_token_loss:
            # The schedule divides by the number of micro-batches, and by the number of tokens, 1.
            weighted = weighted * num_micro_batches
        num_tokens = torch.ones((), dtype=torch.int32, device=weighted.device)
        return weighted, num_tokens, {}

    return loss


@contextmanager
def _local_gradients(model: Sequence[Any]) -> Iterator[None]:
    """Context in which a training pass leaves each rank the gradients of its own tokens, and no other trace.

    Routers make no auxiliary losses, whose gradients would be added to those of the log-probs.
    """
    config = model[0].config
    hooks = {name: getattr(config, name) for name in _HOOKS}
    routers = [module for chunk in model for module in chunk.modules() if isinstance(module, Router)]
    were_training = [router.training for router in routers]
    with ExitStack() as stack:
        for chunk in model:
            stack.enter_context(chunk.no_sync())
        try:
            for name in _HOOKS:
                setattr(config, name, None)
            for router in routers:
                router.training = False
            yield
        finally:
            for name, hook in hooks.items():
                setattr(config, name, hook)
            for router, was_training in zip(routers, were_training, strict=True):
                router.training = was_training
                # The next update of the experts' bias must not count this pass.
                if getattr(router, "local_tokens_per_expert", None) is not None:
                    router.local_tokens_per_expert.zero_()
