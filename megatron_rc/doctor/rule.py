"""Rules of the doctor, and verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.other_words import WORDS


@dataclass(frozen=True)
class Rule:
    """A fault, and the test for it.

    Attributes:
        name: name of the fault.
        title: the fault in words.
        needs: lists of facts; the test needs all facts of any one list.
        holds: the test; comparisons with a missing fact are False.
        when: the test in words, with its thresholds.
        words: the finding, with facts as ``{name}``.
        advice: the remedy, with names from ``WORDS`` as ``{name}``.
        sources: publications of the test and its thresholds.
        unless: rules that explain the same numbers better; if one of them holds, this rule is silent.
        repair: the data are wrong, and no correction can replace the repair.
    """

    name: str
    title: str
    needs: tuple[tuple[str, ...], ...]
    holds: Callable[[Facts], bool]
    when: str
    words: str
    advice: str
    sources: str
    unless: tuple[str, ...] = ()
    repair: bool = False

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
