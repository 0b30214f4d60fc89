"""Log-probs and entropy inside a Megatron model's forward: an ``output_processor`` for ``GPTModel``.

Megatron calls it on the last pipeline stage, instead of the output layer, and returns its results as the model's.
"""

from __future__ import annotations

import dataclasses
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
from megatron_rc.parallel.log_probs import counted_tokens
from megatron_rc.parallel.scale_logits import factor_of
from megatron_rc.parallel.teacher import Teacher, TeacherStates, TeacherTopK
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
    teacher: Teacher | None = None,
) -> Callable[..., tuple[Tensor, ...]]:
    """Make an ``output_processor`` for the forward of Megatron-Core's ``GPTModel`` (0.18 and later).

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
        teacher: what a teacher says about the tokens: the last result is then the divergence of the model from it. The
            kept tokens apply to both policies; a :class:`~megatron_rc.parallel.teacher.TeacherTopK` allows none.
            Without ``fused`` the gradients of log-probs and divergence are two tensors of the logits' size. Default: no
            divergence.

    Returns:
        A function of the keyword arguments that Megatron passes. It reads ``hidden_states`` [s/cp, b, h], with sequence
        parallelism [s/cp/tp, b, h]; ``output_layer``, and ``output_weight`` if embeddings are tied; ``labels``
        [b, s/cp] int64, indices into the whole vocabulary, equal on all ranks of ``tp_group``; ``loss_mask``, like the
        labels, of any dtype, 0 for tokens that do not count, by default those with the label -100; ``scale_logits``
        and ``config``. It ignores the others; nothing is gathered over the vocabulary. It returns (log_probs, entropy),
        or (log_probs, entropy, Σπ²), and with a teacher the divergence behind these; each [b, s/cp], float32 (float64
        for float64), differentiable, and equal on all ranks of ``tp_group``.

        The output layer's hooks run, as around its forward. Fused, its weight's gradient is added to
        ``weight.main_grad`` if Megatron's config has ``gradient_accumulation_fusion``. Collectives: the function's.

    Raises:
        ValueError: a TeacherTopK with kept tokens. By the returned function: no labels; a ``tp_group`` with another
            number of ranks than the output layer's group; fused, an output layer without a weight, or a
            ``scale_logits`` that does more than multiply by a positive number; and the errors of the functions.
    """
    options: dict[str, Any] = {
        "vocab_size": vocab_size,
        "temperature": temperature,
        "chunk_size": chunk_size,
        "compile": compile,
        "sum_squares": sum_squares,
        "entropy_over_support": entropy_over_support,
        "support_ids": support_ids,
        "support_offsets": support_offsets,
        "support_is_sorted": support_is_sorted,
    }
    if isinstance(teacher, TeacherStates) and teacher.temperature is None:
        teacher = dataclasses.replace(teacher, temperature=temperature)
    if isinstance(teacher, TeacherTopK) and support_ids is not None:
        raise ValueError(
            "teacher with log-probs of few tokens and support_ids: its log-probs are over the whole vocabulary, and "
            "those over the kept tokens do not follow from them: pass a TeacherStates, or leave support_ids out"
        )
    return partial(_processed, tp_group, fused, options, teacher)


def _processed(
    tp_group: Group | None,
    fused: bool,
    options: dict[str, Any],
    teacher: Teacher | None,
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
    """The function that :func:`log_prob_processor` returns; Megatron passes the arguments by name.

    ``options`` are arguments of the functions on logits and on hidden states, by name. ``others`` are ignored.
    """
    labels, mask = _checked(tp_group, output_layer, labels, loss_mask)
    if not fused:
        logits = _logits(output_layer, hidden_states, output_weight)
        if scale_logits is not None:
            logits = scale_logits(logits)
        results = vocab_parallel_log_probs_and_entropy(logits.transpose(0, 1), labels, tp_group, mask=mask, **options)
        if teacher is None:
            return results
        divergence = teacher.by_columns(labels).divergence_from_logits(
            logits,
            labels.t(),
            tp_group,
            counted_tokens(labels, mask).t(),
            _of_both(options | _support_by_columns(options, labels)),
            sequence_parallel=getattr(output_layer, "sequence_parallel", False),
        )
        return *results, divergence.t()

    # The fused function takes hidden states as Megatron has them, [s, b, h], so labels and all else are transposed.
    options = options | _support_by_columns(options, labels)
    options["temperature"] = options["temperature"] / factor_of(scale_logits)
    options["mask"] = None if mask is None else mask.t()
    if teacher is not None:
        teacher = teacher.by_columns(labels)
    accumulates = getattr(config, "gradient_accumulation_fusion", False)
    # In the layer's forward, so that hooks that gather its weight run first: DDP's with overlap_param_gather.
    forward = partial(_multiplied, output_layer, labels.t(), tp_group, accumulates, options, teacher)
    with forward_of(output_layer, forward):
        results = output_layer(hidden_states, weight=output_weight)
    return tuple(values.t() for values in results)


def _multiplied(
    layer: nn.Module,
    labels: Tensor,
    tp_group: Group | None,
    accumulates: bool,
    options: dict[str, Any],
    teacher: Teacher | None,
    hidden: Tensor,
    weight: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Log-probs and entropy instead of logits: a forward for the output layer, once all but the last two are bound.

    Args:
        layer: the output layer.
        labels: [s/cp, b].
        tp_group: the ranks that hold the other vocabulary rows.
        accumulates: the layer's backward adds its weight's gradient to ``weight.main_grad``.
        options: further arguments of :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`.
        teacher: what a teacher says about the tokens; None: no divergence.
        hidden: [s/cp, b, h], with sequence parallelism [s/cp/tp, b, h].
        weight: [v/tp, h]. Default: the layer's own.
    """
    if weight is None:
        weight = getattr(layer, "weight", None)
    if weight is None:
        raise ValueError(f"output_layer is a {type(layer).__name__} without a weight: pass fused=False")
    of_layer: dict[str, Any] = {
        "bias": getattr(layer, "bias", None),
        "sequence_parallel": getattr(layer, "sequence_parallel", False),
        "gradient_accumulation": accumulates and torch.is_grad_enabled() and weight.requires_grad,
    }
    results = linear_log_probs_and_entropy(hidden, weight, labels, tp_group, **of_layer, **options)
    if teacher is None:
        return results
    divergence = teacher.divergence_from_hidden(
        hidden, weight, labels, tp_group, counted_tokens(labels, options["mask"]), of_layer | _of_both(options)
    )
    return *results, divergence


def _of_both(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments, by name, that functions of log-probs and of divergences both take."""
    names = ("vocab_size", "temperature", "chunk_size", "support_ids", "support_offsets", "support_is_sorted")
    return {name: options[name] for name in names}


def _support_by_columns(options: dict[str, Any], labels: Tensor) -> dict[str, Any]:
    """The arguments of the kept tokens, by name, in the order of ``labels.t()``."""
    ids, offsets = _by_columns(options["support_ids"], options["support_offsets"], labels)
    return {"support_ids": ids, "support_offsets": offsets}


def _logits(layer: nn.Module, hidden: Tensor, weight: Tensor | None) -> Tensor:
    """This rank's logits, [s/cp, b, v/tp], by Megatron's output layer, or by a layer that takes hidden states alone.

    ``weight`` replaces the layer's, as with tied embeddings. ValueError if the layer cannot do so, or gathers logits.
    """
    parameters = inspect.signature(layer.forward).parameters
    arguments: dict[str, Any] = {}
    if "runtime_gather_output" in parameters:
        arguments["runtime_gather_output"] = False
    if weight is not None:
        if "weight" not in parameters:
            raise ValueError(f"output_weight with a {type(layer).__name__}, whose forward takes no weight: pass logits")
        arguments["weight"] = weight
    output = layer(hidden, **arguments)
    logits: Tensor = output[0] if isinstance(output, tuple) else output  # Megatron's layers return a bias too

    local_weight = getattr(layer, "weight", None) if weight is None else weight
    if isinstance(local_weight, Tensor) and local_weight.shape[0] != logits.shape[-1]:
        raise ValueError(
            f"output_layer has {local_weight.shape[0]} rows and makes {logits.shape[-1]} logits, as if it gathered "
            "them: pass gather_output=False to the layer"
        )
    return logits


def _checked(
    tp_group: Group | None, output_layer: nn.Module, labels: Tensor | None, loss_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return (labels, bool mask or None), [b, s/cp] each; ValueError for labels or a group that do not fit."""
    if labels is None:
        raise ValueError("labels are None: pass labels=, [b, s/cp], to the model, with its output_processor")
    check_tensors({"loss_mask": loss_mask}, labels=labels)
    if labels.dim() != 2:
        raise ValueError(f"labels have shape {tuple(labels.shape)}: expected [b, s/cp], one row for packed tokens")

    # Megatron's layers know their group; a torch.nn.Linear does not.
    group_of_layer = getattr(output_layer, "tp_group", tp_group)
    if group_size(tp_group) != group_size(group_of_layer):
        raise ValueError(
            f"tp_group has {group_size(tp_group)} ranks and the output layer is split over "
            f"{group_size(group_of_layer)}: pass tp_group, the model's tensor-parallel group, to log_prob_processor"
        )

    mask = None if loss_mask is None else loss_mask != 0
    return labels, mask


def _by_columns(ids: Tensor | None, offsets: Tensor | None, labels: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The kept tokens (ids and offsets) in the order of ``labels.t()``, from the order of ``labels``.

    Ids and offsets that cannot belong to these labels are returned unchanged: the function that gets them refuses them.
    No value is read on the host.
    """
    if not isinstance(ids, Tensor) or not isinstance(offsets, Tensor):
        return ids, offsets
    # One row or one column of labels has the same order transposed.
    if min(labels.shape) < 2 or offsets.shape != (labels.numel() + 1,):
        return ids, offsets

    counts = offsets.diff()
    are_valid = (offsets[0] == 0) & (offsets[-1] == len(ids)) & (counts >= 0).all()
    order = torch.arange(labels.numel(), device=offsets.device).view(labels.shape).t().reshape(-1)
    new_offsets = torch.nn.functional.pad(counts[order].cumsum(0), (1, 0))

    # Each place of the new list of ids: its position in the new order, and from where in the old list its id comes.
    new_place = torch.arange(len(ids), device=offsets.device)
    position = torch.searchsorted(new_offsets, new_place, right=True).sub_(1).clamp_(0, len(order) - 1)
    old_place = new_place - new_offsets[position] + offsets[:-1][order][position]
    # The clamps keep indices in range for offsets that are not valid.
    new_ids = ids[old_place.long().clamp_(0, len(ids) - 1)]
    return new_ids, torch.where(are_valid, new_offsets, offsets.to(new_offsets.dtype))


@contextmanager
def forward_of(module: nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """A context in which the module's forward is another function; its hooks stay around it."""
    attributes = vars(module)
    own_forward = attributes.get("forward")  # set if others have replaced the forward of this object
    attributes["forward"] = function
    try:
        yield
    finally:
        del attributes["forward"]
        if own_forward is not None:
            attributes["forward"] = own_forward
