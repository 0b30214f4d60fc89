"""What the trainer and a worker tell each other, apart from requests, which are pickled keywords of the rule."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from megatron_rc.launch.rewards.outcome import Outcome
from megatron_rc.launch.rewards.rules import Source


@dataclass(frozen=True)
class Setup:
    """What a worker is told first.

    Attributes:
        source: of the rule.
        timeout: seconds for one sample.
        load_timeout: seconds to load the rule.
        parent: process that started it.
        stacks: number of the open file where it writes down where a rule hangs or crashes.
    """

    source: Source
    timeout: float
    load_timeout: float
    parent: int
    stacks: int


def write_outcome(outcome: Outcome) -> bytes:
    """The answer of a worker: plain JSON, so that no object of the user's code comes into the trainer."""
    return json.dumps(asdict(outcome)).encode()


def read_outcome(answer: bytes) -> Outcome:
    """What a worker answered."""
    return Outcome(**json.loads(answer))
