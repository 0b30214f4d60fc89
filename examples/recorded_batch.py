"""A recorded rollout batch, corrected without a model: the correction's metrics, and a picture of its weights.

    python examples/recorded_batch.py --make records                # a made-up batch to try it with
    python examples/recorded_batch.py records/*.safetensors --out weights.png

A run of the launcher records its batches with --save-rollouts records --save-log-probs. For another program, make a
batch with from_verl, from_slime or from_nemo_rl, then save_rollouts (docs/rollouts.md). Presets: docs/presets.md.
"""

import argparse
import math
import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure

import megatron_rc as rc


def make(folder: Path) -> None:
    """Write 64 responses of 8 to 64 tokens; the engine's log-probs err by 0.1 nats, in the last 8 responses by 0.5."""
    dice = torch.Generator().manual_seed(0)
    rows = 64
    length = 72
    response = torch.arange(length) >= 8
    response = response & (torch.arange(length) < torch.randint(16, length + 1, (rows, 1), generator=dice))
    old = -3 * torch.rand(rows, length, generator=dice) - 0.01
    error = torch.where(torch.arange(rows) < rows - 8, 0.1, 0.5).unsqueeze(1)
    batch = rc.RolloutBatch(
        tokens=torch.randint(0, 100, (rows, length), generator=dice),
        response_mask=response,
        rollout_log_probs=(old + error * torch.randn(rows, length, generator=dice)).clamp(max=0),
        policy_versions=torch.zeros(rows, length, dtype=torch.int32),
        sample_ids=torch.arange(rows),
        group_ids=torch.arange(rows) // 8,
        rewards=torch.randint(0, 2, (rows,), generator=dice).float(),
        finish_reasons=torch.zeros(rows, dtype=torch.int64),
        sampling=rc.SamplingParams(),
        old_log_probs=old,
    )
    folder.mkdir(parents=True, exist_ok=True)
    rc.save_rollouts(batch, folder / "step-00000-replica-00000.safetensors")


def read(files: list[str]) -> rc.RolloutBatch:
    """All records as one batch; every response needs the trainer's log-probs."""
    parts = []
    for file in files:
        found = list(rc.read_jsonl(file, 4096)) if file.endswith(".jsonl") else [rc.load_rollouts(file)]
        if not found:
            raise ValueError(f"{file} has no responses")
        if any(part.old_log_probs is None for part in found):
            raise ValueError(
                f"{file} has no old_log_probs, the trainer's log-probs: record with --save-rollouts --save-log-probs"
            )
        parts += found
    return rc.RolloutBatch.concatenate(parts)


def draw(
    batch: rc.RolloutBatch, mask: torch.Tensor, result: rc.CorrectionResult, config: rc.RolloutCorrectionConfig
) -> Figure:
    """Draw weights by the position in the response, and the distribution of ratios with the bounds of token weights."""
    position = batch.response_mask.cumsum(1) - 1
    log_ratio = batch.old_log_probs - batch.rollout_log_probs
    weights = torch.ones_like(log_ratio) if result.weights is None else result.weights
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for chosen, color, verdict in ((result.mask, "tab:blue", "accepted"), (mask & ~result.mask, "tab:red", "rejected")):
        left.scatter(position[chosen], weights[chosen], s=4, c=color, label=f"{int(chosen.sum())} tokens {verdict}")
    left.set(xlabel="position in the response", ylabel="weight")
    left.legend(loc="upper right")
    right.hist(log_ratio[mask].tolist(), bins=60)
    if config.rollout_is == "token":
        low, high = config.is_bounds
        for bound in (high,) if config.is_mode == "truncate" else (low, high):
            right.axvline(math.log(bound), color="black", linestyle="--")
    right.set(xlabel="log π_old - log π_rollout, nats; dashed: bounds of token weights", ylabel="tokens")
    return figure


def main() -> None:
    """Print the metrics, and draw the picture."""
    parser = argparse.ArgumentParser(description="Correct a recorded rollout batch.", allow_abbrev=False)
    parser.add_argument("records", nargs="*", help="files of --save-rollouts, or JSON lines (.jsonl)")
    parser.add_argument(
        "--rollout-correction-preset",
        metavar="NAME",
        default="decoupled_k3_rs_token_tis",
        help="a decoupled preset; default: decoupled_k3_rs_token_tis",
    )
    parser.add_argument("--out", metavar="FILE.png", help="file for a picture; default: no picture")
    parser.add_argument("--make", type=Path, metavar="DIR", help="only write a made-up batch into this folder")
    args = parser.parse_args()
    if bool(args.make) == bool(args.records):
        parser.error("name files of recorded rollouts, or --make DIR")
    try:
        if args.make:
            make(args.make)
            return
        batch = read(args.records)
        config = rc.rollout_correction_config_from_args(args)
        if config.bypass_mode:
            raise ValueError(f"--rollout-correction-preset {args.rollout_correction_preset}: use a decoupled preset")
        mask = batch.response_mask & ~batch.old_log_probs.isnan()  # the tokens that the trainer scored
        both = batch.old_log_probs, batch.rollout_log_probs
        result = rc.correct_rollouts(*both, mask, config, rewards=batch.rewards)
        result.check()
        if args.out:
            draw(batch, mask, result, config).savefig(args.out, dpi=100)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    for name, value in result.metrics().items():
        sys.stdout.write(f"{name} {value:.6g}\n")


if __name__ == "__main__":
    main()
