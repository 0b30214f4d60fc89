"""How per-token losses become one number: a sum inside, one global denominator outside."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_rc.numerics import check_mask
from megatron_rc.parallel.arguments import check_alike, check_number, check_tensors, one_of
from megatron_rc.parallel.collectives import all_reduce_sum
from megatron_rc.parallel.groups import ParallelGroups
from megatron_rc.parallel.layout import SequenceLayout

AGGREGATIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
# Aggregations that divide by ``loss_scale_factor``.
_SCALED = ("token-sum", "seq-mean-token-sum-norm")


def aggregate_loss(
    per_token: Tensor,
    mask: Tensor,
    mode: str = "token-mean",
    *,
    denominator_mask: Tensor | None = None,
    loss_scale_factor: float | None = None,
    layout: SequenceLayout | None = None,
    groups: ParallelGroups | None = None,
) -> Tensor:
    """The loss of a whole mini-batch from the local tokens of every rank.

    With D the denominator mask, n_i = Σ_t D_it, N the sequences with n_i > 0: ``token-mean`` Σ mℓ / Σ D; ``token-sum``
    Σ mℓ / loss_scale_factor; ``seq-mean-token-sum`` Σ mℓ / N; ``seq-mean-token-mean`` (1/N) Σ_i (Σ_t mℓ) / n_i;
    ``seq-mean-token-sum-norm`` Σ mℓ / (N · loss_scale_factor).

    Args:
        per_token: the weighted loss of every token, of the layout's local shape; differentiated.
        mask: bool, like ``per_token``: the tokens that count (m'); others change no bit.
        mode: see above.
        denominator_mask: D, which holds all tokens of the mask; default: the mask.
        loss_scale_factor: needed by ``token-sum`` and ``seq-mean-token-sum-norm``, and only there.
        layout: which tokens these are. Default: padded, rows of ``per_token``.
        groups: ``cp`` and ``dp_cp`` hold the other tokens. Default: this process alone.

    Returns:
        0-D float64: the global loss on every rank; 0 if D is empty. The gradient at the local ``per_token`` is the
        gradient of the global loss, without any factor for the number of ranks.

    Collectives: one SUM of [n] over ``cp``, one SUM of four numbers over ``dp_cp``. Host synchronisations: none.

    Raises:
        ValueError: an unknown mode, a scale factor that is missing or does nothing, shapes that do not fit, groups that
            do not fit the layout; on every rank, tokens of the mask of any rank outside D: a mean would not be
            one. A GPU finds those itself, by a device-side assertion with the same words, because the host would have
            to wait for their number: there it is a CUDA error at the next synchronisation.
    """
    check_aggregation(mode, loss_scale_factor)
    if denominator_mask is None:
        denominator_mask = mask
    _check_tokens(per_token, mask, denominator_mask)
    groups = ParallelGroups.given(groups)
    layout = SequenceLayout.given(layout, "per_token", per_token, groups)
    groups.check_sums(layout.cp_group)

    lengths = all_reduce_sum(layout.sum_sequences(denominator_mask), layout.cp(groups.cp))
    local_loss = loss_sum(per_token, mask, mode, lengths, layout)

    # Every CP rank knows the lengths of the whole sequences: only the first one counts them.
    local_counts = torch.stack([lengths.sum(), (lengths > 0).sum()]) * (layout.cp_rank == 0)
    num_outside = (mask & ~denominator_mask).sum()
    local_sums = torch.cat([local_loss.detach().view(1), local_counts, num_outside.view(1)])
    total_loss, num_tokens, num_sequences, num_outside = all_reduce_sum(local_sums, groups.dp_cp).unbind()
    _check_none_outside(num_outside)

    divisor = denominator(mode, loss_scale_factor, num_tokens.clamp(min=1), num_sequences.clamp(min=1))
    # The value of the global sum, with the gradient of the local one.
    numerator = total_loss + (local_loss - local_loss.detach())
    return torch.where(num_tokens > 0, numerator / divisor, 0.0)


def _check_tokens(per_token: Tensor, mask: Tensor, denominator_mask: Tensor) -> None:
    """Raise ValueError unless the masks are bool tensors of the shape of the losses."""
    check_tensors({}, per_token=per_token, mask=mask, denominator_mask=denominator_mask)
    check_alike("per_token", per_token, mask=mask, denominator_mask=denominator_mask)
    check_mask("mask", mask)
    check_mask("denominator_mask", denominator_mask)


def _check_none_outside(num_outside: Tensor) -> None:
    """Raise ValueError if tokens of the mask, of any rank, lie outside the denominator mask.

    On a GPU this is a device-side assertion: the host would have to wait for the number.
    """
    message = "tokens of mask lie outside denominator_mask: accept only tokens that it counts"
    if num_outside.device.type != "cpu":
        torch._assert_async(num_outside == 0, message)
    elif num_outside:
        raise ValueError(f"{int(num_outside)} {message}")


def loss_sum(per_token: Tensor, mask: Tensor, mode: str, lengths: Tensor, layout: SequenceLayout) -> Tensor:
    """The numerator of :func:`aggregate_loss` from the local tokens: Σ mℓ, without the denominator.

    Args:
        per_token: the weighted loss of every token, of the layout's local shape; differentiated.
        mask: bool, like ``per_token``: the tokens that count.
        mode: the aggregation. ``seq-mean-token-mean`` divides each token by its sequence's n_i.
        lengths: [n] float64, n_i of the whole sequences; ``seq-mean-token-mean`` alone reads them.
        layout: which tokens these are.

    Returns:
        0-D float64, so that the order in which a layout adds the terms changes the result by about 1e-16 of it. It
        stays in the graph of ``per_token`` even if nothing is counted.
    """
    terms = torch.where(mask, per_token, per_token.new_zeros(())).double()
    if mode == "seq-mean-token-mean":
        terms = terms / layout.expand(lengths.clamp(min=1))
    return terms.sum()


def denominator(mode: str, loss_scale_factor: float | None, tokens: Tensor, sequences: Tensor) -> Tensor:
    """The denominator of :func:`aggregate_loss`, 0-D.

    Args:
        mode: the aggregation.
        loss_scale_factor: the factor of ``token-sum`` and ``seq-mean-token-sum-norm``, else None.
        tokens: 0-D, the tokens that the denominator mask counts over the whole mini-batch.
        sequences: 0-D, the sequences with such a token.
    """
    scale = 1.0 if loss_scale_factor is None else loss_scale_factor
    if mode == "token-mean":
        return tokens
    if mode == "token-sum":
        return tokens.new_full((), scale)
    if mode == "seq-mean-token-sum-norm":
        return sequences * scale
    return sequences


def check_aggregation(mode: str, loss_scale_factor: float | None) -> None:
    """Raise ValueError for a mode that does not exist, or a scale factor that it does not fit."""
    one_of("aggregation", mode, AGGREGATIONS)
    if (mode in _SCALED) != (loss_scale_factor is not None):
        raise ValueError(
            f"loss_scale_factor={loss_scale_factor} with aggregation={mode!r}: token-sum and "
            "seq-mean-token-sum-norm need it, the others do not use it"
        )
    if loss_scale_factor is not None:
        check_number("loss_scale_factor", loss_scale_factor, lambda x: 0 < x < torch.inf, "must be positive and finite")
