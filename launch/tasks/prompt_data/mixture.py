"""Mixture of several prompt files: the file and the row of training prompt number n.

Both depend only on the seed and n, so every rank and every resumed run finds the same prompts without drawing the
earlier ones.
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
    """Paths and weights from the words of a flag such as ``0.7 a.jsonl 0.3 b.jsonl``; weights may be left out."""
    numbers = [_number(word) for word in words]
    weights: list[Fraction | None] = [None] * len(words)
    paths = list(words)
    if numbers[0] is not None:
        weights = numbers[::2]
        paths = list(words[1::2])
        wrong = [word for word, number in zip(words[::2], weights, strict=True) if number is None or number <= 0]
        if wrong or len(paths) < len(weights):
            entry = wrong[0] if wrong else words[-1]
            raise ConfigurationError(
                f"{name} {' '.join(words)}: expected a positive weight and its path, got {entry!r}: give a weight for "
                "each path (0.7 a.jsonl 0.3 b.jsonl), or for none"
            )
    stray = next((word for word in paths if _number(word) is not None), None)
    # a.jsonl and ./a.jsonl are the same file.
    files = [(path, os.path.realpath(path)) for path in paths]
    pairs = combinations(files, 2)
    twice = next(((path, again) for (path, file), (again, file_again) in pairs if file == file_again), None)
    if stray is not None:
        raise ConfigurationError(
            f"{name} {' '.join(words)}: expected a path, got {stray!r}: give a weight before each path, or none (write "
            f"a file of that name as ./{stray})"
        )
    if twice is not None:
        path, again = twice
        spelling = "" if path == again else f" (again as {again})"
        raise ConfigurationError(f"{name} names {path} twice{spelling}: give it once, with the sum of its weights")
    return list(zip(paths, weights, strict=True))


def place(number: int, weights: Sequence[Fraction]) -> tuple[int, int]:
    """Index of the file of prompt ``number``, and how many prompts that file gave before.

    Prompt k of a file with share w has time (k + 1/2) / w; prompts of all files are sorted by their times (Webster's
    apportionment). Among the first n prompts each file has its share to within one or two.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    # By time n the files have given between n - len/2 and n + len/2 prompts, so the search can begin here.
    begin = max(0, number - len(shares))
    counts = [int(begin * share + Fraction(1, 2)) for share in shares]
    while True:
        turn = min(range(len(shares)), key=lambda index: (counts[index] + Fraction(1, 2)) / shares[index])
        if sum(counts) == number:
            return turn, counts[turn]
        counts[turn] += 1


def shuffled(count: int, seed: str) -> array[int]:
    """A permutation of the numbers below ``count`` that depends only on the seed."""
    order = array("Q", range(count))
    random.Random(seed).shuffle(order)
    return order


def _number(word: str) -> Fraction | None:
    """Value of a word that is a decimal number; None for a path."""
    try:
        value = float(word)
    except ValueError:
        return None
    # Fraction("1e-999999999") would have a billion digits.
    return Fraction(word) if math.isfinite(value) and value else Fraction(0)
