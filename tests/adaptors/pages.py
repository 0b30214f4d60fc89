"""The code blocks of docs/adaptors.md, run as written, and the corrections that a micro-batch can carry out."""

import re

from megatron_rc import RolloutCorrectionConfig
from tests.support.correction_cases import CASES
from tests.support.paths import ROOT


def blocks(program, language="python"):
    """The code blocks of a program's section."""
    text = (ROOT / "docs" / "adaptors.md").read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {program}\n(.*?)(?=^## |\Z)", text, flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"^```{language}\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)


def documented(program, **names):
    """The names that the section's only block defines."""
    (block,) = blocks(program)
    exec(compile(block, f"docs/adaptors.md, {program}", "exec"), names)
    return names


def _fits(case):
    config = RolloutCorrectionConfig(**case.fields)
    needs_global_batch = config.rollout_is_batch_normalize or config.rollout_staleness_scale or config.corrects_in_loss
    # The hosts know no turns: a turn is a run of the mask.
    needs_global_batch = needs_global_batch or "turn_ids" in case.sides
    return not needs_global_batch and not any(
        criterion.unit == "prompt" or criterion.only_negative for criterion in config.criteria
    )


IN_A_MICRO_BATCH = [name for name, case in CASES.items() if _fits(case)]
