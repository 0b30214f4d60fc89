"""Check that a prompt leaves room for a response."""

from __future__ import annotations

from dataclasses import replace

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.tasks.text import Problem, Text

_MOST_TOKENS = 4  # per character: its bytes in UTF-8
# Characters of the longest tokens in published vocabularies: runs of spaces or dashes. A text that is surely too long
# is not tokenized, which could take minutes and gigabytes.
_MOST_CHARACTERS = 128


class Room:
    """Finds prompts that are too long; tokenizes only prompts whose number of characters does not decide it.

    ``seq_length`` bounds a prompt and its response together, ``response`` the response alone. With ``drops`` prompts
    that are too long are left out; otherwise they are an error.
    """

    def __init__(self, text: Text, seq_length: int, response: int, drops: bool) -> None:
        self.text = text
        self.tokens = seq_length - response
        self.drops = drops
        self.words = f"tokens, and --seq-length {seq_length} less --max-response-length {response} leaves {self.tokens}"
        self._frames: dict[tuple[str, ...], int] = {}

    def excess(self, problem: Problem) -> int | None:
        """Tokens of a prompt that is too long, or a lower bound of them; None for a prompt that fits.

        Raises ValueError if a prompt is too long and ``drops`` is False, or if the chat template refuses it.
        """
        try:
            if self._surely_fits(problem):
                return None
            least, length = self._lengths(problem)
        except ConfigurationError as error:
            raise ValueError(f"cannot be shown to the model: {error}") from error
        if length <= self.tokens:
            return None
        if not self.drops:
            about = "at least " if least == length else ""
            raise ValueError(
                f"has a prompt of {about}{length} {self.words}: shorten it, or leave such prompts out with "
                "--overlong-prompts drop"
            )
        return length

    def _lengths(self, problem: Problem) -> tuple[int, int]:
        """Lower bound of a prompt's tokens from its characters, and their number if the bound does not decide."""
        least = len(self.text.shown(problem)) // _MOST_CHARACTERS
        return least, least if least > self.tokens else len(self.text.encode(problem))

    def _surely_fits(self, problem: Problem) -> bool:
        """Whether the upper bound of a prompt's tokens fits; spares the tokenizer most prompts of a large file."""
        if problem.tools:  # a template may write their schemas at any length
            return False
        roles = tuple(message["role"] for message in problem.messages)
        if roles not in self._frames:
            messages = tuple({**message, "content": "a"} for message in problem.messages)
            short = replace(problem, prompt="a", messages=messages)
            _, self._frames[roles] = self._lengths(short)
        # Templates may show other keys of a message than its content.
        num_characters = sum(len(str(message)) for message in problem.messages) or len(problem.prompt)
        return self._frames[roles] + _MOST_TOKENS * num_characters <= self.tokens
