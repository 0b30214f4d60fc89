"""Settings of the teachers' models: the run's own, with the shape of another model."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from megatron_rc.launch.checkpoint_folders import existing_iteration, iteration_folder
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.megatron import FIELDS_OF_THE_MODEL
from megatron_rc.launch.flags.checks.weights import NO_BRIDGE
from megatron_rc.launch.flags.command import Values, values_of_directory
from megatron_rc.launch.flags.follow import with_model_defaults
from megatron_rc.launch.flags.parser import defaults
from megatron_rc.launch.flags.stored import SECTIONS_OF_THE_MODEL, stored_config
from megatron_rc.launch.flags.unused import make_sections, without_unused
from megatron_rc.launch.run_config import RunConfig, TeacherModel, flag_options
from megatron_rc.launch.run_config.distillation import DistillationSection
from megatron_rc.launch.tasks.text import HUGGING_FACE

# Fields of Megatron's configs that spread a number of layers over the stages.
_OF_STAGES = (
    "pipeline_model_parallel_layout",
    "num_layers_in_first_pipeline_stage",
    "num_layers_in_last_pipeline_stage",
)


def teacher_models(config: RunConfig, settings: DistillationSection, values: Values) -> Iterator[TeacherModel]:
    """Yield each teacher that this run loads, those of directories first.

    A teacher has the run's layout, precision and batches; its layers are spread evenly over the stages.

    Args:
        config: settings of the run.
        settings: its teachers.
        values: values of the run's flags.

    Raises:
        ConfigurationError: the model of a directory or a checkpoint is not known here, or its vocabulary is smaller
            than the policy's.
    """
    for folder in settings.teacher_load_hf or ():
        sections = _of_directory(folder, values, config)
        yield _teacher("--teacher-load-hf", folder, config, sections, tokenizer=folder)
    for folder in settings.teacher_load or ():
        stored = _of_checkpoint(folder)
        sections = {name: getattr(stored, name) for name in SECTIONS_OF_THE_MODEL}
        tokenizer = None
        if stored.task.tokenizer_type == HUGGING_FACE:
            tokenizer = stored.task.tokenizer_model or stored.checkpoints.load_hf
        yield _teacher("--teacher-load", folder, config, sections, tokenizer=tokenizer)


def _of_directory(folder: str, values: Values, config: RunConfig) -> dict[str, Any]:
    """Return the sections with the shape of the model in a Hugging Face directory."""
    of_model = values_of_directory(folder, "--teacher-load-hf")
    default_values = defaults()
    flags_of_model = [option.flag for name, option in flag_options().values() if name in SECTIONS_OF_THE_MODEL]
    reset = {flag: default_values[flag] for flag in flags_of_model}
    of_teacher, _ = without_unused(values.also(reset).also(of_model), {})
    of_teacher = with_model_defaults(of_teacher)
    vocab_size = of_teacher.vocab_size or config.model.vocab_size
    of_teacher = of_teacher.also({"vocab_size": vocab_size, "padded_vocab_size": vocab_size})
    return make_sections(of_teacher, SECTIONS_OF_THE_MODEL)


def _of_checkpoint(folder: str) -> RunConfig:
    """Return the settings of the newest checkpoint of a folder."""
    where = f"--teacher-load {folder}"
    try:
        number = existing_iteration(folder, "--teacher-load")
        return stored_config(iteration_folder(folder, number))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _teacher(
    flag: str, folder: str, config: RunConfig, sections: dict[str, Any], *, tokenizer: str | None
) -> TeacherModel:
    """Return a teacher with the run's settings and the shape of these sections."""
    embedding_rows = sections["model"].vocab_size
    vocab_size = config.model.vocab_size
    if embedding_rows < vocab_size:
        raise ConfigurationError(
            f"{flag} {folder}: the teacher has {embedding_rows} tokens and the policy {vocab_size}, so that "
            "their distributions cannot be compared: give a teacher with the policy's vocabulary"
        )
    # With as many rows as the policy, the ranks of TP hold the same rows of both vocabularies.
    padded_vocab_size = config.model.padded_vocab_size
    if embedding_rows > vocab_size:
        multiple = config.model.make_vocab_size_divisible_by * config.parallel.tensor_model_parallel_size
        padded_vocab_size = -(-embedding_rows // multiple) * multiple
    model = dataclasses.replace(
        sections["model"],
        vocab_size=vocab_size,
        padded_vocab_size=padded_vocab_size,
        transformer_impl=config.model.transformer_impl,
        kind=config.model.kind,
    )
    fields = {
        name: value
        for name, value in config.megatron.given.items()
        if name not in FIELDS_OF_THE_MODEL and name not in _OF_STAGES
    }
    of_teacher = dataclasses.replace(
        config,
        **(sections | {"model": model}),
        routing=None,
        critic=None,
    )
    return TeacherModel(
        flag=flag,
        folder=folder,
        config=of_teacher.changed(megatron={"given": fields}, checkpoints={"weights_bridge": NO_BRIDGE}),
        embedding_rows=embedding_rows,
        tokenizer=tokenizer,
    )
