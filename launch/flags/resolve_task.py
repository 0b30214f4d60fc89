"""The task, its tokenizer and the vocabulary that the model gets for it."""

from __future__ import annotations

import argparse

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config.rollouts import EVAL_PROBLEMS
from megatron_rc.launch.tasks import Task, Text, make_task
from megatron_rc.launch.tasks.text import CHARACTERS, HUGGING_FACE, HuggingFaceText


def resolve_task(args: argparse.Namespace) -> Task:
    """Make the task; fill in what depends on it and was not given.

    Raises:
        ConfigurationError: no such task or tokenizer, a vocabulary that is too small for it, or a flag that does
            nothing.
    """
    task = make_task(args.task, args.seed, _text(args), args.seq_length, args.max_response_length)
    args.max_response_length = args.max_response_length or task.max_response_length
    args.vocab_size = args.vocab_size or task.text.size
    if args.vocab_size < task.text.size:
        raise ConfigurationError(
            f"--vocab-size {args.vocab_size} is smaller than the tokenizer's {task.text.size} tokens"
        )
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if args.eval_problems is not None and args.eval_interval is None:
        raise ConfigurationError(
            f"--eval-problems {args.eval_problems} does nothing without --eval-interval: give both, or neither"
        )
    args.eval_problems = args.eval_problems or EVAL_PROBLEMS
    return task


def _text(args: argparse.Namespace) -> Text | None:
    """The tokenizer that the flags name; None: the task's own characters."""
    folder, chat = args.tokenizer_model or args.load_hf, args.apply_chat_template
    kind = args.tokenizer_type = args.tokenizer_type or (HUGGING_FACE if folder else CHARACTERS)
    if kind == HUGGING_FACE:
        if not folder:
            raise ConfigurationError(f"--tokenizer-type {kind} needs --tokenizer-model DIR or --load-hf DIR")
        return HuggingFaceText(folder, chat)
    if args.tokenizer_model:
        raise ConfigurationError(
            f"--tokenizer-model {args.tokenizer_model} does nothing with --tokenizer-type {kind}: drop one of them"
        )
    if chat:
        raise ConfigurationError("--apply-chat-template needs a tokenizer that has one: give --tokenizer-model DIR")
    return None
