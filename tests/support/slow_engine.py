"""The trainer with a limit of seconds for collectives, and a first rollout that takes longer.

``LIMIT_SECONDS`` holds the limit, ``SLOW_ROLLOUT`` the rollout's seconds and the ranks that sample so long. A file in
the run's folder tells that it began.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from megatron_rc.launch import train_ppo
from megatron_rc.launch.rollouts.sampler import RolloutSampler

configure = train_ppo.configure
sample = RolloutSampler.sample


def configure_impatiently(*args):
    config, task = configure(*args)
    minutes = float(os.environ.get("LIMIT_SECONDS", "4")) / 60
    return replace(config, launch=replace(config.launch, distributed_timeout_minutes=minutes)), task


def sample_slowly(sampler, step):
    seconds, *ranks = os.environ.get("SLOW_ROLLOUT", "0").split()
    if step == 0 and os.environ["RANK"] in ranks:
        launch = sampler.config.launch
        Path(launch.runs_dir, launch.run_name, "rollout").touch()
        time.sleep(float(seconds))
    return sample(sampler, step)


if __name__ == "__main__":
    train_ppo.configure = configure_impatiently
    RolloutSampler.sample = sample_slowly
    train_ppo.main()
