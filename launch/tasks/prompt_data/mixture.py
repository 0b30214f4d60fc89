"""Several files as one sequence of prompts: which file a number falls to, and in which order its rows come.

Both follow from the seed and the number alone, so every rank and every resumed run draws the same prompts without
having drawn those before.
"""

from __future__ import annotations

import math
import os
import random
from array import array
from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations

from megatron_rc.launch.errors import ConfigurationError

Part = tuple[str, "Fraction | None"]


def parse_mixture(name: str, words: Sequence[str]) -> list[Part]:
    """Paths and their weights, as Megatron-LM's ``--data-path`` has them: ``0.7 a.jsonl 0.3 b.jsonl``, or paths alone.

    Raises:
        ConfigurationError: weights for some paths only, a weight that is not positive, or the same file twice.
    """
    numbers = [_number(word) for word in words]
    weights: list[Fraction | None] = [None] * len(words)
    paths = list(words)
    if numbers[0] is not None:
        weights, paths = numbers[::2], list(words[1::2])
        wrong = [word for word, number in zip(words[::2], weights, strict=True) if number is None or number <= 0]
        if wrong or len(paths) < len(weights):
            found = wrong[0] if wrong else words[-1]
            raise ConfigurationError(
                f"{name} {' '.join(words)}: {found!r} stands where a positive weight and a path belong: give a weight "
                "for each path (0.7 a.jsonl 0.3 b.jsonl), or for none"
            )
    stray = next((word for word in paths if _number(word) is not None), None)
    # Two names of one file, such as a.jsonl and ./a.jsonl, name it twice too.
    files = [(path, os.path.realpath(path)) for path in paths]
    twice = next(((one, other) for (one, file), (other, same) in combinations(files, 2) if file == same), None)
    if stray is not None:
        raise ConfigurationError(
            f"{name} {' '.join(words)}: {stray!r} stands where a path belongs: give a weight before each path, or none "
            "(a file of that name is ./" + stray + ")"
        )
    if twice is not None:
        one, other = twice
        again = "" if one == other else f" (again as {other})"
        raise ConfigurationError(f"{name} names {one} twice{again}: give it once, with the sum of its weights")
    return list(zip(paths, weights, strict=True))


def place(number: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """(the file, how many prompts it gave before) of the prompt with this number.

    Prompt k of a file with share w of the whole comes at time (k + 1/2) / w, and the sequence is the prompts of all
    files by their times (Webster's apportionment): among the first n prompts a file has its share to within one or two.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    # Files together give at least n - len/2 prompts by time n, so what comes before this time lies before the number.
    begin = max(0, number - len(shares))
    counts = [int(begin * share + Fraction(1, 2)) for share in shares]
    while True:
        turn = min(range(len(shares)), key=lambda index: (counts[index] + Fraction(1, 2)) / shares[index])
        if sum(counts) == number:
            return turn, counts[turn]
        counts[turn] += 1


def shuffled(count: int, seed: str) -> array[int]:
    """The numbers below ``count`` in an order that follows from the seed."""
    order = array("Q", range(count))
    random.Random(seed).shuffle(order)
    return order


def _number(word: str) -> Fraction | None:
    """The decimal number that a word is; None for a path."""
    try:
        value = float(word)
    except ValueError:
        return None
    # A fraction of 1e-999999999 would have that many digits.
    return Fraction(word) if math.isfinite(value) and value else Fraction(0)
