"""Megatron-Core's timers with Megatron-LM's names (``--log-timers-to-tensorboard``)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

from megatron_rc.launch.run_config import RunConfig

# Megatron-LM's list. All ranks reduce all of these names, because they may have run different timers.
_NAMES = (
    *("forward-backward", "forward-compute", "backward-compute"),
    *("forward-recv", "forward-send", "backward-recv", "backward-send", "forward-send-forward-recv"),
    *("forward-send-backward-recv", "backward-send-forward-recv", "backward-send-backward-recv"),
    *("forward-backward-send-forward-backward-recv", "all-grads-sync", "non-tensor-parallel-grads-all-reduce"),
    *("embedding-grads-all-reduce", "params-all-gather", "optimizer", "optimizer-copy-to-main-grad"),
    *("optimizer-unscale-and-check-inf", "optimizer-clip-main-grad", "optimizer-inner-step"),
    "optimizer-copy-main-to-model-params",
)


class StepTimers:
    """Times of an optimizer step's parts; ``megatron`` has Megatron's ``Timers``, or None without the flag."""

    def __init__(self, config: RunConfig) -> None:
        self.megatron: Any = None
        if config.logging.log_timers_to_tensorboard:
            from megatron.core.timers import Timers

            self.megatron = Timers(config.logging.timing_log_level or 0, "max")
        self._begun = time.monotonic()

    @contextlib.contextmanager
    def optimizer(self) -> Iterator[None]:
        """Context that measures a step of the optimizer."""
        if self.megatron is None:
            yield
            return
        self.megatron("optimizer", log_level=1).start()
        try:
            yield
        finally:
            self.megatron("optimizer").stop()

    def metrics(self) -> dict[str, float]:
        """Seconds since the last call; for each timer, its maximum over the ranks and the share of these seconds.

        Collectives: with the flag, one all-gather over all ranks of one number per timer.
        """
        if self.megatron is None:
            return {}
        now = time.monotonic()
        whole = now - self._begun
        self._begun = now
        # Megatron's ``write`` logs the same values, but returns nothing.
        times = self.megatron._get_global_min_max_time(list(_NAMES), reset=True, barrier=False, normalizer=1.0)
        seconds = {name: most for name, (_, most) in times.items()}
        shares = {f"{name}-share": most / whole for name, most in seconds.items()}
        return {"iteration-time": whole} | {f"{name}-time": most for name, most in seconds.items()} | shares
