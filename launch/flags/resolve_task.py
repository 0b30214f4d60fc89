"""Task, its tokenizer, and the model's vocabulary."""

from __future__ import annotations

import argparse
import logging

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.resolve_data import prompt_data, resolve_evaluation
from megatron_rc.launch.run_config.data import EVAL_PROBLEMS
from megatron_rc.launch.tasks import Task, Text, make_task
from megatron_rc.launch.tasks.text import CHARACTERS, HUGGING_FACE, HuggingFaceText, printable_text

_log = logging.getLogger("megatron_rc")


def resolve_task(args: argparse.Namespace) -> Task:
    """Make the task, and fill in the settings that follow from it."""
    text, most = _text(args), EVAL_PROBLEMS
    if args.prompt_data:
        data = prompt_data(args, text or printable_text())
        task: Task = data
        most = data.num_held_out
    else:
        task = make_task(args.task, args.seed, text, args.seq_length, args.max_response_length)
        args.max_response_length = args.max_response_length or task.max_response_length
    resolve_evaluation(args, most)
    args.vocab_size = args.vocab_size or task.text.size
    if args.vocab_size < task.text.size:
        raise ConfigurationError(
            f"--vocab-size {args.vocab_size} is smaller than the tokenizer's {task.text.size} tokens"
        )
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    return task


def _text(args: argparse.Namespace) -> Text | None:
    """Tokenizer that the flags name; None: the task's own characters."""
    folder = args.tokenizer_model or args.load_hf
    kind = args.tokenizer_type = args.tokenizer_type or (HUGGING_FACE if folder else CHARACTERS)
    if kind == HUGGING_FACE:
        if not folder:
            raise ConfigurationError(f"--tokenizer-type {kind} needs --tokenizer-model DIR or --load-hf DIR")
        return _hugging_face_text(args, folder)
    if args.tokenizer_model:
        raise ConfigurationError(
            f"--tokenizer-model {args.tokenizer_model} does nothing with --tokenizer-type {kind}: drop one of them"
        )
    if args.apply_chat_template and "apply_chat_template" in args.typed:
        raise ConfigurationError("--apply-chat-template needs a tokenizer that has one: give --tokenizer-model DIR")
    if args.apply_chat_template:
        _drop_template(args, kind)
    return None


def _hugging_face_text(args: argparse.Namespace, folder: str) -> Text:
    typed = "apply_chat_template" in args.typed
    text = HuggingFaceText(folder, args.apply_chat_template and typed)
    if args.apply_chat_template and not text.has_template:
        _drop_template(args, f"the tokenizer in {folder}")
    text.chat = args.apply_chat_template
    return text


def _drop_template(args: argparse.Namespace, tokenizer: str) -> None:
    """Drop the launch file's template with a warning: it was meant for another tokenizer."""
    _log.warning("%s has no chat template: apply-chat-template of --config %s is dropped", tokenizer, args.config)
    args.apply_chat_template = False
