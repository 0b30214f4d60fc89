"""Rules of the doctor, and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.other_words import WORDS

REPAIR = "repair"  # the data are wrong, and no correction can replace the repair
CORRECT = "correct"  # the run needs a correction, or another setting of it
WEIGHTS = "weights"  # nothing is broken; weights of another level would use more of the batch


@dataclass(frozen=True)
class Rule:
    """A fault, and the test for it."""

    name: str
    title: str  # the fault in words
    needs: tuple[tuple[str, ...], ...]  # lists of facts; the test needs all facts of any one list
    holds: Callable[[Facts], bool]  # the test; comparisons with a missing fact are False
    words: str  # the finding, with facts as ``{name}``
    advice: str  # the remedy, with names from ``WORDS`` as ``{name}``
    sources: str  # publications of the test and its thresholds
    unless: tuple[str, ...] = ()  # rules that explain the same numbers better: if one holds, this rule is silent
    kind: str = CORRECT

    def advice_in(self, dialect: str) -> str:
        """The remedy with the names of a program's settings."""
        return self.advice.format_map(WORDS[dialect])

    def can_be_looked_at(self, facts: Facts) -> bool:
        """Whether the facts suffice for the test."""
        return any(facts.has(*names) for names in self.needs)


@dataclass(frozen=True)
class Verdict:
    """A rule that holds, with its sentence and its numbers."""

    rule: Rule
    words: str
    numbers: dict[str, float]
