"""Numbers of optimizer steps, rollout batches and checkpoints of a run, in words."""

from __future__ import annotations

from megatron_rc.launch.run_config import RunConfig


def passes_in_words(config: RunConfig) -> str:
    """Line for the dry run and for the start of a run."""
    steps, last, interval = config.updates_per_rollout, config.training.train_iters, config.checkpoints.save_interval
    saved = f"; --save-interval {interval}: after every {interval // steps} of them" if interval else ""
    return (
        f"--grpo-iterations {config.rollouts.grpo_iterations} makes {steps} optimizer steps of each rollout batch; "
        f"--train-iters {last}: {-(-last // steps)} rollout batches{saved}"
    )
