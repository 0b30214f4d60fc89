"""Tokenizers: one token per character, or the tokenizer of a Hugging Face directory."""

from __future__ import annotations

import shutil
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megatron_rc.launch.errors import ConfigurationError

CHARACTERS, HUGGING_FACE = TOKENIZERS = ("CharacterTokenizer", "HuggingFaceTokenizer")
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
# Files of a transformers tokenizer.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "spiece.model", "tekken.json", "chat_template.jinja"),
)


@dataclass(frozen=True)
class Problem:
    """A prompt, and the data for scoring a response to it.

    Attributes:
        prompt: text with the white space before the answer; for a conversation, its last message.
        label: the right answer, or any value that the reward compares a response with; may be None.
        examples: pairs of a prompt and its answer, shown before the prompt.
        messages: the whole conversation, each message with ``role`` and ``content``; empty: the prompt is plain text.
        record: all keys of the row that the problem was read from.
    """

    prompt: str
    label: Any = None
    examples: tuple[tuple[str, str], ...] = ()
    messages: tuple[Mapping[str, str], ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)


class Text(Protocol):
    """A tokenizer.

    Attributes:
        eos: id of the token that ends a response.
        pad: id of the token that fills batches.
        pad_token: id of the tokenizer's own padding token; None: it has none, and ``pad`` is ``eos``.
        size: number of ids.
        chat: whether problems are written as turns of a conversation.
    """

    eos: int
    pad: int
    pad_token: int | None
    size: int
    chat: bool

    def shown(self, problem: Problem) -> str:
        """The whole text of a prompt, examples or conversation included."""
        ...

    def encode(self, problem: Problem) -> list[int]:
        """Token ids of the whole text of a prompt."""
        ...

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of a response, without the token that ends it."""
        ...

    def tokens_of(self, text: str) -> list[int]:
        """Token ids of a plain text, without special tokens around it."""
        ...

    def save(self, folder: Path) -> None:
        """Write the tokenizer in the format of transformers.

        Raises:
            OSError: its files cannot be read any more, or cannot be written.
        """
        ...


class CharacterText:
    """Tokenizer with one token per character, for models that are trained from scratch.

    The ids 0, 1 and 2 are ``<pad>``, ``<eos>`` and ``<unk>``; the characters of ``alphabet`` follow in their order.
    """

    chat = False

    def __init__(self, characters: str) -> None:
        from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

        self.alphabet = frozenset(characters)
        vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *dict.fromkeys(characters)])}
        self.tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
        self.tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
        self.tokenizer.decoder = decoders.Fuse()
        self.tokenizer.add_special_tokens([PAD, EOS])
        self.pad, self.eos, self.size = vocabulary[PAD], vocabulary[EOS], len(vocabulary)
        self.pad_token: int | None = self.pad

    def shown(self, problem: Problem) -> str:
        """See :class:`Text`."""
        return as_plain_text(problem)

    def encode(self, problem: Problem) -> list[int]:
        """See :class:`Text`."""
        return self.tokens_of(self.shown(problem))

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :class:`Text`."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def tokens_of(self, text: str) -> list[int]:
        """See :class:`Text`."""
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def save(self, folder: Path) -> None:
        """See :class:`Text`."""
        from transformers import PreTrainedTokenizerFast

        names = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNKNOWN}
        PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **names).save_pretrained(folder)


def printable_text() -> CharacterText:
    """Tokenizer with one token per printable ASCII character, for prompts whose characters are not known yet."""
    return CharacterText(string.printable)


class HuggingFaceText:
    """Tokenizer of a Hugging Face directory; with ``chat`` its chat template writes problems as turns.

    Attributes:
        has_template: whether the tokenizer has a chat template.
    """

    def __init__(self, folder: str | Path, chat: bool) -> None:
        from transformers import AutoTokenizer

        if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigurationError(
                f"{folder} holds no tokenizer (tokenizer.json or tokenizer_config.json): give the directory of one as "
                "--tokenizer-model, or use --tokenizer-type CharacterTokenizer"
            )
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
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
        """See :class:`Text`."""
        return self._as_turns(problem) if self.chat else as_plain_text(problem)

    def encode(self, problem: Problem) -> list[int]:
        """See :class:`Text`."""
        ids: list[int] = self.tokenizer.encode(self.shown(problem), add_special_tokens=not self.chat)
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """See :class:`Text`."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def tokens_of(self, text: str) -> list[int]:
        """See :class:`Text`."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files; see :class:`Text`."""
        found = [self.folder / name for name in _TOKENIZER_FILES if (self.folder / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{self.folder} holds no tokenizer any more")
        for path in found:
            shutil.copyfile(path, folder / path.name)

    def _as_turns(self, problem: Problem) -> str:
        turns = [dict(message) for message in problem.messages] or _turns(problem)
        try:
            text: str = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates may raise anything
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer's chat_template refuses the conversation ({error}): drop "
                "the flag"
            ) from error
        return text


def as_plain_text(problem: Problem) -> str:
    """The examples, each ended by a newline, and then the prompt."""
    return "".join(f"{prompt}{answer}\n" for prompt, answer in problem.examples) + problem.prompt


def _turns(problem: Problem) -> list[dict[str, str]]:
    """The examples and the prompt as alternating messages of a user and an assistant."""
    said = [text for example in problem.examples for text in example]
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": text.strip()} for index, text in enumerate([*said, problem.prompt])]
