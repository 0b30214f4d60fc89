"""What ends a response: the end tokens of tokenizer and model, and stop strings."""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError

TOKENIZER = "tokenizer"
# Files of a model's directory whose entry ``eos_token_id`` names end tokens, as transformers' ``generate`` reads them.
FILES = ("config.json", "generation_config.json")
STOP_TOKENS = "--rollout-stop-token-ids"
NO_STOP_TOKENS = "--rollout-no-stop-token-ids"
STOP_STRINGS = "--rollout-stop"
# Bytes of the longest character in UTF-8.
_LONGEST_CHARACTER = 4


@dataclass(frozen=True)
class ResponseEnds:
    """Tokens and texts that end a response; engines, replies, rewards, checks and exports of a run share one object.

    A response ends with the first of these tokens, or with the token that completes the first of these strings in its
    text. Both are sampled like all other tokens: they have log-probs, and are trained.
    """

    token_ids: tuple[int, ...]  # ids of the end tokens; at least one
    strings: tuple[str, ...] = ()  # stop strings
    # Text of token ids, special tokens included; stop strings are looked for in it.
    decode: Callable[[Sequence[int]], str] | None = field(default=None, compare=False)
    words: str = field(default="", compare=False)  # the line about them at the start of a run

    @property
    def eos_token_id(self) -> int | list[int]:
        """The end tokens as Hugging Face's files write them."""
        return self.token_ids[0] if len(self.token_ids) == 1 else list(self.token_ids)

    def length_of(self, token_ids: Sequence[int]) -> int | None:
        """Number of tokens up to and with the first end in a response; None if it has no end."""
        places = [token_ids.index(end) for end in self.token_ids if end in token_ids]
        length = min(places) + 1 if places else None
        before = token_ids[:length]
        if self.string_in(before) is None:
            return length
        # The shortest beginning of the response whose text has a stop string.
        return bisect_left(range(len(before)), True, key=lambda count: self.string_in(before[:count]) is not None)

    def finish_reason(self, token_ids: Sequence[int]) -> str:
        """``stop`` for a response whose last token ends it, else ``length``."""
        return "stop" if self.length_of(token_ids) == len(token_ids) else "length"

    def is_at_end(self, token_ids: Sequence[int]) -> bool:
        """Whether the last of these tokens ends the response; those before it did not."""
        return token_ids[-1] in self.token_ids or self.string_in(token_ids[-self.tail_length :]) is not None

    def string_in(self, token_ids: Sequence[int]) -> str | None:
        """A stop string in the text of these tokens; None if it has none."""
        if not self.strings or self.decode is None:
            return None
        text = self.decode(token_ids)
        return next((string for string in self.strings if string in text), None)

    @cached_property
    def tail_length(self) -> int:
        """Number of last tokens of a response that hold any stop string which the last of them completes.

        A token has a byte at least. The tail may begin within a character, and tokenizers may drop the space before
        its first word.
        """
        longest = max((len(string.encode()) for string in self.strings), default=0)
        return longest + _LONGEST_CHARACTER


def ends_of_directory(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the end tokens that a model's directory names, by file, in the files' order; only files that name some.

    Raises:
        ConfigurationError: a file cannot be read, or its ``eos_token_id`` is neither an id nor a list of ids.
    """
    ends = {}
    for name in FILES:
        path = Path(folder) / name
        if not path.is_file():
            continue

        entry = _read_object(path).get("eos_token_id")
        if entry is None:
            continue
        ids = entry if isinstance(entry, list) else [entry]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise ConfigurationError(
                f"{path}: eos_token_id is {str(entry)[:80]}, expected an id or a list of ids: correct the file"
            )
        if ids:
            ends[name] = tuple(ids)
    return ends


def choose_ends(
    sources: Mapping[str, Sequence[int]],
    *,
    decode: Callable[[Sequence[int]], str],
    vocab_size: int,
    removed: Sequence[int] = (),
    strings: Sequence[str] = (),
) -> ResponseEnds:
    """Make the ends of a run: the union of the sources, without the removed tokens.

    Args:
        sources: end tokens by what names them, in the order in which the line at a run's start names them: the
            tokenizer, files, the flag ``STOP_TOKENS``.
        decode: text of token ids, special tokens included.
        vocab_size: number of ids that the model can sample; files may name ids beyond it, which end nothing.
        removed: ids of ``--rollout-no-stop-token-ids``.
        strings: stop strings.

    Raises:
        ConfigurationError: an added id lies outside of the vocabulary, a removed id is no end token or is added too, a
            stop string is empty, or no end token is left.
    """
    for token in sources.get(STOP_TOKENS, ()):
        if not 0 <= token < vocab_size:
            raise ConfigurationError(f"{STOP_TOKENS} {token} must be an id below --vocab-size {vocab_size}")
    if "" in strings:
        raise ConfigurationError(f"{STOP_STRINGS} '' would end every response at once: give a text")

    sources_of_token: dict[int, list[str]] = {}
    for source, ids in sources.items():
        for token in dict.fromkeys(ids):
            if token < vocab_size:  # files may name ids that the model cannot sample
                sources_of_token.setdefault(token, []).append(source)

    removed = list(dict.fromkeys(removed))
    for token in removed:
        if token not in sources_of_token:
            raise ConfigurationError(
                f"{NO_STOP_TOKENS} {token}: no response ends with this token, neither the tokenizer's nor one that the "
                "model can sample and its files name: drop it"
            )
        if STOP_TOKENS in sources_of_token[token]:
            raise ConfigurationError(f"{NO_STOP_TOKENS} {token} contradicts {STOP_TOKENS} {token}: drop one of them")
        del sources_of_token[token]
    if not sources_of_token:
        raise ConfigurationError(
            f"{NO_STOP_TOKENS} {' '.join(map(str, removed))} leaves no end token: give another as {STOP_TOKENS}"
        )

    words = _in_words(sources_of_token, removed, strings, decode)
    return ResponseEnds(tuple(sources_of_token), tuple(strings), decode, words)


def _in_words(
    sources_of_token: Mapping[int, Sequence[str]],
    removed: Sequence[int],
    strings: Sequence[str],
    decode: Callable[[Sequence[int]], str],
) -> str:
    """Return one line with every end, its text and what names it."""

    def listed(ids: Sequence[int]) -> str:
        return ", ".join(f"{token} {_printable(decode([token]))}" for token in ids)

    parts = []
    for names, ids in groupby(sources_of_token, key=lambda token: ", ".join(sources_of_token[token])):
        parts.append(f"{listed(list(ids))} ({names})")
    words = f"end tokens: {', '.join(parts)}"
    if removed:
        words += f"; not {listed(removed)} ({NO_STOP_TOKENS})"
    if strings:
        words += f"; stop strings: {', '.join(map(repr, strings))} ({STOP_STRINGS})"
    return words


def _printable(text: str) -> str:
    """Return the text of a token, in quotes if it could be overlooked or taken for an id."""
    is_plain = text.isprintable() and text == text.strip() and text and not text.isdecimal()
    return text if is_plain else repr(text)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} cannot be read ({error}): correct the file, or remove it") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds no object: correct the file, or remove it")
    return content
