"""Made metrics of runs: healthy ones, whose numbers wander, and drifting ones; and metrics of the study's runs."""

import math
import random


def healthy_run(seed):
    """Rows of 40 to 600 steps, with random levels, trends and noise like sound runs'.

    k3 wanders within a factor of about 4, as the policy grows more or less certain. The gradient norm changes up to
    2-fold, lengths up to 4-fold, and the reward rises, stays, or falls a little at the end.
    """
    dice = random.Random(seed)
    steps = dice.choice([40, 100, 300, 600])
    walk = 0.0
    level = 10 ** dice.uniform(-5.5, -3.3)
    slope = dice.uniform(-math.log(3), math.log(3))
    noise = dice.uniform(0.05, 0.4)
    grad_slope = dice.uniform(-1.0, math.log(2))
    longer = dice.uniform(-0.5, math.log(4))
    start = dice.random() * 0.5
    gain = dice.random() * 0.5
    loss = dice.random() * 0.02
    reward_noise = dice.uniform(0, 0.1)
    for step in range(1, steps + 1):
        part = step / steps
        walk = 0.98 * walk + 0.05 * dice.gauss(0, 1)
        k3 = level * math.exp(slope * part + walk + noise * dice.gauss(0, 1))
        late = max(0.0, part - 0.8) / 0.2
        yield {
            "step": step,
            "rollout_corr/k3_kl": k3,
            "rollout_corr/rollout_is_eff_sample_size": 1 / (1 + 2 * k3),
            "grad_norm": math.exp(grad_slope * part + 0.3 * dice.gauss(0, 1)),
            "rollout/response_length": 100 * math.exp(longer * part + 0.1 * dice.gauss(0, 1)),
            "reward/mean": start + gain * (1 - math.exp(-5 * part)) - loss * late + reward_noise * dice.gauss(0, 1),
        }


def drifting_run(seed, growth=150.0):
    """(a healthy run in which k3 grows by this factor and the reward falls from a step on, that step)."""
    dice = random.Random(seed)
    rows = list(healthy_run(seed))
    begin = int(len(rows) * dice.uniform(0.3, 0.7))
    for index, row in enumerate(rows[begin:]):
        part = (index + 1) / (len(rows) - begin)
        row["rollout_corr/k3_kl"] *= growth**part
        row["rollout_corr/rollout_is_eff_sample_size"] = 1 / (1 + 2 * row["rollout_corr/k3_kl"])
        row["reward/mean"] -= 0.5 * part
        row["grad_norm"] *= 4**part
    return rows, begin + 1


_MEASURES = {
    "sampled": "reward/mean",
    "kl": "rollout_corr/k3_kl",
    "ess": "rollout_corr/rollout_is_eff_sample_size",
    "grad_norm": "grad_norm",
}


def study_rows(run):
    """The rows of a study's run: ten batches for each point of its curves, which are means of ten steps.

    A billionth of the step is added to the reward: equal rewards in a row are those of one batch.
    """
    for step in range(1, 10 * len(run.curves["kl"]) + 1):
        values = {name: run.curves[measure][(step - 1) // 10] for measure, name in _MEASURES.items()}
        row = {name: value for name, value in values.items() if value is not None}
        yield {"step": step, **row, "reward/mean": row["reward/mean"] + 1e-9 * step}


def with_steps(rows, steps_a_batch):
    """The rows of a run that makes this many optimizer steps of each batch: each repeats what its batch has."""
    step = 0
    for row in rows:
        for _ in range(steps_a_batch):
            step += 1
            yield {**row, "step": step}
