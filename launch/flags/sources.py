"""Refusal of random weights, and of one token a character, that no flag asks for."""

from __future__ import annotations

import os

from megatron_rc.launch.checkpoint_folders import latest_iteration
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.command import Values
from megatron_rc.launch.tasks.text import CHARACTERS


def check_sources(values: Values) -> None:
    """Check that flags say where the weights and the tokenizer come from.

    Raises:
        ConfigurationError: the run would begin with random weights, or split text into characters, by mistake.
    """
    load = values.load
    tokenizer = values.tokenizer_model
    if values.from_scratch or values.load_hf:
        return
    if load and not _begins_empty(load, values.save):
        if tokenizer or values.tokenizer_type == CHARACTERS:
            return
        raise ConfigurationError(
            f"--load {load} brings no tokenizer: give --tokenizer-model DIR, or --from-scratch for one token a "
            "character"
        )
    if load:
        begins = f"--load {load} holds no checkpoint yet, and no other flag says where the weights come from"
    elif tokenizer:
        begins = f"--tokenizer-model {tokenizer} brings no weights"
    else:
        begins = "no flag says where the weights and the tokenizer come from"
    raise ConfigurationError(
        f"{begins}: give --load-hf DIR (a Hugging Face model), or --load DIR (checkpoints) and --tokenizer-model DIR; "
        "--from-scratch begins with random weights and, without --tokenizer-model, one token a character"
    )


def _begins_empty(load: str, save: str | None) -> bool:
    """Return whether a run starts at step 0 although ``--load`` is given: that is ``--save``, and empty."""
    if not save or os.path.realpath(load) != os.path.realpath(save):
        return False
    try:
        return latest_iteration(load) is None
    except (OSError, ValueError):  # the run itself says what is wrong with the folder
        return False
