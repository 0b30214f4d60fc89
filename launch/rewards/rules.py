"""The rule that scores a run's responses, and whether it may run in the trainer's process."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from megatron_rc.launch.errors import ConfigurationError, require
from megatron_rc.launch.python_specs import is_python_spec, load_python
from megatron_rc.launch.rewards.outcome import Outcome, read_reply, read_score
from megatron_rc.launch.tasks import Rule, make_task
from megatron_rc.launch.tasks.labels import BUILT_IN, EXACT, MATH_VERIFY, answers_of, label_flaw, texts_of
from megatron_rc.launch.tasks.python_task import own_method

# Keywords that only functions with such a parameter get: earlier turns, and the tokens of the response.
_ASKED_FOR = ("turns", "token_ids")
# It compares short texts, as the rule exact does, and so can neither hang nor crash. Other rules run in workers.
_HARMLESS_TASK = "count_up"


@dataclass(frozen=True)
class Source:
    """The source of a run's rule, or of its replies to turns; a worker makes the function from it."""

    task: str | None  # ``--task``; None: files of prompts, which have no function of their own
    seed: int  # seed of the task
    given: str | None = None  # value of ``--reward`` or ``--reply``; None: the task's own method
    method: str = "reward"  # "reward" or "reply"

    @property
    def name(self) -> str:
        """The flag and its value."""
        if self.given is not None:
            return f"--{self.method} {self.given}"
        return "--prompt-data" if self.task is None else f"--task {self.task}"

    @property
    def is_harmless(self) -> bool:
        """Whether a rule runs in the trainer's process, without a time limit."""
        return self.given == EXACT or (self.given is None and self.task == _HARMLESS_TASK)

    def check(self) -> None:
        """Raise ConfigurationError if a rule is unknown or its library is not installed."""
        if self.given is None or is_python_spec(self.given):
            return
        if self.given not in BUILT_IN:
            raise ConfigurationError(
                f"--reward {self.given} is unknown: use {', '.join(BUILT_IN)} or python:pkg.module:function"
            )
        if self.given == MATH_VERIFY:
            require("math_verify", self.name, "math")

    def load(self) -> Rule:
        """Load the function into this process; ConfigurationError if there is none, or if it is no function."""
        if self.given is None:
            return _called_by_keywords(self._method_of_task(), self.name)
        if self.method == "reply" or is_python_spec(self.given):
            function = load_python(self.given, f"--{self.method}")
            if not callable(function) or isinstance(function, type):
                raise ConfigurationError(f"{self.name} is {_kind(function)}: name a function")
            return _called_by_keywords(function, self.name)
        self.check()
        return _called_by_keywords(exact if self.given == EXACT else _math_rule(), self.name)

    def read(self, value: Any) -> Outcome:
        """The outcome of a value that the function returned."""
        return read_score(value) if self.method == "reward" else read_reply(value)

    def _method_of_task(self) -> Rule:
        method: Rule | None = None
        if self.task is not None and is_python_spec(self.task):
            method = own_method(self.task, self.seed, self.method)
        elif self.task is not None and self.method == "reward":
            method = make_task(self.task, self.seed).reward
        if method is None:
            lacks = "has no reward of its own: give --reward"
            if self.method == "reply":
                lacks = (
                    "replies to no turn, which --max-turns above 1 needs: give --reply python:pkg.module:function, or "
                    "a task of your own with a method reply"
                )
            raise ConfigurationError(f"{self.name} {lacks}")
        return method


@dataclass(frozen=True)
class Setup:
    """The first message to a worker."""

    source: Source  # source of the rule
    timeout: float  # seconds for one sample
    load_timeout: float  # seconds to load the rule
    parent: int  # process that started the worker
    stacks: int  # number of the open file for the stack of a rule that hangs or crashes


def exact(*, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> float:
    """Return 1 if the response equals the label or an entry of it, apart from white space around it; else 0."""
    _check_label(label, EXACT)
    text = response.strip()
    return float(any(text in texts_of(answer) for answer in answers_of(label)))


def verify_math(library: Any, *, prompt: str, response: str, label: Any, record: Mapping[str, Any]) -> float:
    """Return 1 if math-verify finds the response's last expression equal to the label or an entry of it; else 0."""
    _check_label(label, MATH_VERIFY)
    # No time limits of the library: the worker has its own.
    parsed = [library.parse(_marked(answer), parsing_timeout=None) for answer in answers_of(label)]
    expected = [expression for expression in parsed if expression]
    if not expected:
        raise ValueError(f"math-verify finds no expression in the label {label!r}")
    answer = library.parse(response, parsing_timeout=None)
    return float(any(library.verify(expression, answer, timeout_seconds=None) for expression in expected))


def _check_label(label: Any, rule: str) -> None:
    flaw = label_flaw(label, rule)
    if flaw is not None:
        raise TypeError(f"--reward {rule} compares texts and numbers, or a list of them; the label is {flaw}")


def _marked(answer: str | int | float) -> str:
    """Return an answer as one expression: of an unmarked text math-verify would take the first number."""
    text = texts_of(answer)[-1]
    return text if "$" in text or "\\boxed" in text else f"\\boxed{{{text}}}"


def _math_rule() -> Rule:
    import math_verify

    # It warns at every call that its own time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    return partial(verify_math, math_verify)


def _called_by_keywords(function: Any, name: str) -> Rule:
    """Return a rule that calls the function with the four keywords, and with those of :data:`_ASKED_FOR` it names."""
    kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
    if any(kind(called) for kind in kinds for called in (function, function.__call__)):
        raise ConfigurationError(f"{name} gives no result when it is called: make it neither async nor a generator")
    keywords: dict[str, Any] = {"prompt": "", "response": "", "label": None, "record": {}}
    try:
        signature = inspect.signature(function)
        left_out = {keyword for keyword in _ASKED_FOR if keyword not in signature.parameters}
        signature.bind(**keywords, **{keyword: [] for keyword in _ASKED_FOR if keyword not in left_out})
    except ValueError:  # some callables have no signature
        left_out = set(_ASKED_FOR)
    except TypeError as error:
        raise ConfigurationError(
            f"{name} cannot be called with prompt, response, label and record ({error}): give it these four parameters"
        ) from error
    rule: Rule = partial(_without, left_out, function) if left_out else function
    return rule


def _without(left_out: Set[str], rule: Rule, **arguments: Any) -> Any:
    return rule(**{keyword: value for keyword, value in arguments.items() if keyword not in left_out})


def _kind(value: Any) -> str:
    return "a class" if isinstance(value, type) else f"of type {type(value).__name__}"
