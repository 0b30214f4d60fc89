"""What a rule is: what it needs, when it holds, what it says, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megatron_rc.doctor.facts import Facts
from megatron_rc.doctor.other_words import WORDS


@dataclass(frozen=True)
class Rule:
    """One thing that can be wrong.

    Attributes:
        name: of the fault.
        title: the same in words.
        needs: facts without which it cannot be looked at; any one of these lists is enough.
        holds: whether the facts show the fault; a comparison with a missing fact is false.
        when: the same in words, with its thresholds.
        words: what was found; facts stand in it as ``{name}``.
        advice: what to do; flags stand in it by their name in ``WORDS``.
        sources: where the test and its thresholds come from.
        unless: names of rules that explain the same numbers better: where one of them holds, this one does not.
        repair: whether the data are wrong, so that no correction makes up for it.
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
        """What to do, in the words of a program's settings."""
        return self.advice.format_map(WORDS[dialect])

    def can_be_looked_at(self, facts: Facts) -> bool:
        """Whether there is enough to say that the fault is not there."""
        return any(facts.has(*names) for names in self.needs)


@dataclass(frozen=True)
class Verdict:
    """A rule that holds, with what it says of the numbers that it was given."""

    rule: Rule
    words: str
    numbers: dict[str, float]
