"""Responses that were started for a rollout batch and are not in it."""

from __future__ import annotations

from typing import NamedTuple


class Excluded(NamedTuple):
    """A response that an engine sampled for a rollout batch, and that is not in the batch."""

    # The group id of its prompt in the batch, and 0; for a replaced prompt the group id of the prompt that took its
    # place, and the number of the replacement from 1.
    prompt: tuple[int, int]
    num_tokens: int  # number of sampled tokens; 0: no token came, so that the length is unknown
    is_bad: bool  # the response was bad (``--bad-samples``); else its prompt was replaced (``--dynamic-sampling``)
