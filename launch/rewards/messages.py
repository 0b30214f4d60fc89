"""Messages between the trainer and a worker, apart from requests, which are pickled keywords of the rule."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rules import Source


@dataclass(frozen=True)
class Setup:
    """The first message to a worker.

    Attributes:
        source: of the rule.
        timeout: seconds for one sample.
        load_timeout: seconds to load the rule.
        parent: process that started the worker.
        stacks: number of the open file for the stack of a rule that hangs or crashes.
    """

    source: Source
    timeout: float
    load_timeout: float
    parent: int
    stacks: int


def write_outcome(outcome: Outcome) -> bytes:
    """Return a worker's answer as plain JSON, so that no object of the user's code comes into the trainer."""
    return json.dumps(asdict(outcome)).encode()


def read_outcome(answer: bytes) -> Outcome:
    """Read a worker's answer."""
    return Outcome(**json.loads(answer))
