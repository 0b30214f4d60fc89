"""Refusal of random weights, and of one token a character, that no flag asks for."""

from __future__ import annotations

import argparse
import os

from megatron_rc.launch.checkpoint_folders import latest_iteration
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.tasks.text import CHARACTERS

# Launch file of the toy task; a run of its model on its task needs no --from-scratch.
TOY = "count_up"
_OF_MODEL_AND_TASK = ("transformer", "latent", "experts", "model", "task", "data")


def check_sources(args: argparse.Namespace) -> None:
    """Check that flags say where the weights and the tokenizer come from.

    ``args`` has the flags of the run; ``args.toy`` those of the launch file :data:`TOY`, as it is.

    Raises:
        ConfigurationError: the run would begin with random weights, or split text into characters, by mistake.
    """
    if args.from_scratch or args.load_hf or _is_toy(args):
        return
    if not args.load and not args.tokenizer_model:
        raise ConfigurationError(
            "no flag says where the weights and the tokenizer come from: give --load-hf DIR (a Hugging Face model), or "
            "--load DIR (checkpoints) and --tokenizer-model DIR; --from-scratch begins with random weights and, "
            "without --tokenizer-model, one token a character"
        )
    if not args.load:
        raise ConfigurationError(
            f"--tokenizer-model {args.tokenizer_model} brings no weights: give --load-hf DIR (a Hugging Face model) or "
            "--load DIR (checkpoints), or --from-scratch for random weights"
        )
    if _begins_empty(args.load, args.save):
        raise ConfigurationError(
            f"--load {args.load} holds no checkpoint yet, and no other flag says where the weights come from: give "
            "--load-hf DIR (a Hugging Face model), or --from-scratch for random weights"
        )
    if not args.tokenizer_model and args.tokenizer_type != CHARACTERS:
        raise ConfigurationError(
            f"--load {args.load} brings no tokenizer: give --tokenizer-model DIR, or --from-scratch for one token a "
            "character"
        )


def _is_toy(args: argparse.Namespace) -> bool:
    """Return whether all flags of the model and of the task have the toy's values."""
    options = (
        option
        for name, section, _ in sections_of(RunConfig)
        if name in _OF_MODEL_AND_TASK
        for option in options_of(section)
    )
    return all(getattr(args, option.flag) == getattr(args.toy, option.flag) for option in options)


def _begins_empty(load: str, save: str | None) -> bool:
    """Return whether a run starts at step 0 although ``--load`` is given: that is ``--save``, and empty."""
    if not save or os.path.realpath(load) != os.path.realpath(save):
        return False
    try:
        return latest_iteration(load) is None
    except (OSError, ValueError):  # the run itself says what is wrong with the folder
        return False
