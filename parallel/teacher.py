"""What a teacher says about the tokens of one micro-batch, from which an output processor makes the divergence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.parallel.arguments import check_kind
from megatron_rc.parallel.divergence import check_kind_of_divergence
from megatron_rc.parallel.groups import Group, group_size


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

    @torch.no_grad()
    def logits(self, tp_group: Group | None, *, sequence_parallel: bool) -> Tensor:
        """The teacher's logits, [s/cp, b, v/tp]. Collectives: with sequence parallelism one gather over TP."""
        hidden = self.hidden_states
        size = group_size(tp_group)
        if sequence_parallel and size > 1:
            slices = hidden.contiguous()
            hidden = slices.new_empty(size * len(slices), *slices.shape[1:])
            dist.all_gather_into_tensor(hidden, slices, group=tp_group)
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        return logits if self.scale_logits is None else self.scale_logits(logits)
