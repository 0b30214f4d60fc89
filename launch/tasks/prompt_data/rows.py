"""Parse a row of a prompt file into a problem."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.tasks.text import Problem

Row = dict[str, Any]


def parse_line(line: bytes) -> Row:
    """Parse one line of a JSON-lines file, or raise ValueError with the reason."""
    try:
        # The parser would count columns from 1 again after a newline.
        text = line.decode("utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start + 1} is 0x{line[error.start]:02x})") from error
    if not text.strip():
        raise ValueError("is empty: every line is one JSON object")
    try:
        row = json.loads(text, parse_constant=_finite, parse_float=_finite, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg} at column {error.colno}): every line is one JSON object") from error
    except RecursionError as error:
        raise ValueError("is nested too deeply") from error
    if not isinstance(row, dict):
        raise ValueError(f'is {_kind(row)}, not a JSON object such as {{"prompt": …, "label": …}}')
    return row


@dataclass(frozen=True)
class RowFormat:
    """Keys of a row, and the requirements on its values."""

    input_key: str  # key of the prompt: a string, or a list of messages with ``role`` and ``content``
    label_key: str  # key of the label that the reward compares a response with
    needs_label: bool  # whether every row must have a label
    chat: bool  # whether the tokenizer writes prompts as turns of a conversation
    alphabet: frozenset[str] | None = None  # characters that the tokenizer knows; None: all
    plain_label: bool = False  # whether labels must be texts or numbers, as ``--reward exact`` needs them
    tools_key: str | None = None  # key of the tools that the chat template shows; None: it shows none

    def problem(self, row: Row) -> Problem:
        """Make a problem from a row, or raise ValueError with the row's fault."""
        if self.input_key not in row:
            raise ValueError(f"has no {self.input_key!r}{_among(row)}: name the prompt's key with --input-key")
        label = row.get(self.label_key)
        if self.needs_label and label is None:
            if self.label_key in row:
                raise ValueError(f"is null under {self.label_key!r}: give the row a label, or leave it out")
            raise ValueError(f"has no {self.label_key!r}{_among(row)}: name the label's key with --label-key")
        if self.plain_label and (isinstance(label, bool) or not isinstance(label, str | int | float)):
            raise ValueError(
                f"has {_kind(label)} under {self.label_key!r}, and --reward exact compares texts and numbers: write it "
                "as a response would, or score with python:pkg.module:function"
            )
        prompt = row[self.input_key]
        messages = self._messages(prompt)
        texts = [message["content"] for message in messages] or [prompt]
        if not texts[-1].strip():
            raise ValueError(f"has an empty text as {self.input_key}")
        for text in texts:
            self._check_text(text)
        return Problem(texts[-1], label, messages=messages, tools=self._tools(row), record=row)

    def _tools(self, row: Row) -> tuple[Mapping[str, Any], ...]:
        """Schemas of the row's tools, from a list or its text in JSON."""
        if self.tools_key is None:
            if self.chat and row.get("tools"):
                raise ValueError(
                    "has 'tools', which the chat template is not shown: give --tools-key tools, or leave them out"
                )
            return ()
        if self.tools_key not in row:
            raise ValueError(f"has no {self.tools_key!r}{_among(row)}: name the tools' key with --tools-key")
        tools = row[self.tools_key]
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise ValueError(f"has a text under {self.tools_key!r} that is not JSON ({error})") from error
        if tools is None:
            return ()
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            kind = "a list with other entries than objects" if isinstance(tools, list) else _kind(tools)
            raise ValueError(f"has {kind} under {self.tools_key!r}, not a list of the tools' schemas, or null")
        return tuple(tools)

    def _messages(self, prompt: Any) -> tuple[Mapping[str, Any], ...]:
        """Messages of the conversation; empty if the prompt is plain text."""
        if isinstance(prompt, str):
            return ({"role": "user", "content": prompt},) if self.chat else ()
        if not isinstance(prompt, list) or not prompt:
            found = "no message" if prompt == [] else _kind(prompt)
            raise ValueError(f"has {found} under {self.input_key!r}, not a string or a list of messages")
        for number, message in enumerate(prompt):
            place = f"{self.input_key}[{number}]"
            if not isinstance(message, dict):
                raise ValueError(f"has {_kind(message)} as {place}, not a message with 'role' and 'content'")
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    found = _kind(message[key]) if key in message else "nothing"
                    raise ValueError(f"has {found} as {place}[{key!r}], not a string")
        if prompt[-1]["role"] == "assistant":
            raise ValueError(f"ends {self.input_key!r} with a message of the assistant: remove the answer")
        if not self.chat:
            raise ValueError(
                f"has messages under {self.input_key!r}: give --apply-chat-template and a tokenizer that has one"
            )
        return tuple(prompt)

    def _check_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"has half a surrogate pair in {self.input_key}, at character {error.start + 1}"
            ) from error
        unknown = None if self.alphabet is None else next((char for char in text if char not in self.alphabet), None)
        if unknown is not None:
            raise ValueError(
                f"has {unknown!r} in {self.input_key}, which is not a token of the character tokenizer: give "
                "--tokenizer-model DIR"
            )


def _object(pairs: list[tuple[str, Any]]) -> Row:
    row = dict(pairs)
    if len(row) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"has the key {next(key for key in keys if keys.count(key) > 1)!r} twice")
    return row


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"holds {word}, which is no finite number")
    return value


def _among(row: Row) -> str:
    """The row's first eight keys, for an error."""
    keys = ", ".join(map(repr, list(row)[:8]))
    return f" (it has {keys}{', …' if len(row) > 8 else ''})" if row else " (it has no key at all)"


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, int | float) else f"a {type(value).__name__}")
