"""The outcome of a reward function for one sample: numbers, or the reason that there are none."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_rc.launch.python_specs import in_words, own_traceback

REWARD = "reward"
OBSERVATION = "observation"
MAX_COMPONENTS = 32
# The largest float32; a batch holds rewards in float32.
LARGEST = (2 - 2**-23) * 2.0**127
MAX_TRACEBACK = 20_000
# Names under reward/ that the launcher's own metrics have.
RESERVED = (
    *("mean", "std", "max", "min", "nonzero_advantages", "errors", "overlong_penalty"),
    *("kl", "running_mean", "running_std", "greedy"),
)
_HERE = str(Path(__file__).parent)
_NAME = re.compile(r"[A-Za-z][\w.-]{0,63}", re.ASCII)


@dataclass(frozen=True)
class Outcome:
    """The score of one sample."""

    reward: float = math.nan  # the number to train on; NaN if there is none
    components: Mapping[str, float] = field(default_factory=dict)  # the other entries of a dict, by name
    failure: str | None = None  # the function's failure as a verb, ``raised ValueError: ...``; None: there is a number
    traceback: str = ""  # traceback of the failure; may be empty
    # Reply to a turn: the observation as a text or as token ids; None: the conversation is over.
    observation: str | list[int] | None = None


def outcome_of(call: Callable[[], Any], read: Callable[[Any], Outcome]) -> Outcome:
    """Make the call and read its result by :func:`read_score` or :func:`read_reply`; an exception becomes a failure."""
    try:
        return read(call())
    except _NoNumber as problem:
        return Outcome(failure=str(problem))
    except BaseException as error:  # a user's function can raise anything, sys.exit() included
        text = own_traceback(error, (_HERE,))[-MAX_TRACEBACK:]
        return Outcome(failure=f"raised {in_words(error)}", traceback=text)


class _NoNumber(ValueError):
    """The returned value is no reward or no reply; the message names the value."""


def read_reply(answer: Any) -> Outcome:
    """The reply to a turn: None, a text, token ids, or a dict with ``observation``, one of these, and ``reward``.

    The reward of a turn is 0 by default.
    """
    entries = dict(answer) if isinstance(answer, Mapping) else {OBSERVATION: answer}
    unknown = sorted(map(str, entries.keys() - {OBSERVATION, REWARD}))
    if unknown:
        raise _NoNumber(f"gave a dict with {', '.join(unknown)[:80]}: a reply has 'observation' and 'reward'")
    observation = entries.get(OBSERVATION)
    is_ids = isinstance(observation, list) and all(type(token) is int for token in observation)
    if observation is not None and not isinstance(observation, str) and not is_ids:
        raise _NoNumber(f"gave {reprlib.repr(observation)}, which is no text, no list of token ids and not None")
    if observation is not None and not observation:
        raise _NoNumber("gave an empty observation: give None to end the conversation")
    return Outcome(_number(entries.get(REWARD, 0.0), "gave 'reward':"), observation=observation)


def read_score(answer: Any) -> Outcome:
    """The score of a response: a number, or a dict of numbers with the entry ``reward``."""
    if not isinstance(answer, Mapping):
        return Outcome(_number(answer, "gave"))
    if REWARD not in answer:
        raise _NoNumber(f"gave a dict without the entry 'reward': {reprlib.repr(answer)}")
    if len(answer) > MAX_COMPONENTS:
        raise _NoNumber(f"gave a dict of {len(answer)} entries, {MAX_COMPONENTS} can be logged")
    numbers = {name: _number(value, f"gave {reprlib.repr(name)}:") for name, value in answer.items()}
    for name in numbers:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name in RESERVED:
            raise _NoNumber(
                f"gave a component named {reprlib.repr(name)}: a name has letters, digits, '_', '.' and '-', at most "
                f"64, and is none of {', '.join(RESERVED)}"
            )
    return Outcome(numbers.pop(REWARD), numbers)


def _number(value: Any, sentence_start: str) -> float:
    # Numbers of numpy and torch have __float__, texts have not.
    if not hasattr(value, "__float__"):
        raise _NoNumber(f"{sentence_start} {reprlib.repr(value)}, which is no number")
    number = float(value)
    if not abs(number) <= LARGEST:
        raise _NoNumber(f"{sentence_start} {number}, which cannot be trained on")
    return number
