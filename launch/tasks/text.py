"""Tokenizers: one token per character, or the tokenizer of a Hugging Face directory."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import string
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.ends import TOKENIZER, ResponseEnds, ends_of_directory
from megatron_rc.launch.transformers4 import add_earlier_tokenizer_class

CHARACTERS, HUGGING_FACE = TOKENIZERS = ("CharacterTokenizer", "HuggingFaceTokenizer")
PAD = "<pad>"
EOS = "<eos>"
UNKNOWN = "<unk>"
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
    tools: tuple[Mapping[str, Any], ...] = ()  # schemas of the tools that a chat template shows; empty: none


class Text(ABC):
    """A tokenizer."""

    tokenizer: Any
    eos: int  # id of the tokenizer's own end token
    ends: ResponseEnds  # what ends a response: the tokenizer's own end token alone, until the flags name more
    pad: int  # id of the token that fills batches
    pad_token: int | None  # id of the tokenizer's own padding token; None: it has none, and ``pad`` is ``eos``
    size: int  # number of ids
    chat = False  # whether problems are written as turns of a conversation
    skip_special_tokens = False  # whether rewards and replies read texts without special tokens

    def shown(self, problem: Problem) -> str:
        """The whole text of a prompt: its examples, each ended by a newline, or its conversation."""
        return "".join(f"{prompt}{answer}\n" for prompt, answer in problem.examples) + problem.prompt

    def encode(self, problem: Problem) -> list[int]:
        """Token ids of the whole text of a prompt."""
        return self._ids(self.shown(problem), special=not self.chat)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that token ids spell, with all special tokens."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=False)
        return text

    def text_of(self, token_ids: Sequence[int]) -> str:
        """The text of token ids as rewards and replies read it: ``skip_special_tokens`` leaves special tokens out."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=self.skip_special_tokens)
        return text

    def response_text(self, token_ids: Sequence[int]) -> str:
        """The text of a response or of a turn as rewards and replies read it.

        End tokens and padding at its end are left out. A stop string stays, as the text that was sampled.
        """
        behind_text = {*self.ends.token_ids, self.pad_token}
        length = len(token_ids)
        while length > 0 and token_ids[length - 1] in behind_text:
            length -= 1
        return self.text_of(token_ids[:length])

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

    def end_tokens_by_source(self, load_hf: str | None) -> dict[str, tuple[int, ...]]:
        """End tokens by what names them; ``load_hf`` is the directory of the model that a run starts from."""
        return {TOKENIZER: (self.eos,)}

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
        self.pad = vocabulary[PAD]
        self.eos = vocabulary[EOS]
        self.size = len(vocabulary)
        self.pad_token = self.pad
        self.ends = ResponseEnds((self.eos,), decode=self.decode)

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
    """Tokenizer of a Hugging Face directory; with ``chat`` its chat template writes problems as turns.

    Attributes:
        template_kwargs: further variables of the chat template, such as ``enable_thinking``.
    """

    def __init__(self, folder: str | Path, chat: bool) -> None:
        from transformers import AutoTokenizer

        if not any((Path(folder) / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
            raise ConfigurationError(
                f"{folder} holds no tokenizer (tokenizer.json or tokenizer_config.json): give the directory of one as "
                "--tokenizer-model"
            )
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(
                folder, config=_unknown_config(Path(folder)), local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # broken files raise many kinds
            why = " ".join(str(error).split())
            if "trust_remote_code" in why:  # this message names an option that does not exist here
                why = "it needs code from the directory, which is never run: give one that transformers has a class for"
            raise ConfigurationError(f"the tokenizer in {folder} cannot be read: {why}") from error
        if self.tokenizer.eos_token_id is None:
            raise ConfigurationError(f"the tokenizer in {folder} has no eos_token: name it in tokenizer_config.json")
        self.has_template = self.tokenizer.chat_template is not None
        self.folder = Path(folder)
        self.chat = chat
        self.eos = int(self.tokenizer.eos_token_id)
        self.size = len(self.tokenizer)
        self.template_kwargs: dict[str, Any] = {}
        self.ends = ResponseEnds((self.eos,), decode=self.decode)
        pad = self.tokenizer.pad_token_id
        self.pad_token = None if pad is None else int(pad)
        self.pad = self.eos if self.pad_token is None else self.pad_token
        # Some tokenizers, such as Llama's with add_eos_token, append their end token to every text.
        self._appends_end = self.tokenizer.encode("a")[-1:] == [self.eos]

    def use_template_kwargs(self, json_object: str) -> None:
        """Give the chat template the variables of a JSON object, or raise ConfigurationError."""
        variables: dict[str, Any] = json.loads(json_object)
        user = f"--chat-template-kwargs {json_object}"
        # The arguments of the call that renders a template, and the name under which it gets the conversation.
        reserved = {*inspect.signature(self.tokenizer.apply_chat_template).parameters, "messages"}
        for name in variables:
            if name in reserved:
                raise ConfigurationError(f"{user}: {name} is decided by the program or by other flags: leave it out")
            self.check_template_reads(name, user)
        self.template_kwargs = variables

    def check_template_reads(self, variable: str, user: str) -> None:
        """Raise ConfigurationError in the name of a flag if no chat template mentions the variable."""
        templates = self.tokenizer.chat_template
        texts = templates.values() if isinstance(templates, dict) else [templates]
        if not any(re.search(rf"\b{re.escape(variable)}\b", text) for text in texts):
            raise ConfigurationError(
                f"{user}: the chat template of the tokenizer in {self.folder} does not read {variable}: is the name "
                "right? Otherwise drop it"
            )

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text that token ids spell, with all special tokens, and with spaces as the tokens have them."""
        text: str = self.tokenizer.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text

    def shown(self, problem: Problem) -> str:
        """The whole text of a prompt; as a conversation, examples are turns too."""
        if not self.chat:
            return super().shown(problem)
        texts = [*(text for example in problem.examples for text in example), problem.prompt]
        turns = [dict(message) for message in problem.messages] or [
            {"role": ("user", "assistant")[index % 2], "content": text.strip()} for index, text in enumerate(texts)
        ]
        try:
            text: str = self.tokenizer.apply_chat_template(
                turns,
                tools=[dict(tool) for tool in problem.tools] or None,
                tokenize=False,
                add_generation_prompt=True,
                **self.template_kwargs,
            )
        except Exception as error:  # templates may raise anything
            raise ConfigurationError(
                f"--apply-chat-template: the tokenizer's chat_template refuses the conversation ({error}): drop "
                "the flag"
            ) from error
        return text

    def end_tokens_by_source(self, load_hf: str | None) -> dict[str, tuple[int, ...]]:
        """Those of the tokenizer, and of the files of ``load_hf``, or else of the tokenizer's own directory."""
        return super().end_tokens_by_source(load_hf) | ends_of_directory(load_hf or self.folder)

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files; see :class:`Text`."""
        files = [self.folder / name for name in _TOKENIZER_FILES if (self.folder / name).is_file()]
        if not files:
            raise FileNotFoundError(f"{self.folder} holds no tokenizer any more")
        for path in files:
            shutil.copyfile(path, folder / path.name)

    def _ids(self, text: str, special: bool) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special)
        if not (special and self._appends_end):
            return ids
        # The model answers within the text: only the end tokens that the text itself spells stay.
        spelled = self.tokenizer.encode(text, add_special_tokens=False)
        appended = _count_at_end(ids, self.eos) - _count_at_end(spelled, self.eos)
        return ids[: len(ids) - appended]


def _unknown_config(folder: Path) -> Any:
    """An empty config, if transformers does not know the ``model_type`` beside a tokenizer, such as Kimi-K2's.

    With it, the tokenizer's own files are read; otherwise transformers reads the model's config first, and fails. None:
    transformers knows the model, or there is none.
    """
    from transformers import CONFIG_MAPPING, PretrainedConfig

    path = folder / "config.json"
    if not path.is_file():
        return None
    entries = json.loads(path.read_text(encoding="utf-8"))
    kind = entries.get("model_type") if isinstance(entries, dict) else None
    return PretrainedConfig() if isinstance(kind, str) and kind not in CONFIG_MAPPING else None


def _count_at_end(token_ids: Sequence[int], token: int) -> int:
    """Number of tokens with this id at the end."""
    count = 0
    for last in reversed(token_ids):
        if last != token:
            break
        count += 1
    return count
