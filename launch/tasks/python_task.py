"""Tasks of the user's own: ``--task python:pkg.module:Class``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.python_specs import in_words, load_python, own_traceback
from megatron_rc.launch.tasks.text import CharacterText, HuggingFaceText, Problem, Text


class PythonTask:
    """A user's class as a task, with checks of its results.

    The class is called with ``seed=...``. It needs the method ``problems(start, count, held_out=False)``. Optional are
    the method ``reward(prompt, response, label, record)``, the method ``reply`` with the same parameters, for several
    turns, and the attributes ``max_response_length`` and ``characters``, a text with all characters of the default
    tokenizer. Both methods may have the further parameters ``turns`` and ``token_ids``.
    """

    def __init__(self, spec: str, seed: int, text: Text | None = None, max_response_length: int | None = None) -> None:
        self._user = f"--task {spec}"
        self._own = _make(spec, seed)
        if not callable(getattr(self._own, "problems", None)):
            raise ConfigurationError(f"{self._user} has no method problems(start, count, held_out=False): add it")
        self.text = text or CharacterText(self._characters())
        longest = max_response_length or getattr(self._own, "max_response_length", None)
        if not isinstance(longest, int) or longest <= 0:
            raise ConfigurationError(
                f"{self._user} has max_response_length {longest!r}: set that attribute to a number of tokens, or give "
                "--max-response-length"
            )
        self.max_response_length: int = longest
        self.reward = _method_of(self._own, "reward", self._user)

    def problems(self, start: int, count: int, held_out: bool = False) -> list[Problem]:
        """Problems of the class."""
        problems: list[Problem] = _call(self._user, "problems", self._own.problems, start, count, held_out=held_out)
        result = None  # in words, if it is not what was asked for
        if not isinstance(problems, list):
            result = f"a {type(problems).__name__}"
        elif strangers := [entry for entry in problems if not isinstance(entry, Problem)]:
            result = f"a list with a {type(strangers[0]).__name__}"
        elif len(problems) != count:
            result = f"{len(problems)} of them"
        if result is not None:
            raise ConfigurationError(
                f"{self._user}: problems({start}, {count}, held_out={held_out}) must give a list of {count} "
                f"megatron_rc.launch.tasks.Problem, it gave {result}"
            )
        for number, problem in enumerate(problems, start):
            name = f"problem {number} (held_out={held_out})"
            flaw = _call(self._user, name, self._flaw, problem)
            if flaw is not None:
                raise ConfigurationError(f"{self._user}: {name} {flaw}")
        return problems

    def _flaw(self, problem: Problem) -> str | None:
        """Reason why a problem cannot be a prompt; None: it can. Examples and messages of other types raise errors."""
        if not isinstance(problem.record, Mapping):
            return f"has the record {problem.record!r:.40}: give a dict"
        texts = [problem.prompt, *(part for pair in problem.examples for part in pair)]
        if not all(isinstance(text, str) for text in texts):
            return f"has the prompt {problem.prompt!r:.40} and examples {problem.examples!r:.40}: give texts"
        if problem.tools:
            if not isinstance(self.text, HuggingFaceText) or not self.text.chat:
                return "has tools, which only a chat template shows: give --apply-chat-template, or leave them out"
            self.text.check_template_reads("tools", f"{self._user}, whose problems have tools")
        if not all(isinstance(tool, Mapping) for tool in problem.tools):
            return f"has the tools {problem.tools!r:.40}: give dicts with their schemas"
        alphabet = self.text.alphabet if isinstance(self.text, CharacterText) else frozenset()
        unknown = next((char for char in "".join(texts) if alphabet and char not in alphabet | {"\n"}), None)
        if unknown is not None:
            return f"has {unknown!r}, which is not a character of the tokenizer: add it, or give --tokenizer-model"
        return None if self.text.encode(problem) else "has an empty prompt: give it a text"

    def _characters(self) -> str:
        characters = getattr(self._own, "characters", None)
        if not isinstance(characters, str) or not characters:
            raise ConfigurationError(
                f"{self._user} has no attribute characters, a str for the tokenizer: add it, or give --tokenizer-model"
            )
        return characters


def own_method(spec: str, seed: int, name: str) -> Any:
    """The method ``reward`` or ``reply`` of a user's class, or None; needs no tokenizer."""
    return _method_of(_make(spec, seed), name, f"--task {spec}")


def _make(spec: str, seed: int) -> Any:
    kind = load_python(spec, "--task")
    if not isinstance(kind, type):
        raise ConfigurationError(f"--task {spec} is of type {type(kind).__name__}: name a class")
    return _call(f"--task {spec}", kind.__name__, kind, seed=seed)


def _method_of(task: Any, name: str, user: str) -> Any:
    method = getattr(task, name, None)
    if method is not None and not callable(method):
        raise ConfigurationError(f"{user} has a {name} that is not a method: make it one, or give --{name}")
    return method


def _call(user: str, name: str, function: Any, *args: Any, **named: Any) -> Any:
    try:
        return function(*args, **named)
    except ConfigurationError:
        raise
    except (Exception, SystemExit) as error:  # a user's class can raise anything
        raise ConfigurationError(
            f"{own_traceback(error, (__file__,))}\n{user}: {name} raises {in_words(error)}"
        ) from error
