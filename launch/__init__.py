"""PPO on Megatron-Core: flags, model, rollouts and the loop that torchrun starts."""
