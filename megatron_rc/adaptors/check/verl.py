"""verl: its driver's function and its losses, beside the adaptor's and beside ranks that hold parts of the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_rc.adaptors.check.comparison import ROWS, WIDTH, Batch, Comparison
from megatron_rc.adaptors.check.shards import corrected_shards, on_ranks
from megatron_rc.adaptors.verl import VerlCorrection
from megatron_rc.settings.config import RolloutCorrectionConfig

NEEDS = "verl.trainer.ppo.rollout_corr_helper"
SETTINGS: dict[str, dict[str, Any]] = {
    "token weights": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "normalised sequence weights": {
        "rollout_is": "sequence",
        "rollout_is_threshold": 2.0,
        "rollout_is_batch_normalize": True,
    },
    "token weights and rejection of responses": {
        "rollout_is": "token",
        "rollout_is_threshold": "0.5_2.0",
        "rollout_rs": "seq_mean_k1",
        "rollout_rs_threshold": "0.8_1.3",
    },
    "rejection alone": {
        "rollout_is": None,
        "rollout_rs": "token_k1,seq_max_k3",
        "rollout_rs_threshold": "0.5_1.8,0.6",
    },
}
METRICS = ("kl", "k3_kl", "rollout_is_mean", "rollout_is_eff_sample_size", "rollout_rs_masked_fraction")
AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def comparisons(seed: int) -> Iterator[Comparison]:
    """All comparisons on the batch of a seed."""
    from verl.trainer.config.algorithm import RolloutCorrectionConfig as Settings
    from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_add_to_batch

    batch = Batch.random(seed)
    shards = on_ranks(corrected_shards, "verl", SETTINGS, seed)[0]
    for name, settings in SETTINGS.items():
        correction = Settings(**settings)
        theirs, their_metrics = compute_rollout_correction_and_add_to_batch(_proto(batch), correction)
        ours, our_metrics = VerlCorrection().add_to_batch(_proto(batch), correction)
        mask = theirs.batch["response_mask"] != 0
        weights = None if settings["rollout_is"] is None else theirs.batch["rollout_is_weights"]
        without = torch.full(mask.shape, torch.nan)
        of_whole_batch = ours.batch.get("rollout_is_weights", without), ours.batch["response_mask"]
        for layout, results in {"whole batch": of_whole_batch, **shards[name]}.items():
            our_weights, accepted = (torch.as_tensor(result).view(ROWS, WIDTH) for result in results)
            yield Comparison.of(f"{name}, mask, {layout}", accepted != 0, mask, 0)
            if weights is not None:
                yield Comparison.of(f"{name}, weights, {layout}", our_weights * batch.mask, weights * batch.mask)
        for metric in (f"rollout_corr/{metric}" for metric in METRICS):
            if metric in their_metrics:
                our_value = torch.tensor([float(our_metrics[metric])])
                their_value = torch.tensor([float(their_metrics[metric])])
                yield Comparison.of(f"{name}, {metric}", our_value, their_value, tolerance=1e-4)
    yield from _losses(batch)


def _proto(batch: Batch) -> Any:
    from verl import DataProto

    tensors = {"old_log_probs": batch.old, "rollout_log_probs": batch.rollout, "response_mask": batch.mask.long()}
    uid = [f"prompt {row // 4}" for row in range(ROWS)]
    return DataProto.from_dict({name: tensor.clone() for name, tensor in tensors.items()}, non_tensors={"uid": uid})


def _losses(batch: Batch) -> Iterator[Comparison]:
    """The clipped loss with weights, and its gradient, by each way of averaging."""
    from verl.trainer.ppo.core_algos import get_policy_loss_fn
    from verl.workers.config import ActorConfig

    correction = VerlCorrection(RolloutCorrectionConfig.decoupled_token_is(threshold=1.3))
    weights = (batch.old - batch.rollout).exp().clamp(max=1.3) * batch.mask
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=ROWS, clip_ratio_low=0.1)
    for mode in AGGREGATIONS:
        our_loss, our_gradient = _loss(correction.policy_loss, batch, weights, mode, config)
        their_loss, their_gradient = _loss(get_policy_loss_fn("vanilla"), batch, weights, mode, config)
        yield Comparison.of(f"{mode}, loss", our_loss, their_loss)
        yield Comparison.of(f"{mode}, gradient of the loss", our_gradient, their_gradient)


def _loss(function: Any, batch: Batch, weights: Tensor, mode: str, config: Any) -> tuple[Tensor, Tensor]:
    theta = batch.new.clone().requires_grad_()
    counts = {"batch_num_tokens": int(batch.mask.sum()), "global_batch_size": ROWS}
    config.global_batch_info.update(dp_size=1, loss_scale_factor=WIDTH, **counts)
    loss, _ = function(batch.old, theta, batch.advantages, batch.mask.float(), mode, config, weights)
    (gradient,) = torch.autograd.grad(loss, theta)
    return loss.reshape(1), gradient
