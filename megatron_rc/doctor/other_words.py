"""Settings and advice in the words of other programs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects import BY_NAME
from megatron_rc.settings.dialects.writer import written

OWN = "megatron_rc"
_SIGNAL = "more prompts a step, other prompts for those whose rewards are alike, a warm-up or a lower learning rate"
_OTHERS = {"signal": _SIGNAL, "scale": ""}
_VERL = {
    **_OTHERS,
    "temperature": "actor_rollout_ref.rollout.temperature",
    "staleness": "async_training.staleness_threshold",
    "veto": "rollout_token_veto_threshold",
    "record": "old_log_probs beside rollout_log_probs",
}
# Names that advice uses, for each dialect.
WORDS: Mapping[str, Mapping[str, str]] = {
    OWN: {
        "signal": "more prompts a step (--grpo-prompts-per-step), other prompts for those whose rewards are alike "
        "(--dynamic-sampling), a warm-up (--lr-warmup-iters) or a lower --lr",
        "temperature": "--rl-default-temperature",
        "staleness": "--rollout-staleness",
        "scale": ", or widen the bounds by staleness with --rollout-staleness-scale",
        "veto": "--rollout-token-veto-threshold",
        "record": "--save-rollouts DIR --save-log-probs",
    },
    "verl": _VERL,
    "verl-2025-11": _VERL,
    "verl-2025-10": {**_VERL, "veto": "rollout_is_veto_threshold"},
    "slime": {
        **_OTHERS,
        "temperature": "--rollout-temperature",
        "staleness": "--update-weights-interval",
        "veto": "rs_veto_threshold",
        "record": "log_probs beside rollout_log_probs",
    },
    "nemo-rl": {
        **_OTHERS,
        "temperature": "policy.generation.temperature",
        "staleness": "grpo.async_grpo.max_trajectory_age_steps",
        "veto": "seq_logprob_error_threshold",
        "record": "prev_logprobs beside generation_logprobs",
    },
}
_OF_FLAGS = ("use_tis", "tis_clip", "tis_clip_low", "use_opsm", "opsm_delta", "use_rollout_logprobs")


def settings_lines(config: RolloutCorrectionConfig, dialect: str) -> list[str]:
    """A correction as lines of another program's settings (YAML or flags); comments list fields it does not have."""
    fields, lost = written(config, dialect)
    if dialect == "slime" and fields.keys() <= set(_OF_FLAGS):
        lines = [" ".join(_flag(name, value) for name, value in fields.items() if value is not False) or "no --use-tis"]
    elif dialect == "slime":
        path = "--use-tis --custom-tis-function-path megatron_rc.adaptors.slime.correct"
        lines = [f"# the file of --custom-config-path, beside {path}", *_yaml(fields)]
    else:
        lines = _in_sections(fields, dialect)
    return lines + [f"# {dialect} cannot say {one}" for one in lost]


def _in_sections(fields: Mapping[str, Any], dialect: str) -> list[str]:
    program, lines = BY_NAME[dialect], []
    for section, names in program.elsewhere.items():
        there = {name: fields[name] for name in names if name in fields}
        if there:
            # The same setting of another algorithm has a section of its own.
            others = [other for other, same in program.elsewhere.items() if same == names and other != section]
            heading = f"{section}:"
            if others:
                heading += f"  # in a run of {' or '.join(others)}: {' or '.join(others)}"
            lines += [heading, *(f"  {line}" for line in _yaml(there))]
            fields = {name: value for name, value in fields.items() if name not in there}
    for depth, section in enumerate(program.sections if fields else ()):
        lines.append(f"{'  ' * depth}{section}:")
    return lines + [f"{'  ' * len(program.sections)}{line}" for line in _yaml(fields)]


def _yaml(fields: Mapping[str, Any]) -> list[str]:
    """YAML lines; texts are quoted, since YAML reads 0.5_2.0 as a number."""
    return [f"{name}: {json.dumps(value)}" for name, value in fields.items()]


def _flag(name: str, value: Any) -> str:
    flag = f"--{name.replace('_', '-')}"
    return flag if value is True else f"{flag} {value}"
