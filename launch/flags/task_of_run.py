"""Task, prompts, tokenizer, vocabulary and evaluations of a run."""

from __future__ import annotations

import dataclasses
import logging

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.task import check_room
from megatron_rc.launch.flags.command import Command, Values
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.run_config.data import EVAL_PROBLEMS, eval_files
from megatron_rc.launch.run_config.options import as_typed
from megatron_rc.launch.tasks import Task, Text, make_task
from megatron_rc.launch.tasks.ends import STOP_TOKENS, choose_ends
from megatron_rc.launch.tasks.labels import BUILT_IN
from megatron_rc.launch.tasks.prompt_data.room import Room
from megatron_rc.launch.tasks.prompt_data.rows import RowFormat
from megatron_rc.launch.tasks.prompt_data.source import HeldOut, PromptData
from megatron_rc.launch.tasks.text import CHARACTERS, HUGGING_FACE, CharacterText, HuggingFaceText

_log = logging.getLogger("megatron_rc")
DEFAULT_TASK = "count_up"
DEFAULT_LABEL = "label"


def with_prompts(values: Values) -> Values:
    """Return the values with the task or the files that the prompts come from, and not both."""
    if values.task and values.prompt_data:
        raise ConfigurationError(
            f"{as_typed('task', values.task)} and {as_typed('prompt_data', values.prompt_data)} each bring prompts: "
            "drop one of them"
        )
    if values.prompt_data:
        return values
    return values.also({"task": values.task or DEFAULT_TASK})


def make_task_of_run(command: Command, values: Values) -> tuple[Task, Values]:
    """Make the task with its tokenizer, and return it with the values that follow from it."""
    text, values = _tokenizer(command, values)
    rows_digest = None
    if values.prompt_data:
        data = _prompt_data(values, text or CharacterText())
        task: Task = data
        num_held_out = data.num_held_out
        rows_digest = data.digest
        values = values.also({"label_key": values.label_key or DEFAULT_LABEL})
    else:
        task = make_task(values.task, values.seed, text, values.seq_length, values.max_response_length)
        num_held_out = EVAL_PROBLEMS

    vocab_size = values.vocab_size or task.text.size
    if vocab_size < task.text.size:
        raise ConfigurationError(_too_few_embeddings(values, task.text.size))
    eval_temperature = values.eval_temperature
    if eval_temperature is None and values.eval_samples > 1:
        eval_temperature = values.rl_default_temperature
    multiple = values.make_vocab_size_divisible_by * values.tensor_model_parallel_size
    padded_vocab_size = -(-vocab_size // multiple) * multiple

    values = values.also(
        {
            "rows_digest": rows_digest,
            "max_response_length": values.max_response_length or task.max_response_length,
            "eval_problems": values.eval_problems or num_held_out or EVAL_PROBLEMS,
            "eval_temperature": eval_temperature,
            "vocab_size": vocab_size,
            "padded_vocab_size": values.padded_vocab_size or padded_vocab_size,
        }
    )
    # What ends a response is fixed for the whole run.
    task.text.ends = choose_ends(
        {**task.text.end_tokens_by_source(values.load_hf), STOP_TOKENS: values.rollout_stop_token_ids or ()},
        decode=task.text.decode,
        vocab_size=vocab_size,
        removed=values.rollout_no_stop_token_ids or (),
        strings=values.rollout_stop or (),
    )
    task.text.skip_special_tokens = values.rollout_skip_special_tokens
    return task, values.also({"end_token_ids": task.text.ends.token_ids})


def _tokenizer(command: Command, values: Values) -> tuple[Text | None, Values]:
    """Return the tokenizer that the flags name, and the values with its type and the chat template's.

    Without a tokenizer the task's own characters are used.
    """
    folder = values.tokenizer_model or values.load_hf
    kind = values.tokenizer_type or (HUGGING_FACE if folder else CHARACTERS)
    is_typed = "apply_chat_template" in command.typed
    values = values.also({"tokenizer_type": kind})
    if kind != HUGGING_FACE:
        if values.tokenizer_model:
            raise ConfigurationError(
                f"--tokenizer-model {folder} does nothing with --tokenizer-type {kind}: drop one of them"
            )
        if values.apply_chat_template and is_typed:
            raise ConfigurationError("--apply-chat-template needs a tokenizer that has one: give --tokenizer-model DIR")
        return None, _without_template(command, values, kind) if values.apply_chat_template else values
    if not folder:
        raise ConfigurationError(f"--tokenizer-type {kind} needs --tokenizer-model DIR or --load-hf DIR")
    text = HuggingFaceText(folder, chat=False)
    if values.apply_chat_template and not text.has_template:
        if is_typed:
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer in {folder} has no chat_template: drop the flag"
            )
        values = _without_template(command, values, f"the tokenizer in {folder}")
    text.chat = values.apply_chat_template
    if values.chat_template_kwargs is not None:
        text.use_template_kwargs(values.chat_template_kwargs)
    if values.tools_key is not None:
        text.check_template_reads("tools", f"--tools-key {values.tools_key}")
    return text, values


def _without_template(command: Command, values: Values, tokenizer: str) -> Values:
    """Drop the launch file's template, and what it is given, with a warning: it was meant for another tokenizer."""
    _log.warning("%s has no chat template: apply-chat-template of --config %s is dropped", tokenizer, values.config)
    for name in ("chat_template_kwargs", "tools_key"):
        if name in command.typed:
            raise ConfigurationError(
                f"{as_typed(name, values[name])} needs a chat template, which {tokenizer} does not have: drop it"
            )
    return values.also({"apply_chat_template": False, "chat_template_kwargs": None, "tools_key": None})


def _prompt_data(values: Values, text: Text) -> PromptData:
    typed = as_typed("prompt_data", values.prompt_data)
    if values.max_response_length is None:
        raise ConfigurationError(f"{typed} needs --max-response-length: files do not say how long responses get")
    check_room(values.seq_length, values.max_response_length)
    if values.eval_interval is not None and not values.eval_data:
        raise ConfigurationError(f"--eval-interval {values.eval_interval} needs held-out prompts: give --eval-data")
    row_format = RowFormat(
        input_key=values.input_key,
        label_key=values.label_key or DEFAULT_LABEL,
        # Recorded rollouts have their rewards already.
        needs_label=values.label_key is not None or not (values.load_rollouts or is_python_spec(values.reward)),
        chat=text.chat,
        alphabet=text.alphabet if isinstance(text, CharacterText) else None,
        rule=values.reward if values.reward in BUILT_IN and not values.load_rollouts else None,
        tools_key=values.tools_key,
    )
    room = Room(text, values.seq_length, values.max_response_length, values.overlong_prompts == "drop")
    held_out = _held_out(values, row_format) if values.eval_data else []
    return PromptData(values.prompt_data, held_out, row_format, text, values.seed, room, values.max_response_length)


def _held_out(values: Values, trained: RowFormat) -> list[HeldOut]:
    """Return files of held-out prompts with the keys of their rows; other requirements on rows are as in training."""
    files = eval_files(values.eval_data)
    names = [file.name for file in files]
    for number, name in enumerate(names):
        if names.count(name) > 1:
            raise ConfigurationError(
                f"{as_typed('eval_data', values.eval_data)} has two files with the name {name}, which their metrics "
                f"would have: name them, as in first={files[number].path}"
            )
    input_keys = _keys_of_files(values, "eval_input_key", names, trained.input_key)
    label_keys = _keys_of_files(values, "eval_label_key", names, trained.label_key)
    row_format = dataclasses.replace(
        trained,
        input_flag="--eval-input-key",
        label_flag="--eval-label-key",
        needs_label=trained.needs_label or values.eval_label_key is not None,
    )
    return [
        HeldOut(file.name, file.path, dataclasses.replace(row_format, input_key=input_key, label_key=label_key))
        for file, input_key, label_key in zip(files, input_keys, label_keys, strict=True)
    ]


def _keys_of_files(values: Values, flag_name: str, names: list[str], default: str) -> list[str]:
    """Return the key for each of the named files, from words KEY, for all files, or NAME=KEY, for one."""
    typed = as_typed(flag_name, values[flag_name])
    keys = dict[str, str]()
    for word in values[flag_name] or ():
        name, equals, key = word.rpartition("=")
        if equals and name not in names:
            raise ConfigurationError(f"{typed} names no file of --eval-data: {name!r} is none of {', '.join(names)}")
        if name in keys:
            raise ConfigurationError(f"{typed} gives two keys for {name or 'all files'}")
        keys[name] = key
    return [keys.get(name, keys.get("", default)) for name in names]


def _too_few_embeddings(values: Values, tokens: int) -> str:
    """Say that the tokenizer has more tokens than the model has embeddings."""
    if values.load_hf is None:
        return f"--vocab-size {values.vocab_size} is smaller than the tokenizer's {tokens} tokens"
    return (
        f"--load-hf {values.load_hf}: the model has {values.vocab_size} embeddings (vocab_size in config.json), fewer "
        f"than the tokenizer's {tokens} tokens: give the model's own tokenizer as --tokenizer-model, or a model whose "
        "embeddings were resized to it"
    )
