"""Checked settings of a run, in frozen sections.

A field is declared once, in its section, under the name of its flag or of Megatron's field. Only ``flags/`` makes a
RunConfig of flags; other modules take a RunConfig or one of its sections.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_type_hints

import torch

from megatron_rc.advantages.estimators import GROUP_ESTIMATORS
from megatron_rc.launch.resolved_file import ResolvedFlag
from megatron_rc.launch.run_config.data import DataSection, EvaluationSection
from megatron_rc.launch.run_config.distillation import DistillationSection
from megatron_rc.launch.run_config.guards import GuardSection
from megatron_rc.launch.run_config.layer_patterns import layers_of_layout, number_or_pattern
from megatron_rc.launch.run_config.learning import AdvantageSection, CriticSection, ReferenceSection, RewardSection
from megatron_rc.launch.run_config.megatron import (
    ComputeSection,
    ExpertSection,
    LatentSection,
    MegatronSection,
    OptimizerSection,
    ParallelSection,
    RoutingSection,
    TransformerSection,
    YarnSection,
)
from megatron_rc.launch.run_config.megatron_fields import MegatronField, megatron_fields
from megatron_rc.launch.run_config.options import Option, Section, as_typed, options_of, parts_of
from megatron_rc.launch.run_config.rollouts import EngineSection, RolloutSection, TaskSection
from megatron_rc.launch.run_config.training import (
    CheckpointSection,
    LaunchSection,
    LoggingSection,
    ModelSection,
    ScheduleSection,
    TrainingSection,
)
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.settings.config import RolloutCorrectionConfig


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run; ``flags.configure`` makes and checks it."""

    launch: LaunchSection
    parallel: ParallelSection
    transformer: TransformerSection
    latent: LatentSection | None  # multi-latent attention; None: plain attention
    yarn: YarnSection | None  # YaRN's rotary frequencies without latent attention; None: others
    experts: ExpertSection | None  # mixture of experts; None: a dense model
    routing: RoutingSection | None  # replay of the experts' choice; None: the router chooses in every pass
    compute: ComputeSection
    megatron: MegatronSection
    model: ModelSection
    training: TrainingSection
    optimizer: OptimizerSection
    schedule: ScheduleSection
    critic: CriticSection | None  # value model; None: advantages come from rewards alone
    guards: GuardSection
    checkpoints: CheckpointSection
    logging: LoggingSection
    reference: ReferenceSection
    distillation: DistillationSection | None  # teachers of the policy; None: there is none
    task: TaskSection
    rewards: RewardSection
    advantages: AdvantageSection
    data: DataSection
    evaluation: EvaluationSection
    rollouts: RolloutSection
    engine: EngineSection
    correction: RolloutCorrectionConfig  # Rollout Correction
    loss: PolicyLossConfig  # objective
    # Every resolved flag, from which the other attributes follow.
    flags: tuple[ResolvedFlag, ...] = field(default=(), compare=False, repr=False)
    # Flags that were given and do nothing in this run, as typed, each with the reason.
    unused: tuple[str, ...] = field(default=(), compare=False, repr=False)
    # Teachers whose weights this run loads; they follow from the flags and from the teachers' files.
    teachers: tuple[TeacherModel, ...] = field(default=(), compare=False, repr=False)

    @property
    def data_parallel_size(self) -> int:
        """Number of replicas of the model."""
        return self.launch.world_size // self.parallel.model_size

    @property
    def updates_per_rollout(self) -> int:
        """Number of optimizer steps that use one rollout batch."""
        return self.rollouts.sequences // self.training.global_batch_size * self.rollouts.grpo_iterations

    @property
    def layers_of_chunks(self) -> list[int]:
        """Number of layers of each model chunk, in the order of the layers.

        Chunk ``i`` lies on pipeline stage ``i % stages``, and is virtual stage ``i // stages`` there.
        """
        stages = self.parallel.pipeline_model_parallel_size
        chunks = self.parallel.chunks_of_a_stage
        layout = self.megatron.given.get("pipeline_model_parallel_layout")
        ends = self.megatron.layers_at_ends
        if layout is not None:
            return layers_of_layout(layout, stages, self.transformer.num_layers)
        layers_between = self.transformer.num_layers - sum(layers or 0 for layers in ends)
        stages_between = stages - sum(layers is not None for layers in ends)
        even = layers_between // max(stages_between, 1)
        layers_of_stages = [even] * stages
        for stage, layers in zip((0, -1), ends, strict=True):
            if layers is not None:
                layers_of_stages[stage] = layers
        return [layers // chunks for layers in layers_of_stages] * chunks

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Number of ranks that split the matrices of one expert."""
        return self.megatron.expert_tensor_parallel_size or self.parallel.tensor_model_parallel_size

    @property
    def layers_with_experts(self) -> list[bool]:
        """For each layer, whether it has experts; a given list may not have ``num_layers`` entries."""
        if self.experts is None:
            return [False] * self.transformer.num_layers
        pattern = number_or_pattern(self.experts.moe_layer_freq)
        if isinstance(pattern, int):
            return [layer % pattern == 0 for layer in range(self.transformer.num_layers)]
        return [bool(kind) for kind in pattern]

    @property
    def stages_of_layers(self) -> list[int]:
        """For each layer, its pipeline stage."""
        stages = self.parallel.pipeline_model_parallel_size
        return [number % stages for number, layers in enumerate(self.layers_of_chunks) for _ in range(layers)]

    def expert_layers_of_stage(self, stage: int) -> list[int]:
        """Numbers of the layers with experts on a pipeline stage."""
        stages_and_kinds = zip(self.stages_of_layers, self.layers_with_experts, strict=True)
        return [
            layer
            for layer, (stage_of_layer, has_experts) in enumerate(stages_and_kinds)
            if has_experts and stage_of_layer == stage
        ]

    @property
    def needs_reference(self) -> bool:
        """Whether the loss or the rewards contain a KL to the reference policy."""
        return bool(self.loss.kl_coef or self.advantages.kl_in_reward)

    @property
    def has_teacher_scores(self) -> bool:
        """Whether a teacher's log-probs come from a server or from files, not from a model of this run."""
        settings = self.distillation
        return settings is not None and bool(settings.teacher_url or settings.teacher_files)

    @property
    def has_teacher_input(self) -> bool:
        """Whether a rollout batch comes with a teacher's log-probs, or with prompts of the teacher's own."""
        return self.has_teacher_scores or (self.distillation is not None and bool(self.distillation.teacher_prompt))

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's computation."""
        return torch.bfloat16 if self.compute.bf16 else torch.float16 if self.compute.fp16 else torch.float32

    @property
    def has_auxiliary_losses(self) -> bool:
        """Whether the model adds losses of its own to the gradients."""
        return self.experts is not None and self.experts.has_auxiliary_losses

    @property
    def replays_rollouts(self) -> bool:
        """Whether the rollouts' records must have the experts that the engine chose for each token."""
        return self.routing is not None and self.routing.moe_routing_replay_source == "rollout"

    @property
    def has_turn_rewards(self) -> bool:
        """Whether the advantages depend on the turn that a part of a reward came with."""
        has_turns = self.rollouts.max_turns > 1 or self.rollouts.load_rollouts is not None
        return has_turns and self.advantages.advantage_estimator not in GROUP_ESTIMATORS

    def changed(self, **sections: Mapping[str, Any]) -> RunConfig:
        """Return these settings with other values in fields of these sections."""
        changed = {name: dataclasses.replace(getattr(self, name), **fields) for name, fields in sections.items()}
        return dataclasses.replace(self, **changed)

    def value_of(self, flag: str) -> Any:
        """Return the value of a flag, named without dashes; None if its section is absent."""
        name, option = flag_options()[flag]
        section = getattr(self, name)
        if section is None:
            return None
        value = getattr(section, option.field)
        return not value if option.inverted else value

    def typed(self, *names: str) -> str:
        """Return flags with their values, as typed and joined by " with "; names have underscores."""
        return " with ".join(map(self._typed, names))

    def _typed(self, name: str) -> str:
        if name in self.megatron.given:
            return passed_through()[name].as_flag(self.megatron.given[name])
        return as_typed(name, self.value_of(name.replace("_", "-")))


@dataclass(frozen=True, kw_only=True)
class TeacherModel:
    """A teacher whose weights the run loads."""

    flag: str  # flag that names the folder
    folder: str  # a Hugging Face directory, or a folder of checkpoints
    config: RunConfig  # the run's settings with the shape of the teacher, and the policy's number of tokens
    # Rows of the folder's embedding without Megatron's padding. Rows behind the policy's tokens hold no token.
    embedding_rows: int
    # Folder of its tokenizer; None: one token a character. A checkpoint's tokenizer may not be there any more.
    tokenizer: str | None


@functools.cache
def sections_of(config: type[RunConfig]) -> list[tuple[str, type, bool]]:
    """Return name and class of every section of the launcher, in order, and whether it may be absent."""
    sections = []
    for name, hint in get_type_hints(config).items():
        kind = parts_of(hint)[0]
        if isinstance(kind, type) and issubclass(kind, Section):
            sections.append((name, kind, kind is not hint))
    return sections


@functools.cache
def flag_options() -> dict[str, tuple[str, Option]]:
    """Return section name and option of every declared flag, by the flag's name without dashes."""
    return {
        option.flag.replace("_", "-"): (name, option)
        for name, section, _ in sections_of(RunConfig)
        for option in options_of(section)
    }


@functools.cache
def passed_through() -> dict[str, MegatronField]:
    """Return fields of Megatron's configs that no section declares; their flags go unchanged into those configs.

    Megatron-Core is imported.
    """
    declared_fields = {option.field for _, option in flag_options().values()}
    declared_flags = set(flag_options())
    return {
        name: field
        for name, field in megatron_fields().items()
        if name not in declared_fields and declared_flags.isdisjoint(field.on)
    }
