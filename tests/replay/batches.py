"""Batches with both policies for replays: small, ragged, with holes, and every number another one."""

import torch

from tests.support.made_rollouts import made_batch


def scored_batch(seed=0, rows=12, length=20, version=3, noise=0.25):
    """Responses to prompts of 4 each; the trainer's log-probs differ from the engine's by about ``noise``."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(shape, generator=generator)

    prompt = torch.randint(1, 4, (rows, 1), generator=generator)
    end = prompt + torch.randint(3, length - 4, (rows, 1), generator=generator)
    column = torch.arange(length).expand(rows, length)
    mask = (column >= prompt) & (column < end) & (uniform(rows, length) > 0.1)
    mask[:, 4] = True
    rollout = -3 * uniform(rows, length) - 0.5
    old = (rollout + noise * torch.randn((rows, length), generator=generator)).clamp(max=-0.01)
    age = torch.randint(0, 3, (rows, 1), generator=generator)
    return made_batch(
        torch.randint(0, 50, (rows, length), generator=generator),
        mask,
        rollout,
        torch.randint(-1, 2, (rows,), generator=generator).float(),
        policy_versions=(version - age).expand(rows, length).int().contiguous(),
        sample_ids=torch.arange(rows) + 100,
        old_log_probs=torch.where(mask, old, torch.nan),
    )
