"""NeMo-RL: its clipped loss with weights of its own, beside the same loss with the adaptor's, whole and in halves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_rc.adaptors.check.comparison import ROWS, Batch, Comparison
from megatron_rc.adaptors.nemo_rl import CorrectedLoss
from megatron_rc.settings.config import RolloutCorrectionConfig

NEEDS = "nemo_rl.algorithms.loss"
_KIND, _HIGH, _LOW = (f"truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min"))
LAYOUTS = {"whole batch": [slice(0, ROWS)], "2 data ranks": [slice(0, ROWS // 2), slice(ROWS // 2, ROWS)]}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain weights": {},
    "truncated weights": {_KIND: "tis", _HIGH: 1.5},
    "IcePop": {_KIND: "icepop", _HIGH: 1.5, _LOW: 0.6},
    "rejection of responses": {_KIND: "seq-mask-tis", _HIGH: 1.15, _LOW: 0.85},
}


def comparisons(seed: int) -> Iterator[Comparison]:
    """All comparisons on the batch of a seed."""
    from nemo_rl.algorithms.loss import ClippedPGLossConfig, ClippedPGLossFn

    batch = Batch.random(seed)
    plain = {"reference_policy_kl_penalty": 0.0, "ratio_clip_min": 0.2, "ratio_clip_max": 0.3, "ratio_clip_c": 3.0}
    for name, settings in SETTINGS.items():
        correction = {"use_importance_sampling_correction": True, **settings}
        config = RolloutCorrectionConfig.from_dict(correction, dialect="nemo-rl")
        theirs = ClippedPGLossFn(ClippedPGLossConfig(**plain, **correction))
        ours = CorrectedLoss(ClippedPGLossFn(ClippedPGLossConfig(**plain)), config)
        their_loss, their_gradient = _loss(theirs, batch, LAYOUTS["whole batch"])
        for layout, parts in LAYOUTS.items():
            our_loss, our_gradient = _loss(ours, batch, parts)
            yield Comparison.of(f"{name}, loss, {layout}", our_loss, their_loss)
            yield Comparison.of(f"{name}, gradient, {layout}", our_gradient, their_gradient)


def _loss(function: Any, batch: Batch, parts: list[slice]) -> tuple[Tensor, Tensor]:
    """(loss, gradient), added over parts of the batch whose denominators are those of the whole."""
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    theta = batch.new.clone().requires_grad_()
    tokens = {"prev_logprobs": batch.old, "generation_logprobs": batch.rollout, "advantages": batch.advantages}
    tokens |= {"reference_policy_logprobs": batch.old, "token_mask": batch.mask.float()}
    # NeMo-RL ignores the first column, which no token predicts.
    data = {name: pad(value, (1, 0)) for name, value in tokens.items()}
    data |= {"input_ids": torch.zeros(ROWS, theta.shape[1] + 1, dtype=torch.int64), "sample_mask": torch.ones(ROWS)}
    total = torch.zeros(1)
    for part in parts:
        loss, _ = function(
            next_token_logprobs=theta[part],
            data=BatchedDataDict({name: value[part] for name, value in data.items()}),
            global_valid_seqs=torch.tensor(float(ROWS)),
            global_valid_toks=batch.mask.sum(),
        )
        total = total + loss
    (gradient,) = torch.autograd.grad(total, theta)
    return total, gradient
