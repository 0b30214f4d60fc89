"""Log-probs and entropy inside a Megatron model's forward: an ``output_processor`` for ``GPTModel``.

Megatron calls it on the last pipeline stage, instead of the output layer, and returns its results as the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_rc.parallel.arguments import check_tensors
from megatron_rc.parallel.groups import Group, group_size
from megatron_rc.parallel.linear import linear_log_probs_and_entropy
from megatron_rc.parallel.vocab import vocab_parallel_log_probs_and_entropy


def log_prob_processor(
    tp_group: Group | None = None,
    *,
    fused: bool = True,
    vocab_size: int | None = None,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    sum_squares: bool = False,
    compile: bool = False,
    support_ids: Tensor | None = None,
    support_offsets: Tensor | None = None,
    support_is_sorted: bool = False,
    entropy_over_support: bool = False,
) -> Callable[..., tuple[Tensor, ...]]:
    """An ``output_processor`` for the forward of Megatron-Core's ``GPTModel`` (0.18 and later).

    The model then returns log-probs and entropy instead of logits:
    ``log_probs, entropy = model(tokens, positions, None, labels=labels, loss_mask=mask, output_processor=...)``.
    Making a processor costs nothing: make one for each micro-batch that has kept tokens of its own.

    Args:
        tp_group: the ranks that hold the other vocabulary rows of the output layer.
        fused: multiply hidden states and weight in chunks, by
            :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`, so that the logits are never stored.
            False: call the output layer, then :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`,
            for an output layer that does more than multiply.
        vocab_size: rows at and above it are padding and have probability 0. Default: all rows count.
        temperature: divides the logits; > 0.
        chunk_size: tokens that are worked on together. Default: the function's own.
        sum_squares: return Σπ² too.
        compile: run the softmax of chunks through ``torch.compile``.
        support_ids: [n], int64, the tokens that the engine kept at each position, in the order of ``labels.flatten()``;
            with sequence parallelism of all slices. This and the next three arguments are as in
            :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`. Default: the whole vocabulary.
        support_offsets: [labels + 1], int64.
        support_is_sorted: the ids of each position ascend, none comes twice, and all lie in the vocabulary.
        entropy_over_support: the entropy is over the kept tokens too. Default: over the whole vocabulary.

    Returns:
        A function of the keyword arguments that Megatron passes. It reads ``hidden_states`` [s/cp, b, h], with sequence
        parallelism [s/cp/tp, b, h]; ``output_layer``, and ``output_weight`` if embeddings are tied; ``labels``
        [b, s/cp] int64, indices into the whole vocabulary, equal on all ranks of ``tp_group``; ``loss_mask``, like the
        labels, of any dtype, 0 for tokens that do not count, by default those with the label -100; ``scale_logits``
        and ``config``. It ignores the others; nothing is gathered over the vocabulary. It returns (log_probs, entropy),
        or (log_probs, entropy, Σπ²), each [b, s/cp], float32 (float64 for float64), differentiable, and equal on all
        ranks of ``tp_group``.

        The output layer's hooks run, as around its forward. Fused, its weight's gradient is added to
        ``weight.main_grad`` if Megatron's config has ``gradient_accumulation_fusion``. Collectives: the function's.

    Raises:
        ValueError: by the returned function: no labels; a ``tp_group`` with another number of ranks than the output
            layer's group; fused, an output layer without a weight, or a ``scale_logits`` that does more than multiply
            by a positive number; and the errors of the two functions.
    """
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "temperature": temperature,
        "chunk_size": chunk_size,
        "compile": compile,
    }
    options |= {"sum_squares": sum_squares, "entropy_over_support": entropy_over_support}
    options |= {"support_ids": support_ids, "support_offsets": support_offsets, "support_is_sorted": support_is_sorted}
    return partial(_processed, tp_group, fused, options)


def _processed(
    tp_group: Group | None,
    fused: bool,
    options: dict[str, Any],
    *,
    hidden_states: Tensor,
    output_layer: nn.Module,
    output_weight: Tensor | None = None,
    labels: Tensor | None = None,
    loss_mask: Tensor | None = None,
    scale_logits: Callable[[Tensor], Tensor] | None = None,
    config: Any = None,
    **others: Any,
) -> tuple[Tensor, ...]:
    labels, mask = _checked(tp_group, output_layer, labels, loss_mask)
    if not fused:
        logits = _logits(output_layer, hidden_states, output_weight)
        logits = logits if scale_logits is None else scale_logits(logits)
        return vocab_parallel_log_probs_and_entropy(logits.transpose(0, 1), labels, tp_group, mask=mask, **options)
    ids, offsets = _by_columns(options["support_ids"], options["support_offsets"], labels)
    options = options | {"temperature": options["temperature"] / factor_of(scale_logits)}
    options |= {"support_ids": ids, "support_offsets": offsets, "mask": None if mask is None else mask.t()}
    accumulates = getattr(config, "gradient_accumulation_fusion", False)
    # In the layer's forward, so that hooks that gather its weight run first: DDP's with overlap_param_gather.
    with forward_of(output_layer, partial(_multiplied, output_layer, labels.t(), tp_group, accumulates, options)):
        return tuple(values.t() for values in output_layer(hidden_states, weight=output_weight))


def _multiplied(
    layer: nn.Module,
    labels: Tensor,
    tp_group: Group | None,
    accumulates: bool,
    options: dict[str, Any],
    hidden: Tensor,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The results from hidden states and the layer's weight, as the layer's forward."""
    weight = getattr(layer, "weight", None) if weight is None else weight
    if weight is None:
        raise ValueError(f"output_layer is a {type(layer).__name__} without a weight: pass fused=False")
    return linear_log_probs_and_entropy(
        hidden,
        weight,
        labels,
        tp_group,
        bias=getattr(layer, "bias", None),
        sequence_parallel=getattr(layer, "sequence_parallel", False),
        gradient_accumulation=accumulates and torch.is_grad_enabled() and weight.requires_grad,
        **options,
    )


def _logits(layer: nn.Module, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """[s/cp, b, v/tp], by Megatron's output layer, or by a layer that takes hidden states alone."""
    takes = inspect.signature(layer.forward).parameters
    more: dict[str, Any] = {"runtime_gather_output": False} if "runtime_gather_output" in takes else {}
    if weight is not None:
        if "weight" not in takes:
            raise ValueError(f"output_weight with a {type(layer).__name__}, whose forward takes no weight: pass logits")
        more["weight"] = weight
    found = layer(hidden, **more)
    logits: Tensor = found[0] if isinstance(found, tuple) else found  # Megatron's layers return a bias too
    rows = getattr(layer, "weight", None) if weight is None else weight
    if isinstance(rows, Tensor) and rows.shape[0] != logits.shape[-1]:
        raise ValueError(
            f"output_layer has {rows.shape[0]} rows and makes {logits.shape[-1]} logits, as if it gathered them: pass "
            "gather_output=False to the layer"
        )
    return logits


def _checked(
    tp_group: Group | None, output_layer: nn.Module, labels: Tensor | None, loss_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(labels, bool mask or None) of a call, [b, s/cp] each."""
    if labels is None:
        raise ValueError("labels are None: pass labels=, [b, s/cp], to the model, with its output_processor")
    check_tensors({"loss_mask": loss_mask}, labels=labels)
    if labels.dim() != 2:
        raise ValueError(f"labels have shape {tuple(labels.shape)}: expected [b, s/cp], one row for packed tokens")
    ranks, own = group_size(tp_group), group_size(getattr(output_layer, "tp_group", tp_group))
    if ranks != own:
        raise ValueError(
            f"tp_group has {ranks} ranks and the output layer is split over {own}: pass tp_group, the model's "
            "tensor-parallel group, to log_prob_processor"
        )
    return labels, None if loss_mask is None else loss_mask != 0


def factor_of(scale_logits: Callable[[Tensor], Tensor] | None) -> float:
    """The number that ``scale_logits`` multiplies by, found without a GPU's answer; ValueError if it does more."""
    if scale_logits is None:
        return 1.0
    # A product with a power of 2 is exact; the large ones show bounds.
    probes = (1.0, 2.0, 2.0**20, -(2.0**20))
    one, *others = (float(scale_logits(torch.tensor(x, dtype=torch.float64, device="cpu"))) for x in probes)
    for x, found in zip(probes[1:], others, strict=True):
        if not (one > 0 and found == x * one):
            raise ValueError(
                f"scale_logits makes {one} of 1 and {found} of {x:g}, which is no multiplication by a positive number: "
                "log_prob_processor needs fused=False, LogProbRequest mode='auto'"
            )
    return one


def _by_columns(ids: Tensor | None, offsets: Tensor | None, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The kept tokens in the order of ``labels.t()``; offsets that are none of these labels stay, and are refused."""
    if not isinstance(ids, Tensor) or not isinstance(offsets, Tensor):
        return ids, offsets
    if min(labels.shape) < 2 or offsets.shape != (labels.numel() + 1,):
        return ids, offsets
    counts, device = offsets.diff(), offsets.device
    valid = (offsets[0] == 0) & (offsets[-1] == len(ids)) & (counts >= 0).all()
    order = torch.arange(labels.numel(), device=device).view(labels.shape).t().reshape(-1)
    moved = torch.nn.functional.pad(counts[order].cumsum(0), (1, 0))
    # Which position each id belongs to, and its place there; no look at the offsets on the host.
    entry = torch.arange(len(ids), device=device)
    row = torch.searchsorted(moved, entry, right=True).sub_(1).clamp_(0, len(order) - 1)
    source = entry - moved[row] + offsets[:-1][order][row]
    return ids[source.long().clamp_(0, len(ids) - 1)], torch.where(valid, moved, offsets.to(moved.dtype))


@contextmanager
def forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the module's forward is another function; its hooks stay around it."""
    before = vars(module).get("forward")
    vars(module)["forward"] = function
    try:
        yield
    finally:
        del vars(module)["forward"]
        if before is not None:
            vars(module)["forward"] = before
