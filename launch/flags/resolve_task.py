"""Task, prompts, tokenizer, vocabulary and evaluations of a run."""

from __future__ import annotations

import argparse
import dataclasses
import logging

from megatron_rc.launch.errors import ConfigurationError, flag
from megatron_rc.launch.flags.checks.task import check_room
from megatron_rc.launch.python_specs import is_python_spec
from megatron_rc.launch.run_config.data import EVAL_PROBLEMS, eval_files, keys_of_files
from megatron_rc.launch.run_config.options import as_typed
from megatron_rc.launch.tasks import Task, Text, make_task
from megatron_rc.launch.tasks.ends import STOP_TOKENS, choose_ends
from megatron_rc.launch.tasks.labels import BUILT_IN
from megatron_rc.launch.tasks.prompt_data.room import Room
from megatron_rc.launch.tasks.prompt_data.rows import RowFormat
from megatron_rc.launch.tasks.prompt_data.source import HeldOut, PromptData
from megatron_rc.launch.tasks.text import CHARACTERS, HUGGING_FACE, CharacterText, HuggingFaceText

_log = logging.getLogger("megatron_rc")
DEFAULT_TASK, DEFAULT_LABEL = "count_up", "label"


def choose_prompts(args: argparse.Namespace) -> None:
    """Choose the task or the files; a typed one takes the place of the launch file's."""
    if args.task and args.prompt_data:
        typed = {"task", "prompt_data"} & args.typed
        if len(typed) != 1:
            raise ConfigurationError(
                f"--task {args.task} and --prompt-data {' '.join(args.prompt_data)} each bring prompts: drop one of "
                "them"
            )
        if typed == {"task"}:
            args.prompt_data = args.eval_data = None
        else:
            args.task = None
    if not args.prompt_data:
        args.task = args.task or DEFAULT_TASK
        args.idle.add("prompt_data")
    args.rows_digest = None
    for name in ("prompt_data", "eval_data", "eval_input_key", "eval_label_key"):
        words = getattr(args, name)
        setattr(args, name, None if words is None else tuple(words))


def _prompt_data(args: argparse.Namespace, text: Text) -> PromptData:
    if args.max_response_length is None:
        raise ConfigurationError(
            f"--prompt-data {' '.join(args.prompt_data)} needs --max-response-length: files do not say how long "
            "responses get"
        )
    check_room(args.seq_length, args.max_response_length)
    if args.eval_interval is not None and not args.eval_data:
        raise ConfigurationError(f"--eval-interval {args.eval_interval} needs held-out prompts: give --eval-data")
    row_format = RowFormat(
        input_key=args.input_key,
        label_key=args.label_key or DEFAULT_LABEL,
        # Recorded rollouts have their rewards already.
        needs_label=args.label_key is not None or not (args.load_rollouts or is_python_spec(args.reward)),
        chat=text.chat,
        alphabet=text.alphabet if isinstance(text, CharacterText) else None,
        rule=args.reward if args.reward in BUILT_IN and not args.load_rollouts else None,
        tools_key=args.tools_key,
    )
    drops = args.overlong_prompts == "drop"
    room = Room(text, args.seq_length, args.max_response_length, drops)
    held_out = _held_out(args, row_format) if args.eval_data else []
    data = PromptData(args.prompt_data, held_out, row_format, text, args.seed, room, args.max_response_length)
    args.label_key = row_format.label_key
    args.rows_digest = data.digest
    return data


def _held_out(args: argparse.Namespace, trained: RowFormat) -> list[HeldOut]:
    """Files of held-out prompts with the keys of their rows; other requirements on rows are as in training."""
    files = eval_files(args.eval_data)
    names = [file.name for file in files]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigurationError(
            f"--eval-data {' '.join(args.eval_data)} has two files with the name {twice}, which their metrics would "
            f"have: name them, as in first={files[names.index(twice)].path}"
        )
    keys = {}
    for flag_name, default in (("eval_input_key", trained.input_key), ("eval_label_key", trained.label_key)):
        words = getattr(args, flag_name) or ()
        try:
            keys[flag_name] = keys_of_files(words, names, default)
        except ValueError as problem:
            raise ConfigurationError(f"{flag(flag_name)} {' '.join(words)} {problem}") from problem
    row_format = dataclasses.replace(
        trained,
        input_flag="--eval-input-key",
        label_flag="--eval-label-key",
        needs_label=trained.needs_label or args.eval_label_key is not None,
    )
    return [
        HeldOut(file.name, file.path, dataclasses.replace(row_format, input_key=input_key, label_key=label_key))
        for file, input_key, label_key in zip(files, keys["eval_input_key"], keys["eval_label_key"], strict=True)
    ]


def resolve_task(args: argparse.Namespace) -> Task:
    """Make the task, and fill in the settings that follow from it."""
    text, most = _text(args), EVAL_PROBLEMS
    if args.prompt_data:
        data = _prompt_data(args, text or CharacterText())
        task: Task = data
        most = data.num_held_out
    else:
        task = make_task(args.task, args.seed, text, args.seq_length, args.max_response_length)
        args.max_response_length = args.max_response_length or task.max_response_length
    args.eval_problems = args.eval_problems or most
    if args.eval_temperature is None and args.eval_samples > 1:
        args.eval_temperature = args.rl_default_temperature
    args.vocab_size = args.vocab_size or task.text.size
    if args.vocab_size < task.text.size:
        raise ConfigurationError(_too_few_rows(args, task.text.size))
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    _resolve_ends(args, task.text)
    return task


def _too_few_rows(args: argparse.Namespace, tokens: int) -> str:
    """Say that the tokenizer has more tokens than the model has embeddings."""
    if args.load_hf is None:
        return f"--vocab-size {args.vocab_size} is smaller than the tokenizer's {tokens} tokens"
    return (
        f"--load-hf {args.load_hf}: the model has {args.vocab_size} embeddings (vocab_size in config.json), fewer than "
        f"the tokenizer's {tokens} tokens: give the model's own tokenizer as --tokenizer-model, or a model whose "
        "embeddings were resized to it"
    )


def _resolve_ends(args: argparse.Namespace, text: Text) -> None:
    """Fix what ends a response, for the whole run."""
    for name in ("rollout_stop_token_ids", "rollout_no_stop_token_ids", "rollout_stop"):
        values = getattr(args, name)
        if values is not None:
            setattr(args, name, tuple(values))
    added = {STOP_TOKENS: args.rollout_stop_token_ids or ()}
    text.ends = choose_ends(
        text.end_tokens_by_source(args.load_hf) | added,
        decode=text.decode,
        vocab_size=args.vocab_size,
        removed=args.rollout_no_stop_token_ids or (),
        strings=args.rollout_stop or (),
    )
    text.skip_special_tokens = args.rollout_skip_special_tokens
    args.end_token_ids = text.ends.token_ids


def _text(args: argparse.Namespace) -> Text | None:
    """Tokenizer that the flags name; None: the task's own characters."""
    folder = args.tokenizer_model or args.load_hf
    kind = args.tokenizer_type = args.tokenizer_type or (HUGGING_FACE if folder else CHARACTERS)
    if kind == HUGGING_FACE:
        if not folder:
            raise ConfigurationError(f"--tokenizer-type {kind} needs --tokenizer-model DIR or --load-hf DIR")
        typed = "apply_chat_template" in args.typed
        text = HuggingFaceText(folder, args.apply_chat_template and typed)
        if args.apply_chat_template and not text.has_template:
            _drop_template(args, f"the tokenizer in {folder}")
        text.chat = args.apply_chat_template
        if args.chat_template_kwargs is not None:
            text.use_template_kwargs(args.chat_template_kwargs)
        if args.tools_key is not None:
            text.check_template_reads("tools", f"--tools-key {args.tools_key}")
        return text
    if args.tokenizer_model:
        raise ConfigurationError(
            f"--tokenizer-model {args.tokenizer_model} does nothing with --tokenizer-type {kind}: drop one of them"
        )
    if args.apply_chat_template and "apply_chat_template" in args.typed:
        raise ConfigurationError("--apply-chat-template needs a tokenizer that has one: give --tokenizer-model DIR")
    if args.apply_chat_template:
        _drop_template(args, kind)
    return None


def _drop_template(args: argparse.Namespace, tokenizer: str) -> None:
    """Drop the launch file's template, and what it is given, with a warning: it was meant for another tokenizer.

    Raises:
        ConfigurationError: what it is given was typed.
    """
    _log.warning("%s has no chat template: apply-chat-template of --config %s is dropped", tokenizer, args.config)
    args.apply_chat_template = False
    for name in ("chat_template_kwargs", "tools_key"):
        if name in args.typed:
            raise ConfigurationError(
                f"{as_typed(name, getattr(args, name))} needs a chat template, which {tokenizer} does not have: drop it"
            )
        setattr(args, name, None)
