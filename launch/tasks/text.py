"""Tokenizers: one token per character, or the tokenizer of a Hugging Face directory."""

from __future__ import annotations

import shutil
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.transformers4 import add_earlier_tokenizer_class

CHARACTERS, HUGGING_FACE = TOKENIZERS = ("CharacterTokenizer", "HuggingFaceTokenizer")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# Files of a transformers tokenizer.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Problem:
    """A prompt, and the data for scoring a response to it."""

    prompt: str  # text with the white space before the answer; for a conversation, its last message
    label: Any = None  # the right answer, or any value that the reward compares a response with
    examples: tuple[tuple[str, str], ...] = ()  # pairs of a prompt and its answer, shown before the prompt
    # The whole conversation, each message with ``role`` and ``content``; empty: the prompt is plain text.
    messages: tuple[Mapping[str, str], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)  # all keys of the row that the problem was read from


class Text(ABC):
    """A tokenizer."""

    tokenizer: Any
    eos: int  # id of the token that ends a response
    pad: int  # id of the token that fills batches
    pad_token: int | None  # id of the tokenizer's own padding token; None: it has none, and ``pad`` is ``eos``
    size: int  # number of ids
    chat = False  # whether problems are written as turns of a conversation

    def shown(self, problem: Problem) -> str:
        """The whole text of a prompt: its examples, each ended by a newline, or its conversation."""
        return "".join(f"{prompt}{answer}\n" for prompt, answer in problem.examples) + problem.prompt

    def encode(self, problem: Problem) -> list[int]:
        """Token ids of the whole text of a prompt."""
        return self._ids(self.shown(problem), special=not self.chat)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without the token that ends it."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of a plain text, without special tokens around it."""
        return self._ids(text, special=False)

    def observed(self, observation: str | list[int]) -> list[int]:
        """Token ids of a task's reply to a turn, given as a text or as token ids.

        Raises:
            ValueError: the tokenizer lacks a token or a character, or a text has no token; says so as a verb.
        """
        ids = self.tokens_of(observation) if isinstance(observation, str) else observation
        foreign = next((token for token in ids if not 0 <= token < self.size), None)
        if foreign is not None:
            raise ValueError(f"gave an observation with the token id {foreign}, beyond the tokenizer's {self.size}")
        if not ids:
            raise ValueError(f"gave the observation {observation!r:.80}, which has no token")
        return ids

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the tokenizer in the format of transformers.

        Raises:
            OSError: its files cannot be read any more, or cannot be written.
        """

    @abstractmethod
    def _ids(self, text: str, special: bool) -> list[int]:
        """Token ids of a text, with or without the special tokens that the tokenizer puts around texts."""


class CharacterText(Text):
    """Tokenizer with one token per character, for models that are trained from scratch.

    The ids 0, 1 and 2 are ``<pad>``, ``<eos>`` and ``<unk>``; the characters follow in their order. By default they are
    the printable ASCII characters.
    """

    def __init__(self, characters: str = string.printable) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        self.alphabet = frozenset(characters)
        vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *dict.fromkeys(characters)])}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        self.tokenizer.decoder = decoders.Fuse()
        self.tokenizer.add_special_tokens([PAD, EOS])
        self.pad, self.eos, self.size = vocabulary[PAD], vocabulary[EOS], len(vocabulary)
        self.pad_token = self.pad

    def observed(self, observation: str | list[int]) -> list[int]:
        """See :class:`Text`."""
        unknown = next((char for char in observation if isinstance(char, str) and char not in self.alphabet), None)
        if unknown is not None:
            raise ValueError(f"gave an observation with {unknown!r}, which is not a character of the tokenizer")
        return super().observed(observation)

    def save(self, folder: Path) -> None:
        """See :class:`Text`."""
        from transformers import PreTrainedTokenizerFast

        names = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
        PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **names).save_pretrained(folder)
        add_earlier_tokenizer_class(folder)

    def _ids(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special).ids
        return ids


class HuggingFaceText(Text):
    """Tokenizer of a Hugging Face directory; with ``chat`` its chat template writes problems as turns."""

    def __init__(self, folder: str | Path, chat: bool) -> None:
        from transformers import AutoTokenizer

        if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigurationError(
                f"{folder} holds no tokenizer (tokenizer.json or tokenizer_config.json): give the directory of one as "
                "--tokenizer-model"
            )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # broken files raise many kinds
            why = " ".join(str(error).split())
            if "trust_remote_code" in why:  # this message names an option that does not exist here
                why = "it needs code from the directory, which is never run: give one that transformers has a class for"
            raise ConfigurationError(f"the tokenizer in {folder} cannot be read: {why}") from error
        if self.tokenizer.eos_token_id is None:
            raise ConfigurationError(f"the tokenizer in {folder} has no eos_token: name it in tokenizer_config.json")
        self.has_template = self.tokenizer.chat_template is not None
        if chat and not self.has_template:
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer in {folder} has no chat_template: drop the flag"
            )
        self.folder = Path(folder)
        self.chat, self.eos, self.size = chat, int(self.tokenizer.eos_token_id), len(self.tokenizer)
        pad = self.tokenizer.pad_token_id
        self.pad_token = None if pad is None else int(pad)
        self.pad = self.eos if self.pad_token is None else self.pad_token

    def shown(self, problem: Problem) -> str:
        """The whole text of a prompt; as a conversation, examples are turns too."""
        if not self.chat:
            return super().shown(problem)
        texts = [*(text for example in problem.examples for text in example), problem.prompt]
        turns = [dict(message) for message in problem.messages] or [
            {"role": ("user", "assistant")[index % 2], "content": text.strip()} for index, text in enumerate(texts)
        ]
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates may raise anything
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer's chat_template refuses the conversation ({error}): drop "
                "the flag"
            ) from error
        return text

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files; see :class:`Text`."""
        found = [self.folder / name for name in _TOKENIZER_FILES if (self.folder / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{self.folder} holds no tokenizer any more")
        for path in found:
            shutil.copyfile(path, folder / path.name)

    def _ids(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        return ids
