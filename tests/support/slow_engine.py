"""The trainer with a first rollout that never ends on rank 1; a file in the run's folder tells that it has begun."""

import os
import time
from pathlib import Path

from megatron_rc.launch import train_ppo
from megatron_rc.launch.rollouts.sampler import RolloutSampler

sample = RolloutSampler.sample


def sample_for_ever(sampler, step):
    if os.environ["RANK"] == "1":
        launch = sampler.config.launch
        Path(launch.runs_dir, launch.run_name, "rollout").touch()
        time.sleep(600)
    return sample(sampler, step)


if __name__ == "__main__":
    RolloutSampler.sample = sample_for_ever
    train_ppo.main()
