"""Checks of the teachers of a distillation: their sources, sizes and tokenizers, and who uses them."""

from __future__ import annotations

import logging
from pathlib import Path

from megatron_rc.launch.engines.teacher_server import SERVED_TEMPERATURE
from megatron_rc.launch.errors import ConfigurationError, require_multiple
from megatron_rc.launch.flags.checks.experts import check_experts
from megatron_rc.launch.flags.checks.megatron import check_megatron
from megatron_rc.launch.flags.checks.model import check_model
from megatron_rc.launch.flags.checks.rollouts import check_addresses
from megatron_rc.launch.rollouts.recorded import find_rollouts
from megatron_rc.launch.rollouts.teacher_prompts import prompt_function
from megatron_rc.launch.rollouts.teacher_scores import check_header, read_scores
from megatron_rc.launch.run_config import RunConfig, TeacherModel
from megatron_rc.launch.run_config.distillation import DistillationSection
from megatron_rc.launch.tasks import Task
from megatron_rc.launch.tasks.text import HuggingFaceText

_TEACHERS = "give --teacher-load-hf, --teacher-load, --teacher-url or --teacher-files"
_log = logging.getLogger("megatron_rc")


def check_teachers(config: RunConfig, task: Task) -> None:
    """Check that there are teachers if the loss or the advantages need them, and that they can be compared."""
    user = _user_of_teachers(config)
    settings = config.distillation
    if settings is None:
        if user is not None:
            raise ConfigurationError(f"{user} needs a teacher: {_TEACHERS}")
        return
    typed = _source(config, settings)
    if user is None:
        raise ConfigurationError(
            f"{typed} does nothing: give --distillation-coef, --policy-loss distill or --advantage-estimator "
            "distillation, or drop it"
        )
    loss_flag = _loss_with_teacher(config)
    if loss_flag is not None and settings.num_teachers > 1:
        raise ConfigurationError(
            f"{typed} names {settings.num_teachers} teachers, and {loss_flag} takes one: drop the others, or use "
            "--advantage-estimator distillation alone"
        )
    if settings.teacher_prompt:
        prompt_function(settings.teacher_prompt)
    if config.has_teacher_scores:
        _check_scores(config, settings, typed, user)
    for teacher in config.teachers:
        _check_model(config, teacher)
        _check_tokenizer(config, task, teacher)


def _user_of_teachers(config: RunConfig) -> str | None:
    """Return the flag that needs a teacher; None if there is none."""
    if config.advantages.needs_teachers:
        return config.typed("advantage_estimator")
    return _loss_with_teacher(config)


def _loss_with_teacher(config: RunConfig) -> str | None:
    """Return the flag of a loss that needs a teacher; None if there is none."""
    if not config.loss.distils:
        return None
    if config.loss.distillation_coef:
        return f"--distillation-coef {config.loss.distillation_coef:g}"
    return f"--policy-loss {config.loss.algorithm}"


def _source(config: RunConfig, settings: DistillationSection) -> str:
    """Return the flag that names the teachers, with its value; both kinds of models are one kind of source."""
    models = "teacher_load_hf" if settings.teacher_load_hf else "teacher_load"
    sources = [name for name in (models, "teacher_url", "teacher_files") if getattr(settings, name)]
    if len(sources) > 1:
        raise ConfigurationError(f"{config.typed(*sources)} are two kinds of teachers: drop one of them")
    return config.typed(sources[0])


def _check_scores(config: RunConfig, settings: DistillationSection, typed: str, user: str) -> None:
    """Check log-probs that come from servers or from files.

    ``typed`` is the flag that names them, with its value; ``user`` the one that needs them.
    """
    if config.rollouts.replays_sampling:
        raise ConfigurationError(
            f"{typed} gives log-probs over all tokens, and --rollout-top-p, --rollout-top-k and --rollout-min-p "
            f"sample from some: {user} needs one distribution, so sample from all tokens or use --teacher-load-hf"
        )
    if settings.teacher_files:
        _check_files(config, settings)
    if settings.teacher_url:
        _check_servers(config, settings)


def _check_servers(config: RunConfig, settings: DistillationSection) -> None:
    """Check the addresses of the teacher's servers, and the temperature of their log-probs."""
    check_addresses(config, "teacher_url", "give one for each; they may be the same")
    typed = config.typed("teacher_url")
    if settings.teacher_temperature != SERVED_TEMPERATURE:
        raise ConfigurationError(
            f"{config.typed('teacher_temperature')} with {typed}: servers give log-probs at temperature "
            f"{SERVED_TEMPERATURE:g} alone; give --teacher-temperature {SERVED_TEMPERATURE:g}, or load the teacher "
            "with --teacher-load-hf"
        )
    if settings.save_teacher and not config.rollouts.save_rollouts:
        raise ConfigurationError(
            f"{config.typed('save_teacher')} needs --save-rollouts, whose tokens the log-probs belong to: give both"
        )


def _check_files(config: RunConfig, settings: DistillationSection) -> None:
    """Check that recorded log-probs are there for all recorded rollouts, at the run's temperature."""
    typed = config.typed("teacher_files")
    rollouts = config.rollouts.load_rollouts
    if not rollouts:
        raise ConfigurationError(f"{typed} needs --load-rollouts, the rollouts that the teacher scored: give both")
    try:
        for files in find_rollouts(rollouts).values():
            for path in files:
                header = read_scores(Path(settings.teacher_files or "") / path.name)[1]
                check_header(header, str(Path(settings.teacher_files or "") / path.name), config, settings)
    except ValueError as error:
        raise ConfigurationError(f"{typed}: {error}") from error


def _check_model(config: RunConfig, teacher: TeacherModel) -> None:
    """Check that the teacher's layers fit the run's layout and sequences."""
    where = f"{teacher.flag} {teacher.folder}"
    try:
        require_multiple(
            "num_layers",
            teacher.config.transformer.num_layers,
            "pipeline_model_parallel_size",
            config.parallel.pipeline_model_parallel_size,
            factor=config.parallel.chunks_of_a_stage,
        )
        check_model(teacher.config)
        check_experts(teacher.config)
        check_megatron(teacher.config)
    except ConfigurationError as error:
        raise ConfigurationError(f"{where}: {error}") from error


def _check_tokenizer(config: RunConfig, task: Task, teacher: TeacherModel) -> None:
    """Check that each token of the run's tokenizer has the same id in the teacher's.

    A teacher may know further tokens. A tokenizer that is not there is one line in the log.

    The teacher's embedding may have more rows than the policy's: models of a series are padded differently. Then its
    tokenizer must be there, and have no token in the further rows, which the divergence leaves out.
    """
    where = f"{teacher.flag} {teacher.folder}"
    vocab_size = config.model.vocab_size
    has_further_rows = teacher.embedding_rows > vocab_size
    sizes = f"the teacher has {teacher.embedding_rows} embedding rows and the policy {vocab_size}"
    folder = teacher.tokenizer
    names = ("tokenizer.json", "tokenizer_config.json")
    if folder is None or not any((Path(folder) / name).is_file() for name in names):
        if has_further_rows:
            remedy = "put the teacher's tokenizer into its directory"
            if teacher.flag == "--teacher-load":
                remedy = "put the teacher's tokenizer into the directory of its run's --tokenizer-model"
            raise ConfigurationError(
                f"{where}: {sizes}, and without a tokenizer it is unknown whether the further rows are tokens: "
                f"{remedy}, or give a teacher with the policy's vocabulary"
            )
        _log.warning("%s: the teacher's tokenizer is not there, so that it is not known to be the policy's", where)
        return
    ids_of_teacher = HuggingFaceText(folder, chat=False).tokenizer.get_vocab()
    for token, number in task.text.tokenizer.get_vocab().items():
        if ids_of_teacher.get(token) != number:
            raise ConfigurationError(
                f"{where} has another tokenizer than the policy: the token {token!r} has the id {number} in the "
                f"policy's and {ids_of_teacher.get(token)} in the teacher's; give a teacher with the policy's tokenizer"
            )
    last_token = max(ids_of_teacher, key=lambda token: ids_of_teacher[token])
    if has_further_rows and ids_of_teacher[last_token] >= vocab_size:
        raise ConfigurationError(
            f"{where}: {sizes}, and its token {last_token!r} has the id {ids_of_teacher[last_token]}, so that their "
            "distributions cannot be compared: give a teacher with the policy's vocabulary"
        )
