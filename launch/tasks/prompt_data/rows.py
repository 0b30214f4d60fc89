"""Parse a row of a prompt file into a problem."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.tasks.labels import kind_of, label_flaw, remedy_for
from megatron_rc.launch.tasks.text import Problem

Row = dict[str, Any]
# Stands for a value that a row does not have; null is a value.
MISSING = object()


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
        raise ValueError(f'is {kind_of(row)}, not a JSON object such as {{"prompt": …, "label": …}}')
    return row


@dataclass(frozen=True)
class RowFormat:
    """Keys of a row, and the requirements on its values."""

    # Keys may lead into objects: ``reward_model.ground_truth``. A key of the row that has dots itself counts first.
    input_key: str  # key of the prompt: a string, or a list of messages with ``role`` and ``content``
    label_key: str  # key of the label that the reward compares a response with
    needs_label: bool  # whether every row must have a label
    chat: bool  # whether the tokenizer writes prompts as turns of a conversation
    alphabet: frozenset[str] | None = None  # characters that the tokenizer knows; None: all
    input_flag: str = "--input-key"  # flag that names the prompt's key, for errors
    label_flag: str = "--label-key"  # flag that names the label's key, for errors
    rule: str | None = None  # built-in rule of ``--reward`` that compares labels; None: they may be anything
    tools_key: str | None = None  # key of the tools that the chat template shows; None: it shows none

    def problem(self, row: Row) -> Problem:
        """Make a problem from a row, or raise ValueError with the row's fault."""
        prompt = value_of(row, self.input_key)
        if prompt is MISSING:
            raise ValueError(f"{_lacks(row, self.input_key)}: name the prompt's key with {self.input_flag}")
        label = self._label(row)
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
        tools = value_of(row, self.tools_key)
        if tools is MISSING:
            raise ValueError(f"{_lacks(row, self.tools_key)}: name the tools' key with --tools-key")
        if isinstance(tools, str):
            try:
                tools = json.loads(tools)
            except ValueError as error:
                raise ValueError(f"has a text under {self.tools_key!r} that is not JSON ({error})") from error
        else:
            # In a table every schema has the keys of all schemas, and null where it has none of its own.
            tools = _without_nulls(tools)
        if tools is None:
            return ()
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            kind = "a list with other entries than objects" if isinstance(tools, list) else kind_of(tools)
            raise ValueError(f"has {kind} under {self.tools_key!r}, not a list of the tools' schemas, or null")
        return tuple(tools)

    def _label(self, row: Row) -> Any:
        """Label of a row; None if it has none and needs none."""
        label = value_of(row, self.label_key)
        if self.needs_label and label is MISSING:
            raise ValueError(f"{_lacks(row, self.label_key)}: name the label's key with {self.label_flag}")
        if self.needs_label and label is None:
            raise ValueError(f"is null under {self.label_key!r}: give the row a label, or leave it out")
        flaw = None if self.rule is None else label_flaw(label, self.rule)
        if flaw is not None:
            raise ValueError(
                f"has {flaw} under {self.label_key!r}, and --reward {self.rule} compares texts and numbers, or a list "
                f"of them: {remedy_for(label, f'{self.label_flag} {self.label_key}')}"
            )
        return None if label is MISSING else label

    def _messages(self, prompt: Any) -> tuple[Mapping[str, Any], ...]:
        """Messages of the conversation; empty if the prompt is plain text."""
        if isinstance(prompt, str):
            return ({"role": "user", "content": prompt},) if self.chat else ()
        if not isinstance(prompt, list) or not prompt:
            kind = "no message" if prompt == [] else kind_of(prompt)
            raise ValueError(f"has {kind} under {self.input_key!r}, not a string or a list of messages")
        for number, message in enumerate(prompt):
            path = f"{self.input_key}[{number}]"
            if not isinstance(message, dict):
                raise ValueError(f"has {kind_of(message)} as {path}, not a message with 'role' and 'content'")
            for key in ("role", "content"):
                if not isinstance(message.get(key), str):
                    kind = kind_of(message[key]) if key in message else "nothing"
                    raise ValueError(f"has {kind} as {path}[{key!r}], not a string")
        if prompt[-1]["role"] == "assistant":
            raise ValueError(f"ends {self.input_key!r} with a message of the assistant: remove the answer")
        if not self.chat:
            raise ValueError(
                f"has messages under {self.input_key!r}: give --apply-chat-template and a tokenizer that has one"
            )
        # In a table, as of Parquet, all messages have all keys. A template may ask whether a message has one.
        return tuple({key: value for key, value in message.items() if value is not None} for message in prompt)

    def _check_text(self, text: str) -> None:
        """Raise ValueError for text that cannot be tokenized; its message continues "FILE, line N"."""
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


def _without_nulls(value: Any) -> Any:
    """Return the value without the keys of its objects that have no value."""
    if isinstance(value, dict):
        return {key: _without_nulls(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_nulls(entry) for entry in value]
    return value


def value_of(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key, which may lead into objects by dots; :data:`MISSING` if there is none."""
    if key in row:
        return row[key]
    first, _, rest = key.partition(".")
    entries = row.get(first)
    if not rest or not isinstance(entries, Mapping):
        return MISSING
    return value_of(entries, rest)


def _lacks(row: Mapping[str, Any], key: str) -> str:
    """Return the beginning of an error: the row has no such key; the last object that the key leads to has others."""
    owner = "it"
    entries = row
    rest = key
    while True:
        first, dot, behind = rest.partition(".")
        if not dot or first not in entries:
            break
        if not isinstance(entries[first], Mapping):
            return f"has no {key!r} ({first!r} is {kind_of(entries[first])})"
        owner = repr(first)
        entries = entries[first]
        rest = behind
    keys = ", ".join(map(repr, list(entries)[:8])) if entries else "no key at all"
    more = ", …" if len(entries) > 8 else ""
    return f"has no {key!r} ({owner} has {keys}{more})"
