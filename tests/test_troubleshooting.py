"""docs/troubleshooting.md quotes sentences, metrics and flags that are there."""

import functools
import re

import pytest

from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.support.documented import undocumented
from tests.support.paths import LINKED, ROOT

TEXT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PREFIXES = ("rollout_is_", "rollout_rs_", "log_ratio_", "chi2_", "policy/", "perf/", "reward/", "rollout/")
QUOTED = sorted({" ".join(text.split()) for text in re.findall(r'"([^"]+)"', TEXT)})


@functools.cache
def sources():
    """The text of each source; strings over several lines are one, and what is filled in is …."""
    texts = []
    for folder in ("megatron_rc", *LINKED):
        for path in (ROOT / folder).rglob("*.py"):
            text = re.sub(r'"\s*\n\s*f?"', "", path.read_text(encoding="utf-8"))
            texts.append(re.sub(r"\{[^{}\n]*\}", "…", text))
    return texts


def is_said(quoted):
    """Whether a line of the sources has all pieces of it, in their order."""
    pieces = ".*".join(re.escape(piece.strip()) for piece in quoted.split("…"))
    return any(re.search(pieces, text) for text in sources())


@pytest.mark.parametrize("quoted", QUOTED)
def test_the_program_says_so(quoted):
    assert is_said(quoted)
    assert len(QUOTED) > 20
    assert not is_said("checkpoint … is broken")


def test_presets_and_metrics_exist():
    for name in re.findall(r"`((?:decoupled|bypass|trust)_\w+)`", TEXT):
        assert RolloutCorrectionConfig.preset(name)
    named = {name for name in re.findall(r"`([\w/<>]+)`", TEXT) if name.startswith(PREFIXES)}
    assert len(named) > 20
    assert not undocumented(name for name in named if "/" in name)
    metrics = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name in (re.sub(r"_p\d\d$", "_p<percent>", name) for name in named if "/" not in name):
        stem, _, last = name.rpartition("_")
        assert f"`{name}`" in metrics or re.search(rf"`{stem}_\w+`, `_{last}`", metrics), name
