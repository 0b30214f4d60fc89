"""Problems from the user's prompt files, used instead of a task."""

from __future__ import annotations

import hashlib
import logging
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.prompt_data.files import open_rows
from megatron_rc.launch.tasks.prompt_data.mixture import parse_mixture, place, shuffled
from megatron_rc.launch.tasks.prompt_data.room import Room
from megatron_rc.launch.tasks.prompt_data.rows import Row, RowFormat
from megatron_rc.launch.tasks.text import Problem, Text

PROMPT_DATA = "--prompt-data"
EVAL_DATA = "--eval-data"
_log = logging.getLogger("megatron_rc")


@dataclass(frozen=True)
class HeldOut:
    """A file of prompts that are never trained on."""

    name: str  # name of its metrics
    path: str
    row_format: RowFormat


class PromptData:
    """Task whose problems come from files; its reward is ``--reward``."""

    reward = None

    def __init__(
        self,
        train: Sequence[str],
        held_out: Sequence[HeldOut],
        row_format: RowFormat,
        text: Text,
        seed: int,
        room: Room,
        max_response_length: int,
    ) -> None:
        self.text = text
        self.max_response_length = max_response_length
        parts = parse_mixture(PROMPT_DATA, train)
        self._train = [
            PromptFile(PROMPT_DATA, path, row_format, room, f"{seed}/{number}")
            for number, (path, _) in enumerate(parts)
        ]
        # Without weights each file has its number of prompts as weight, so each prompt comes once per epoch.
        self._weights = [weight or Fraction(len(file)) for (_, weight), file in zip(parts, self._train, strict=True)]
        _check_paths([file.path for file in held_out])
        self._names = [file.name for file in held_out]
        self._held_out = [PromptFile(EVAL_DATA, file.path, file.row_format, room, "") for file in held_out]
        # Index of the file and of the prompt in it, of every held-out problem; the files take turns.
        self._turns = sorted(
            ((index, number) for number, file in enumerate(self._held_out) for index in range(len(file)))
        )
        self.dropped = sum(file.dropped for file in self._train)  # training prompts that are too long
        self.num_held_out = len(self._turns)
        self._warn_of_same_rows()
        self.digest = self._digest()

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """See :class:`Task`. Held-out problems come from each file in turn, in the order of its rows."""
        if not held_out:
            places = [place(number, self._weights) for number in range(start, start + count)]
            return [self._train[index].shuffled_problem(position) for index, position in places]
        if start + count > self.num_held_out:
            raise ConfigurationError(
                f"{EVAL_DATA} holds {self.num_held_out} prompts, {start + count} were asked for: lower --eval-problems"
            )
        return [self._held_out[number].problem(index) for index, number in self._turns[start : start + count]]

    def name_of_held_out(self, number: int) -> str:
        """Name of the file that has a held-out problem."""
        return self._names[self._turns[number][1]]

    def metrics(self, drawn: int) -> dict[str, float]:
        """Epochs of the most used file after ``drawn`` prompts, and the number of prompts that were left out."""
        epochs = [
            drawn * float(weight / sum(self._weights)) / len(file)
            for weight, file in zip(self._weights, self._train, strict=True)
        ]
        return {"data/epoch": max(epochs), "data/overlong_prompts": float(self.dropped)}

    def _digest(self) -> int:
        """Return a 48-bit hash of the rows of all files; checkpoints keep it."""
        digest = hashlib.blake2b(digest_size=6)
        for file in [*self._train, *self._held_out]:
            rows_digest = file.rows.digest
            digest.update(len(rows_digest).to_bytes(8, "big") + rows_digest)
        return int.from_bytes(digest.digest(), "big")

    def _warn_of_same_rows(self) -> None:
        """Warn if evaluations use the rows that are trained on."""
        trained = {file.rows.digest: file.path for file in self._train}
        for file in self._held_out:
            if file.rows.digest in trained:
                _log.warning(
                    "%s %s has the rows of %s %s: evaluations use the prompts that are trained on",
                    EVAL_DATA,
                    file.path,
                    PROMPT_DATA,
                    trained[file.rows.digest],
                )


def _check_paths(paths: Sequence[str]) -> None:
    """Refuse weights among the paths of held-out files, and a file that is given twice."""
    if paths and any(weight is not None for _, weight in parse_mixture(EVAL_DATA, paths)):
        raise ConfigurationError(f"{EVAL_DATA} {' '.join(paths)} takes no weights: give paths only")


class PromptFile:
    """Prompts of one file that leave room for a response."""

    def __init__(self, name: str, path: str, row_format: RowFormat, room: Room, seed: str) -> None:
        self.path = path
        self._row_format = row_format
        self._kept = array("Q")
        shortest = 0

        def visit(index: int, row: Row) -> None:
            nonlocal shortest
            excess = room.excess(row_format.problem(row))
            if excess is None:
                self._kept.append(index)
            else:
                shortest = min(shortest or excess, excess)

        self.rows = open_rows(name, path, visit)
        self.dropped = len(self.rows) - len(self._kept)
        if not self._kept:
            raise ConfigurationError(
                f"{name} {path}: every prompt is too long, the shortest has {shortest} {room.words}"
            )
        if self.dropped:
            _log.warning(
                "%s %s: %d of %d prompts have more than %d tokens and are left out",
                name, path, self.dropped, len(self.rows), room.tokens,
            )  # fmt: skip
        self._order = lru_cache(maxsize=2)(lambda epoch: shuffled(len(self), f"{seed}/{epoch}"))

    def __len__(self) -> int:
        """Number of prompts that fit."""
        return len(self._kept)

    def problem(self, index: int) -> Problem:
        """Fitting prompt number ``index``, in the order of the file."""
        return self._row_format.problem(self.rows.row(self._kept[index]))

    def shuffled_problem(self, position: int) -> Problem:
        """Prompt number ``position`` of training; each epoch has its own order."""
        epoch, index = divmod(position, len(self))
        return self.problem(self._order(epoch)[index])
