"""How per-token losses become one number: what the sum over a mini-batch is divided by."""

from __future__ import annotations

from torch import Tensor

from megatron_rc.losses import PolicyLossConfig


def denominator(loss: PolicyLossConfig, tokens: Tensor, sequences: Tensor) -> Tensor:
    """G of the aggregation, 0-D, from the tokens and the sequences that D counts over the whole mini-batch.

    ``token-mean`` Σ D; ``token-sum`` the loss_scale_factor; ``seq-mean-token-sum`` and ``seq-mean-token-mean`` (whose
    terms are divided by n_i already) N; ``seq-mean-token-sum-norm`` N · loss_scale_factor.
    """
    scale = loss.loss_scale_factor or 1.0
    if loss.aggregation == "token-mean":
        return tokens
    if loss.aggregation == "token-sum":
        return tokens.new_tensor(scale)
    return sequences * scale if loss.aggregation == "seq-mean-token-sum-norm" else sequences
