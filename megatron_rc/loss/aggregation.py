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
    counted = _denominator_mask(per_token, mask, denominator_mask)
    groups = ParallelGroups.given(groups)
    layout = SequenceLayout.given(layout, "per_token", per_token, groups)
    groups.check_sums(layout.cp_group)
    lengths = all_reduce_sum(layout.sum_sequences(counted), layout.cp(groups.cp))
    local = loss_sum(per_token, mask, mode, lengths, layout)
    # Whole sequences are counted on the first CP rank alone.
    counts = torch.stack([lengths.sum(), (lengths > 0).sum()]) * (layout.cp_rank == 0)
    total, tokens, sequences = _over_ranks(local, counts, (mask & ~counted).sum(), groups)
    divisor = denominator(mode, loss_scale_factor, tokens.clamp(min=1), sequences.clamp(min=1))
    return torch.where(tokens > 0, (local - local.detach() + total) / divisor, 0.0)


def _denominator_mask(per_token: Tensor, mask: Tensor, given: Tensor | None) -> Tensor:
    """D, of arguments that are checked."""
    check_tensors({"denominator_mask": given}, per_token=per_token, mask=mask)
    counted = mask if given is None else given
    check_alike("per_token", per_token, mask=mask, denominator_mask=counted)
    check_mask("mask", mask)
    check_mask("denominator_mask", counted)
    return counted


def _over_ranks(local: Tensor, counts: Tensor, strays: Tensor, groups: ParallelGroups) -> tuple[Tensor, ...]:
    """The loss, and the tokens and the sequences that D counts, summed over all ranks; 0-D float64.

    ValueError if any rank has ``strays``, tokens of the mask outside D; a GPU's host does not wait for their number.
    """
    sums = torch.cat([local.detach().view(1), counts, strays.view(1)])
    *found, strays = all_reduce_sum(sums, groups.dp_cp).unbind()
    words = "tokens of mask lie outside denominator_mask: accept only tokens that it counts"
    if strays.device.type != "cpu":
        torch._assert_async(strays == 0, words)
    elif strays:
        raise ValueError(f"{int(strays)} {words}")
    return tuple(found)


def loss_sum(per_token: Tensor, mask: Tensor, mode: str, lengths: Tensor, layout: SequenceLayout) -> Tensor:
    """Σ mℓ of the local tokens, each divided by its sequence's n_i for ``seq-mean-token-mean``; 0-D float64.

    Sums of float32 terms in float64 are the same for every order that a layout adds them in. ``lengths``, [n] float64,
    are n_i of the whole sequences. The result stays in the graph of ``per_token`` even if nothing is counted.
    """
    terms = torch.where(mask, per_token, per_token.new_zeros(())).double()
    if mode == "seq-mean-token-mean":
        terms = terms / layout.expand(lengths.clamp(min=1))
    return terms.sum()


def denominator(mode: str, loss_scale_factor: float | None, tokens: Tensor, sequences: Tensor) -> Tensor:
    """G of :func:`aggregate_loss`, 0-D, from the tokens and the sequences that D counts over the whole mini-batch."""
    scale = 1.0 if loss_scale_factor is None else loss_scale_factor
    if mode == "token-mean":
        return tokens
    if mode == "token-sum":
        return tokens.new_full((), scale)
    return sequences * scale if mode == "seq-mean-token-sum-norm" else sequences


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
