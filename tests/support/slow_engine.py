"""The trainer with a limit of seconds for collectives, four heartbeats a second, and a first rollout that takes longer.

``SLOW_ROLLOUT`` holds its seconds and the ranks that sample so long. A file in the run's folder tells that it began.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from megatron_rc.launch import heartbeats, train_ppo
from megatron_rc.launch.rollouts.sampler import RolloutSampler

LIMIT_SECONDS = 4
configure, sample = train_ppo.configure, RolloutSampler.sample


def configure_impatiently(*args):
    config, task = configure(*args)
    return replace(config, launch=replace(config.launch, distributed_timeout_minutes=LIMIT_SECONDS / 60)), task


def sample_slowly(sampler, step):
    seconds, *ranks = os.environ["SLOW_ROLLOUT"].split()
    if step == 0 and os.environ["RANK"] in ranks:
        launch = sampler.config.launch
        Path(launch.runs_dir, launch.run_name, "rollout").touch()
        time.sleep(float(seconds))
    return sample(sampler, step)


if __name__ == "__main__":
    heartbeats.BEAT_SECONDS = 0.25
    train_ppo.configure, RolloutSampler.sample = configure_impatiently, sample_slowly
    train_ppo.main()
