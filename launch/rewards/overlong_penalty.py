"""The soft punishment of long responses: the reward falls over the last tokens before the longest length.

Yu et al. 2025, "DAPO", Eq. 13 (verl's ``overlong_buffer``): L tokens at most, the last B of them the buffer, n tokens
of a response. The penalty is factor · max(0, n - (L - B)) / B, and so the whole factor at n = L, if the response ends
there or is cut off.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from megatron_rc.launch.rewards.rewarder import Rewards
from megatron_rc.launch.run_config import RunConfig

PENALTY = "overlong_penalty"


def penalised(rewards: Rewards, lengths: Sequence[int], config: RunConfig) -> Rewards:
    """Subtract the penalty, which becomes a component; return rewards unchanged without ``--overlong penalise``.

    Args:
        rewards: of some responses.
        lengths: tokens of each, its end included.
        config: of the run.
    """
    buffer = config.rewards.overlong_buffer
    if config.rewards.overlong != "penalise" or buffer is None:
        return rewards
    free, factor = config.rollouts.max_response_length - buffer, config.rewards.overlong_penalty_factor
    taken = [factor * max(0, length - free) / buffer for length in lengths]
    return Rewards(
        [value - off for value, off in zip(rewards.values, taken, strict=True)],
        [
            dataclasses.replace(one, components={**one.components, PENALTY: off})
            for one, off in zip(rewards.outcomes, taken, strict=True)
        ],
    )
