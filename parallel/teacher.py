"""What a teacher says about the tokens of one micro-batch, from which an output processor makes the divergence."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.parallel.arguments import check_kind, check_tensors, one_of
from megatron_rc.parallel.divergence import check_kind_of_divergence, vocab_parallel_divergence
from megatron_rc.parallel.groups import Group, group_size
from megatron_rc.parallel.linear_divergence import linear_divergence
from megatron_rc.parallel.scale_logits import factor_of
from megatron_rc.parallel.support import Support, check_support
from megatron_rc.parallel.top_k import TAILS, linear_top_k_divergence, top_k_divergence


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherStates:
    """The teacher's last hidden states and its output layer, for the divergence over the whole vocabulary.

    The teacher may have another hidden size, and other layers, than the student; the vocabulary is the student's,
    padded and split alike.

    Attributes:
        hidden_states: [s/cp, b, h_T], with sequence parallelism [s/cp/tp, b, h_T]: the input of the teacher's output
            layer, for the tokens of the student's on this rank.
        weight: [v/tp, h_T], this rank's rows of the teacher's output layer.
        bias: [v/tp], or None.
        kind: ``reverse_kl``, ``forward_kl`` or ``jsd``, as in
            :func:`~megatron_rc.parallel.divergence.vocab_parallel_divergence`.
        beta: β of ``jsd``. Default: 0.5.
        temperature: divides the teacher's logits; > 0. Default: the processor's.
        scale_logits: the function that the teacher applies to its logits; with fused log-probs a multiplication by a
            positive number. Default: none.

    Raises:
        ValueError: at construction, no tensors, another kind, or a β that is out of range or not used.
    """

    hidden_states: Tensor
    weight: Tensor
    bias: Tensor | None = None
    kind: str = "reverse_kl"
    beta: float | None = None
    temperature: float | None = None
    scale_logits: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        check_kind("hidden_states", self.hidden_states, Tensor, "the teacher's, a torch.Tensor")
        check_kind("weight", self.weight, Tensor, "that of the teacher's output layer")
        check_kind_of_divergence("kind", self.kind, "beta", self.beta)

    def by_columns(self, labels: Tensor) -> TeacherStates:
        """The same for positions in the order of ``labels.t()``, labels [b, s/cp], which hidden states have already."""
        return self

    def divergence_from_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        tp_group: Group | None,
        mask: Tensor,
        options: dict[str, Any],
        *,
        sequence_parallel: bool,
    ) -> Tensor:
        """The divergence at each position, [s/cp, b].

        Args:
            logits: [s/cp, b, v/tp], the student's.
            labels: [s/cp, b].
            tp_group: the ranks that hold the other vocabulary rows.
            mask: [s/cp, b] bool.
            options: arguments of the function, by name, that log-probs have too.
            sequence_parallel: the teacher's hidden states are sliced over ``tp_group``.

        Collectives: the function's; with sequence parallelism also one gather over ``tp_group``.
        """
        return vocab_parallel_divergence(
            logits,
            self._logits(tp_group, sequence_parallel=sequence_parallel),
            tp_group,
            kind=self.kind,
            beta=self.beta,
            mask=mask,
            teacher_temperature=self.temperature,
            **options,
        )

    def divergence_from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp_group: Group | None,
        mask: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """The divergence at each position, [s/cp, b], from the student's hidden states and weight.

        Args:
            hidden: [s/cp, b, h], with sequence parallelism [s/cp/tp, b, h].
            weight: [v/tp, h].
            labels: [s/cp, b].
            tp_group: the ranks that hold the other vocabulary rows.
            mask: [s/cp, b] bool.
            options: arguments of the function, by name, that log-probs have too.
        """
        assert self.temperature is not None  # the processor fills it in
        return linear_divergence(
            hidden,
            weight,
            self.hidden_states,
            self.weight,
            tp_group,
            teacher_bias=self.bias,
            kind=self.kind,
            beta=self.beta,
            mask=mask,
            teacher_temperature=self.temperature / factor_of(self.scale_logits),
            **options,
        )

    @torch.no_grad()
    def _logits(self, tp_group: Group | None, *, sequence_parallel: bool) -> Tensor:
        """The teacher's logits, [s/cp, b, v/tp]. Collectives: with sequence parallelism one gather over TP."""
        hidden = self.hidden_states
        size = group_size(tp_group)
        if sequence_parallel and size > 1:
            slices = hidden.contiguous()
            hidden = slices.new_empty(size * len(slices), *slices.shape[1:])
            dist.all_gather_into_tensor(hidden, slices, group=tp_group)
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return logits if self.scale_logits is None else self.scale_logits(logits)


@dataclass(frozen=True, kw_only=True, eq=False)
class TeacherTopK:
    """The teacher's log-probs of a few tokens at each position, such as an engine gives them.

    Attributes:
        ids: [n], int64, the tokens of all positions, in the order of ``labels.flatten()``, labels [b, s/cp]; this and
            the next five attributes are as in :func:`~megatron_rc.parallel.top_k.top_k_divergence`.
        offsets: [b · s/cp + 1], int64.
        log_probs: [n], float, nats, at the teacher's temperature.
        tail: ``sampled``, ``rest`` or ``none``.
        label_log_probs: [b, s/cp], float, the teacher's log-probs of the labels, for the tail ``sampled`` alone.
        kind: ``reverse_kl``, ``forward_kl`` or ``jsd``.
        beta: β of ``jsd``. Default: 0.5.

    Raises:
        ValueError: at construction, no tensors, another tail or kind, or a β that is out of range or not used.
    """

    ids: Tensor
    offsets: Tensor
    log_probs: Tensor
    tail: str
    label_log_probs: Tensor | None = None
    kind: str = "reverse_kl"
    beta: float | None = None

    def __post_init__(self) -> None:
        check_tensors(
            {"label_log_probs": self.label_log_probs}, ids=self.ids, offsets=self.offsets, log_probs=self.log_probs
        )
        one_of("tail", self.tail, TAILS)
        check_kind_of_divergence("kind", self.kind, "beta", self.beta)

    def by_columns(self, labels: Tensor) -> TeacherTopK:
        """The same for positions in the order of ``labels.t().flatten()``; ValueError if they do not fit the labels."""
        check_support(self.ids, self.offsets, labels.numel(), name="teacher")
        if self.log_probs.shape != self.ids.shape:
            raise ValueError(
                f"log_probs of the teacher have shape {tuple(self.log_probs.shape)}: expected {tuple(self.ids.shape)}, "
                "one for each of its ids"
            )
        positions = torch.arange(labels.numel(), device=labels.device).view(labels.shape).t().flatten()
        entries = torch.arange(len(self.ids), device=self.ids.device)
        reordered = Support.make(entries, self.offsets, vocab_size=len(entries), first_id=0).permuted(positions)
        return dataclasses.replace(
            self,
            ids=self.ids[reordered.ids],
            log_probs=self.log_probs[reordered.ids],
            # Offsets that were wrong stay wrong, so that the divergence is NaN.
            offsets=torch.where(reordered.valid, reordered.offsets, -1),
            label_log_probs=None if self.label_log_probs is None else self.label_log_probs.t(),
        )

    def divergence_from_logits(
        self,
        logits: Tensor,
        labels: Tensor,
        tp_group: Group | None,
        mask: Tensor,
        options: dict[str, Any],
        *,
        sequence_parallel: bool,
    ) -> Tensor:
        """As :meth:`TeacherStates.divergence_from_logits`; ``sequence_parallel`` does nothing."""
        return top_k_divergence(
            logits,
            self.ids,
            self.offsets,
            self.log_probs,
            tp_group,
            mask=mask,
            **self._arguments(labels),
            **_without_support(options),
        )

    def divergence_from_hidden(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        tp_group: Group | None,
        mask: Tensor,
        options: dict[str, Any],
    ) -> Tensor:
        """As :meth:`TeacherStates.divergence_from_hidden`."""
        return linear_top_k_divergence(
            hidden,
            weight,
            self.ids,
            self.offsets,
            self.log_probs,
            tp_group,
            mask=mask,
            **self._arguments(labels),
            **_without_support(options),
        )

    def _arguments(self, labels: Tensor) -> dict[str, Any]:
        """Arguments of the functions, by name."""
        return {
            "tail": self.tail,
            "kind": self.kind,
            "beta": self.beta,
            "labels": labels if self.tail == "sampled" else None,
            "teacher_label_log_probs": self.label_log_probs,
        }


def _without_support(options: dict[str, Any]) -> dict[str, Any]:
    """The options without those of kept tokens, which the processor has refused."""
    return {name: value for name, value in options.items() if not name.startswith("support_")}


Teacher = TeacherStates | TeacherTopK
