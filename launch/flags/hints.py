"""Hints for an unknown flag or key: the name of the same setting here, by its spelling or by other programs' names."""

from __future__ import annotations

import difflib

from megatron_rc.launch.flags.parser import build_parser, long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser

# The names that users of slime, verl and other programs type most, and that are not spelled alike.
_OF_OTHER_PROGRAMS = {
    "hf-checkpoint": "load-hf",
    "rollout-batch-size": "grpo-prompts-per-step",
    "train-batch-size": "grpo-prompts-per-step",
    "n-samples-per-prompt": "grpo-group-size",
    "ppo-mini-batch-size": "global-batch-size",
    "num-rollout": "train-iters",
    "rollout-max-response-len": "max-response-length",
    "eps-clip": "grpo-clamp-eps-lower",
    "kl-loss-coef": "grpo-kl-beta",
    "use-tis": "rollout-correction-preset",
    "tis-clip": "rollout-is-threshold",
    "use-rollout-logprobs": "bypass-mode",
    "learning-rate": "lr",
    "tp": "tensor-model-parallel-size",
    "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size",
    "ep": "expert-model-parallel-size",
}
# Flags of the release before, with what takes their place.
_REMOVED = {"load-last-valid": "name a whole checkpoint with --ckpt-step"}
# The section of verl's settings that files of --rollout-correction-config have.
_SECTION_OF_VERL = "rollout_correction"
# Least likeness of similar spellings, by difflib, and of a name that has one word more than a flag.
_CLOSE = 0.8
_VERY_CLOSE = 0.9
# Letters of a short form such as --seq-len. Names with fewer are compared with flags letter by letter.
_FEWEST_LETTERS = 3


def unknown(what: str, name: str) -> str:
    """Return a sentence about an unknown flag or key, with the flag that was probably meant.

    Args:
        what: ``flag`` or ``key``.
        name: the flag, the key, or an override of Hydra's with its value, such as ``trainer.nnodes=1``.
    """
    name = name.partition("=")[0]
    if _SECTION_OF_VERL in name.lstrip("+").split("."):
        return (
            f"unknown {what} {name!r}: Hydra's overrides of the correction go into a file: "
            "--rollout-correction-config FILE --rollout-correction-dialect verl"
        )
    remedy = _REMOVED.get(name.lstrip("-").removeprefix("no-").replace("_", "-"))
    if remedy is not None:
        return f"{what} {name!r} is gone: {remedy}"
    dashes = "--" if what == "flag" else ""
    meant = _meant(name.lstrip("-").replace("_", "-").lower())
    if meant is not None and name == f"{dashes}{meant}":
        return f"{what} {name!r} belongs to the command line of python -m megatron_rc.launch: give it there"
    hint = "--help-all lists them" if meant is None else f"did you mean {dashes}{meant}?"
    return f"unknown {what} {name!r}: {hint}"


def _meant(name: str) -> str | None:
    """Return the flag that a name stands for; None if there is none."""
    flags = [*long_options(build_parser()), *long_options(torchrun_parser())]
    flag_of_name = {flag: flag for flag in flags} | _OF_OTHER_PROGRAMS
    # Of nested settings of other programs, such as actor.optim.lr, the last word.
    name = name.rpartition(".")[2]
    if name in flag_of_name:
        return flag_of_name[name]
    long_names = [flag for flag in flag_of_name if flag in flags or len(flag) >= _FEWEST_LETTERS]
    similar = difflib.get_close_matches(name, long_names, n=5, cutoff=_CLOSE)
    return next((flag_of_name[flag] for flag in similar if _is_close(name, flag)), None)


def _is_close(name: str, flag: str) -> bool:
    """Return whether two similar names are alike behind the words that both begin with: --rollout-stop is no -top-p."""
    words_of_name = name.split("-")
    words_of_flag = flag.split("-")
    shared = 0
    while shared < min(len(words_of_name), len(words_of_flag)) and words_of_name[shared] == words_of_flag[shared]:
        shared += 1
    rest_of_name = "-".join(words_of_name[shared:])
    rest_of_flag = "-".join(words_of_flag[shared:])
    if not rest_of_name:
        # The beginning of a flag, as --tensor-model-parallel.
        return shared > 1
    if not rest_of_flag:
        return shared > 1 and _likeness(name, flag) >= _VERY_CLOSE
    shorter, longer = sorted((rest_of_name, rest_of_flag), key=len)
    is_short_form = len(shorter) >= _FEWEST_LETTERS and longer.startswith(shorter)
    return is_short_form or _likeness(rest_of_name, rest_of_flag) >= _CLOSE


def _likeness(name: str, other: str) -> float:
    return difflib.SequenceMatcher(None, name, other).ratio()
