"""Teachers of a distillation: frozen models of their own size, which score the rollout batch before the update.

A teacher has the policy's process groups, and passes through Megatron's schedule as the policy does. Between its passes
its weights are in host memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rc.launch.rollouts.sampler import TeacherInput
from megatron_rc.launch.rollouts.teacher_prompts import batch_of_teacher
from megatron_rc.launch.rollouts.teacher_scores import TeacherScores
from megatron_rc.launch.run_config import RunConfig, TeacherModel
from megatron_rc.launch.run_config.distillation import DistillationSection
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.training.batches.micro_batches import LocalBatch, LocalTokens, cut_batch, with_teacher_scores
from megatron_rc.launch.training.batches.teacher_alignment import TeacherAlignment
from megatron_rc.launch.training.checkpoints.load import read_weights, start_from
from megatron_rc.launch.training.models.build import build_chunks
from megatron_rc.launch.training.models.chunk import ModelChunk
from megatron_rc.launch.training.models.offload import Offload
from megatron_rc.launch.training.models.passes import ModelPasses
from megatron_rc.launch.weights.named_weights import kept_buffers, named_weights
from megatron_rc.parallel import ParallelGroups, TeacherStates, TeacherTopK
from megatron_rc.parallel.groups import Group, group_rank, group_size
from megatron_rc.records.rollout import RolloutBatch
from megatron_rc.records.support import offsets_of


class Teacher:
    """One teacher on this rank.

    Args:
        model: its settings.
        groups: this rank's groups.
        padded_vocab_size: rows of the policy's output layer on all ranks of TP.
        is_compared: a divergence from the teacher is computed, and needs its output layer.

    Attributes:
        output_weight: [v/tp, h] of the teacher's output layer, the rows that this rank holds of the policy's, on the
            device all the time; None before the last stage, and without a divergence.

    Collectives: those of loading; with a divergence one gather over ``tp``, if the teacher has more rows than the
    policy.
    """

    def __init__(
        self, model: TeacherModel, groups: ParallelGroups, *, padded_vocab_size: int, is_compared: bool
    ) -> None:
        self.model = model
        self.chunks = _frozen_chunks(model, groups)
        self.passes = ModelPasses(model.config, groups)
        self.output_weight = _output_weight(self.chunks[-1]) if is_compared else None
        if self.output_weight is not None and model.config.model.padded_vocab_size != padded_vocab_size:
            self.output_weight = _rows_of_policy(self.output_weight, padded_vocab_size, groups.tp)
        self._offload = Offload(self._offloaded)
        self._offload.away()

    def log_probs(self, batch: LocalBatch, temperature: float) -> Tensor | None:
        """Log-probs of the labels, like the tokens; None on stages before the last."""
        with self._offload.here():
            scored = self.passes.score(self.chunks, batch, temperature)
        return None if scored is None else scored.log_probs

    def hidden_states(self, batch: LocalBatch) -> Tensor | None:
        """Last hidden states of all micro-batches, as ``LocalTokens.teacher_hidden``; None before the last stage."""
        with self._offload.here():
            hidden = self.passes.hidden_states(self.chunks, batch)
        return torch.stack(hidden) if hidden else None

    def _offloaded(self) -> Iterator[Tensor]:
        """The weights that wait in host memory: all but the output layer, unless ``output_weight`` is a copy of it."""
        resident = None if self.output_weight is None else self.output_weight.data_ptr()
        for chunk in self.chunks:
            for weight in named_weights(chunk).values():
                if weight.data_ptr() != resident:
                    yield weight


def _frozen_chunks(model: TeacherModel, groups: ParallelGroups) -> list[ModelChunk]:
    """Build the teacher's chunks on this rank's device, and load their weights."""
    config = model.config
    transformer = build_transformer_config(config)
    # No random initialization, because all weights are loaded.
    transformer.perform_initialization = False
    chunks = build_chunks(config, transformer)
    for chunk in chunks:
        # Float16Module converts the policy: learned positions are made in float32, whatever the dtype.
        chunk.to(config.dtype)
        for buffer in kept_buffers(chunk).values():  # the experts' bias, which stays float32
            buffer.data = buffer.data.float()
        chunk.requires_grad_(False)
        chunk.eval()
    _load(model, groups, chunks)
    return chunks


def _load(model: TeacherModel, groups: ParallelGroups, chunks: Sequence[ModelChunk]) -> None:
    """Read the teacher's weights; ValueError names the flag and the folder."""
    stored = model.config.changed(model={"vocab_size": model.embedding_rows})
    if model.flag == "--teacher-load":
        read_weights(model.folder, stored, model.flag, chunks)
    else:
        start_from(model.folder, model.flag, stored, groups, chunks)


def _output_weight(chunk: Any) -> Tensor | None:
    """The weight of a chunk's output layer, [v/tp, h]; None if it has none."""
    if not chunk.post_process:
        return None
    if chunk.share_embeddings_and_output_weights:
        weight: Tensor = chunk.shared_embedding_or_output_weight()
        return weight.detach()
    own_weight: Tensor = chunk.output_layer.weight
    return own_weight.detach()


def _rows_of_policy(weight: Tensor, padded_vocab_size: int, tp_group: Group | None) -> Tensor:
    """Return the rows of an output layer that this rank holds of the policy's, [v/tp, h]; 0 where there are none.

    Args:
        weight: [rows of the teacher/tp, h], this rank's.
        padded_vocab_size: rows of the policy's output layer on all ranks of TP.
        tp_group: the ranks with the other rows.

    Collectives: one gather over ``tp_group``.
    """
    size = group_size(tp_group)
    all_rows = weight.new_zeros(max(size * len(weight), padded_vocab_size), weight.shape[1])
    of_teacher = all_rows[: size * len(weight)]
    if size > 1:
        dist.all_gather_into_tensor(of_teacher, weight.contiguous(), group=tp_group)
    else:
        of_teacher.copy_(weight)
    # A copy, so that the other ranks' rows are freed.
    return all_rows[:padded_vocab_size].chunk(size)[group_rank(tp_group)].clone()


class Teachers:
    """The teachers of a run, and what the loss and the advantages need of them."""

    def __init__(self, config: RunConfig, settings: DistillationSection, groups: ParallelGroups) -> None:
        self.config = config
        self.settings = settings
        self.groups = groups
        rows = config.model.padded_vocab_size
        self.teachers = [
            Teacher(model, groups, padded_vocab_size=rows, is_compared=config.loss.distils) for model in config.teachers
        ]

    def scored(self, rollouts: RolloutBatch, batch: LocalBatch, teacher_input: TeacherInput | None) -> LocalBatch:
        """The batch with all that the loss and the advantages need of the teachers, on the last stage.

        Args:
            rollouts: the rollout batch.
            batch: this rank's tokens of it.
            teacher_input: log-probs of a teacher that is no model of this run, or the rows that teachers with prompts
                of their own read; None: they read the policy's rows.

        Collectives: those of a forward-only pass of each teacher, and of :class:`TeacherAlignment` if rows are given.
        """
        if isinstance(teacher_input, TeacherScores):
            return with_teacher_scores(batch, teacher_input)
        batch_of_pass = batch
        alignment = None
        if teacher_input is not None:
            batch_of_pass = cut_batch(batch_of_teacher(rollouts, teacher_input), self.config, self.groups)
            alignment = TeacherAlignment(
                policy=batch,
                teacher=batch_of_pass,
                shifts=teacher_input.shifts,
                length=rollouts.tokens.shape[1],
                groups=self.groups,
                sequence_parallel=self.config.parallel.sequence_parallel,
            )

        local = batch.local
        if self.config.loss.distils:
            (teacher,) = self.teachers
            hidden = teacher.hidden_states(batch_of_pass)
            if hidden is not None and alignment is not None:
                hidden = alignment.hidden_states(hidden)
            local = dataclasses.replace(local, teacher_hidden=hidden)
        if self.config.advantages.needs_teachers:
            of_teachers = []
            for teacher in self.teachers:
                log_probs = teacher.log_probs(batch_of_pass, self.settings.teacher_temperature)
                if log_probs is not None:
                    of_teachers.append(log_probs if alignment is None else alignment.log_probs(log_probs))
            if of_teachers:
                local = dataclasses.replace(local, teacher_log_probs=torch.stack(of_teachers, dim=-1))
        return dataclasses.replace(batch, local=local)

    def of_micro_batch(self, local: LocalTokens) -> TeacherStates | TeacherTopK | None:
        """The teacher as the divergence of a micro-batch needs it; None before the last stage."""
        loss = self.config.loss
        if local.teacher_top_ids is not None:
            return self._top_k(local)
        hidden = local.teacher_hidden
        weight = self.teachers[0].output_weight
        if hidden is None or weight is None:
            return None
        return TeacherStates(
            hidden_states=hidden,
            weight=weight,
            kind=loss.distillation_kind,
            beta=loss.distillation_beta,
            temperature=self.settings.teacher_temperature,
        )

    def _top_k(self, local: LocalTokens) -> TeacherTopK:
        """The likeliest tokens of a teacher that is no model of this run."""
        ids = _required(local.teacher_top_ids)
        label_log_probs = _required(local.teacher_log_probs)[..., 0]
        tail = self.settings.teacher_tail
        # The processor has packed tokens in one row.
        rows = label_log_probs if label_log_probs.dim() == 2 else label_log_probs.unsqueeze(0)
        return TeacherTopK(
            ids=ids.long(),
            offsets=offsets_of(_required(local.teacher_top_counts)),
            log_probs=_required(local.teacher_top_log_probs),
            tail=tail,
            kind=self.config.loss.distillation_kind,
            beta=self.config.loss.distillation_beta,
            label_log_probs=rows if tail == "sampled" else None,
        )


def _required(values: Tensor | None) -> Tensor:
    """Return the values; RuntimeError if they are missing, which the checks of the flags exclude."""
    if values is None:
        raise RuntimeError("a micro-batch has a teacher's likeliest tokens without all of their log-probs")
    return values
