"""Comparison of another program's translated settings with expected fields."""

from megatron_rc.settings.config import RolloutCorrectionConfig
from megatron_rc.settings.dialects import translate


def reads(dialect, given, expected, *parts):
    """Assert that settings become these fields, with exactly one note for each of ``parts``, which contains it."""
    config, notes = translate(given, dialect)
    assert RolloutCorrectionConfig.from_dict(config, "megatron_rc") == RolloutCorrectionConfig(**expected)
    assert notes[0].startswith(f"read as {dialect}: rollout_is={config['rollout_is']!r}")
    assert len(notes) == 1 + len(parts), notes
    for part in parts:
        assert any(part in note for note in notes[1:]), (part, notes)
    assert all("\n" not in note for note in notes)
