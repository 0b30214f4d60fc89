"""The trainer with a limit of seconds for collectives and four heartbeats a second; its first rollout takes longer."""

import time
from dataclasses import replace

from megatron_rc.launch import heartbeats, train_ppo
from megatron_rc.launch.rollouts.sampler import RolloutSampler

LIMIT_SECONDS, ROLLOUT_SECONDS = 4, 5
configure, sample = train_ppo.configure, RolloutSampler.sample


def configure_impatiently(*args):
    config, task = configure(*args)
    return replace(config, launch=replace(config.launch, distributed_timeout_minutes=LIMIT_SECONDS / 60)), task


def sample_slowly(sampler, step):
    if step == 0:
        time.sleep(ROLLOUT_SECONDS)
    return sample(sampler, step)


if __name__ == "__main__":
    heartbeats.BEAT_SECONDS = 0.25
    train_ppo.configure, RolloutSampler.sample = configure_impatiently, sample_slowly
    train_ppo.main()
