"""What is learnt, in which tokens, and how it is evaluated; see ``validation.py``."""

from __future__ import annotations

import argparse

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks import Task, Text, make_task
from megatron_rc.launch.tasks.text import CHARACTERS, HUGGING_FACE, HuggingFaceText

EVAL_PROBLEMS = 96


def check_task(args: argparse.Namespace) -> Task:
    """The task, whose prompts and tokens fit the model; fills in what depends on it."""
    task = make_task(args.task, args.seed, _check_text(args))
    args.max_response_length = args.max_response_length or task.max_response_length
    if args.max_response_length >= args.seq_length:
        raise ConfigurationError(
            f"--max-response-length {args.max_response_length} leaves no room for a prompt in --seq-length "
            f"{args.seq_length}"
        )
    room = args.seq_length - args.max_response_length
    for problem in task.problems(0, args.grpo_prompts_per_step):
        length = len(task.text.encode(problem))
        if length > room:
            raise ConfigurationError(
                f"--seq-length {args.seq_length} is too short for --task {args.task}: a prompt of {length} tokens and "
                f"a response of up to {args.max_response_length} do not fit"
            )
    _check_vocabulary(args, task)
    _check_evaluation(args, task)
    return task


def _check_vocabulary(args: argparse.Namespace, task: Task) -> None:
    tokens = task.text.size
    args.vocab_size = args.vocab_size or tokens
    if args.vocab_size < tokens:
        raise ConfigurationError(f"--vocab-size {args.vocab_size} is smaller than the tokenizer's {tokens} tokens")
    tp = args.tensor_model_parallel_size
    multiple = args.make_vocab_size_divisible_by * tp
    if args.padded_vocab_size is None:
        args.padded_vocab_size = -(-args.vocab_size // multiple) * multiple
    if args.padded_vocab_size % tp:
        raise ConfigurationError(
            f"--padded-vocab-size {args.padded_vocab_size} must be a multiple of --tensor-model-parallel-size {tp}"
        )
    if args.padded_vocab_size < args.vocab_size:
        raise ConfigurationError(
            f"--padded-vocab-size {args.padded_vocab_size} is smaller than the vocabulary of {args.vocab_size}"
        )


def _check_text(args: argparse.Namespace) -> Text | None:
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


def _check_evaluation(args: argparse.Namespace, task: Task) -> None:
    if args.eval_interval is None:
        if args.eval_problems is not None:
            raise ConfigurationError(
                f"--eval-problems {args.eval_problems} does nothing without --eval-interval: give both, or neither"
            )
        return
    args.eval_problems = args.eval_problems or EVAL_PROBLEMS
    if args.load_rollouts:
        raise ConfigurationError(
            f"--eval-interval {args.eval_interval} needs an engine, which --load-rollouts {args.load_rollouts} has "
            "not: drop one of them"
        )
    unit = args.rollout_staleness or args.updates_per_rollout
    if args.eval_interval % unit:
        raise ConfigurationError(
            f"--eval-interval {args.eval_interval} must be a multiple of the {unit} optimizer steps after which the "
            "engine gets new weights"
        )
    if args.eval_problems < args.data_parallel_size:
        raise ConfigurationError(
            f"--eval-problems {args.eval_problems} leaves some of the {args.data_parallel_size} data-parallel ranks "
            "without one: give more"
        )
    room = args.seq_length - args.max_response_length
    longest = max(len(task.text.encode(problem)) for problem in task.problems(0, args.eval_problems, held_out=True))
    if longest > room:
        raise ConfigurationError(
            f"--seq-length {args.seq_length} is too short for a held-out prompt of {longest} tokens"
        )
