"""Log-probs for a trainer of another project: one request with all that it knows, one answer.

The trainer keeps its layout and its loss. It says how its tensors are laid out, and gets results of its labels' shape.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from megatron_rc.parallel.arguments import check_kind, one_of
from megatron_rc.parallel.groups import Group
from megatron_rc.parallel.processor import log_prob_processor
from megatron_rc.parallel.scale_logits import factor_of
from megatron_rc.parallel.vocab import vocab_parallel_log_probs_and_entropy

_log = logging.getLogger("megatron_rc")
# Layers that multiply hidden states by their weight and do nothing else; peft's LoRA layer has the name Linear too.
_PLAIN_LAYERS = ("torch.nn.modules.linear.Linear", "megatron.core.tensor_parallel.layers.ColumnParallelLinear")


class LogProbs(NamedTuple):
    """The answer: float32 (float64 for float64), differentiable, of the labels' shape, equal on all ranks of TP."""

    log_probs: Tensor  # log π of each label; 0 for tokens outside of the mask
    entropy: Tensor  # over the whole vocabulary, in nats; 0 for tokens outside of the mask


@dataclass(frozen=True, kw_only=True, eq=False)
class LogProbRequest:
    """A request for the log-probs and entropies of one micro-batch, from its logits or its hidden states.

    ``layout`` is the order of the dimensions of ``logits`` and ``hidden_states`` before the last one: ``bs`` for
    [b, s, ...], ``sb`` for [s, b, ...] as in Megatron, ``t`` for [t, ...] of packed sequences. Labels and mask are
    [b, s], or [t]. s and t are tokens of this context-parallel rank.

    Attributes:
        labels: int64, indices into the whole vocabulary, equal on all ranks of ``tp_group``.
        layout: the order of the dimensions.
        logits: [..., v/tp], this rank's columns; None: from hidden states.
        hidden_states: [..., h]; with an output layer that has sequence parallelism this rank's tokens, [s/tp, b, h].
        output_layer: the layer that makes logits of the hidden states, Megatron's or a ``torch.nn.Linear``.
        output_weight: [v/tp, h], the weight of tied embeddings; default: the layer's own.
        scale_logits: the function that the model applies to its logits, such as muP's factor or a soft cap.
        mask: bool or number, 0 for tokens that do not count. Default: all count, except the label -100.
        tp_group: the ranks that hold the other columns.
        vocab_size: columns at and above it are padding and have probability 0. Default: all columns count.
        temperature: divides the logits; > 0.
        support_ids: the tokens that the engine kept, as in
            :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`. Default: the whole vocabulary.
        support_offsets: [labels + 1], int64.
    """

    labels: Tensor
    layout: Literal["bs", "sb", "t"]
    logits: Tensor | None = None
    hidden_states: Tensor | None = None
    output_layer: nn.Module | None = None
    output_weight: Tensor | None = None
    scale_logits: Callable[[Tensor], Tensor] | None = None
    mask: Tensor | None = None
    tp_group: Group | None = None
    vocab_size: int | None = None
    temperature: float = 1.0
    support_ids: Tensor | None = None
    support_offsets: Tensor | None = None

    def __post_init__(self) -> None:
        one_of("layout", self.layout, ("bs", "sb", "t"))
        check_kind("labels", self.labels, Tensor, "the shifted tokens")
        if (self.logits is None) == (self.hidden_states is None):
            raise ValueError("logits and hidden_states: pass one of them")
        if self.hidden_states is not None and self.output_layer is None:
            raise ValueError("hidden_states without output_layer: pass the layer that makes logits of them")

    def answer(self, mode: Literal["strict", "auto"] = "strict") -> LogProbs:
        """The log-probs and entropies.

        Hidden states are multiplied in chunks, so that logits are never stored. That needs an output layer that
        multiplies, adds a bias, and does nothing else. For another one ``strict`` raises, and ``auto`` stores the
        logits and logs one warning.

        Collectives: those of :func:`~megatron_rc.parallel.linear.linear_log_probs_and_entropy`, or of
        :func:`~megatron_rc.parallel.vocab.vocab_parallel_log_probs_and_entropy`, over ``tp_group``.

        Raises:
            ValueError: with ``strict``, an output layer that does more than multiply; another mode; and the errors of
                the two functions.
        """
        one_of("mode", mode, ("strict", "auto"))
        if self.logits is not None:
            return self._of_logits(self.logits)
        reason = self._why_logits_are_needed()
        if reason is not None and mode == "strict":
            raise ValueError(f"{reason}, so that its logits must be stored: pass mode='auto' or logits")
        if reason is not None:
            _warn_once(reason)
        return self._of_hidden_states(fused=reason is None)

    @property
    def _options(self) -> dict[str, Any]:
        """Arguments, by name, that the processor and the function on logits share."""
        return {
            "vocab_size": self.vocab_size,
            "temperature": self.temperature,
            "support_ids": self.support_ids,
            "support_offsets": self.support_offsets,
        }

    def _of_hidden_states(self, *, fused: bool) -> LogProbs:
        """The answer from hidden states; with ``fused`` no logits are stored."""
        hidden = self.hidden_states
        labels = self.labels
        mask = self.mask
        assert hidden is not None
        # The processor takes Megatron's form: hidden states [s, b, h], labels and mask [b, s].
        if self.layout == "t":
            hidden = hidden.unsqueeze(1)
            labels = labels.unsqueeze(0)
            mask = None if mask is None else mask.unsqueeze(0)
        elif self.layout == "bs":
            hidden = hidden.transpose(0, 1)

        processor = log_prob_processor(self.tp_group, fused=fused, **self._options)
        log_probs, entropy = processor(
            hidden_states=hidden,
            output_layer=self.output_layer,
            output_weight=self.output_weight,
            labels=labels,
            loss_mask=mask,
            scale_logits=self.scale_logits,
            config=getattr(self.output_layer, "config", None),
        )
        return LogProbs(log_probs.view(self.labels.shape), entropy.view(self.labels.shape))

    def _of_logits(self, logits: Tensor) -> LogProbs:
        """The answer from logits, in the request's layout."""
        if self.scale_logits is not None:
            logits = self.scale_logits(logits)
        if self.layout == "sb":
            logits = logits.transpose(0, 1)
        mask = None if self.mask is None else self.mask != 0
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(
            logits, self.labels, self.tp_group, mask=mask, **self._options
        )
        return LogProbs(log_probs, entropy)

    def _why_logits_are_needed(self) -> str | None:
        """The reason why the output layer cannot be replaced by a product with its weight; None if it can."""
        layer = self.output_layer
        assert layer is not None
        name = f"{type(layer).__module__}.{type(layer).__qualname__}"
        if name not in _PLAIN_LAYERS:
            return f"output_layer is a {name}, which may do more than multiply"
        # A forward that was set on this object, or a hook that may change the logits.
        if "forward" in vars(layer) or layer._forward_hooks:
            return f"output_layer is a {name} with another forward or with forward hooks"
        if self.output_weight is None and getattr(layer, "weight", None) is None:
            return f"output_layer is a {name} without a weight"
        try:
            factor_of(self.scale_logits)
        except ValueError as error:
            return str(error)
        return None


@functools.cache
def _warn_once(reason: str) -> None:
    """Log one warning for each reason: the cache ends later calls."""
    _log.warning("%s: the logits are stored", reason)
