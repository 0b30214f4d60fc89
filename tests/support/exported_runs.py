"""Metrics that healthy runs export, for weights of each level: responses of 8 to 8,192 tokens."""

import math
import random

import torch

from megatron_rc import RolloutCorrectionConfig, correct_rollouts
from megatron_rc.doctor.rules import judge
from megatron_rc.doctor.series import facts_of_series
from megatron_rc.doctor.tables import own_rows

STEPS = 12
NAMES = ("old_log_probs", "rollout_log_probs", "response_mask")
# The flags of a run for each level, and the fields of its correction.
LEVELS = {
    "token": {"rollout_is": "token"},
    "sequence": {"rollout_is": "sequence"},
    "geometric": {"rollout_is": "geometric"},
    "bypass": {"rollout_is": None, "bypass_mode": True},
    "metrics only": {"rollout_is": "token", "rollout_is_apply": False, "rollout_token_veto_threshold": 1e-4},
}


def exported(batch, fields, **more):
    """What a run with this correction writes for a batch."""
    # Bypass mode measures in the loss, by the same arithmetic.
    config = RolloutCorrectionConfig(**{name: value for name, value in fields.items() if name != "bypass_mode"}, **more)
    sides = {}
    if "policy_versions" in batch:
        newest = int(batch["policy_versions"].max())
        sides = {"policy_versions": batch["policy_versions"], "current_version": newest, "max_staleness": newest}
    tensors = (batch[name] for name in NAMES)
    return correct_rollouts(*tensors, config, allow_zero_log_probs=True, **sides).metrics()


def flags(fields):
    """A run's flags, as its ``config.yaml`` lists them."""
    names = {"rollout_is": "sequence", "rollout_is_apply": True, "bypass_mode": False} | fields
    return {name.replace("_", "-"): str(value).lower() for name, value in names.items()}


def healthy_batches(seed):
    """The batches of a run of 12 steps, with random sizes: lengths of 8 to 8,192 tokens, at the end too.

    A token's log ρ is normal with E[ρ] = 1, as if its logit were rounded. Most tokens are nearly certain.
    """
    dice = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    length = round(8 * 2 ** dice.uniform(0, 10))
    growth = min(2.0 ** dice.uniform(-1, 2), 8192 / length)  # of the lengths over the run
    sequences = max(16, min(256, 2**19 // round(length * max(growth, 1))))
    # Mean k3 in nats. Rounding to bfloat16 left at most 6.4e-4 in 200 batches (docs/doctor.md).
    k3 = 10 ** dice.uniform(-5.3, -3.2)
    for step in range(STEPS):
        most = min(8192, max(8, round(length * growth ** (step / (STEPS - 1)))))
        lengths = torch.randint(max(1, most // 2), most + 1, (sequences,), generator=generator)
        open_ = torch.rand(sequences, most, generator=generator).pow(3)
        # The mean of open_² is 1/7, and k3 of a normal log ρ is half of its variance.
        sigma = math.sqrt(14 * k3) * open_
        log_ratio = sigma * torch.randn(open_.shape, generator=generator) - sigma.square() / 2
        rollout = -0.01 - 3 * open_
        yield {
            "rollout_log_probs": rollout,
            "old_log_probs": (rollout + log_ratio).clamp(max=0.0),
            "response_mask": torch.arange(most) < lengths.unsqueeze(1),
        }


def healthy_rows(seed, fields):
    """The rows of a run's ``metrics.jsonl``, for each of some corrections."""
    reward = 0.3
    for step, batch in enumerate(healthy_batches(seed), start=1):
        reward += 0.01
        common = {
            "step": step,
            "reward/mean": reward,
            "rollout/response_length": float(batch["response_mask"].sum(1).float().mean()),
        }
        yield [{**common, **exported(batch, fields_of_level)} for fields_of_level in fields]


def verdicts(rows, settings=None):
    """The name of each verdict on a run's rows, and its kind, in order."""
    results = judge(facts_of_series(own_rows(rows, "here")[0], settings))
    return {verdict.rule.name: verdict.rule.kind for verdict in results}
