"""Time and memory of a replay: 2²⁴ tokens of one safetensors file under four presets, without the page.

    python benchmarks/replay.py [--sequences 4096] [--length 4097] [--html FILE]

The file is made first, in a temporary folder. The measured command runs in a process of its own: imports, reading, four
corrections with all metrics, gradients, tables. The processor's seconds are the sum over all threads; on a busy machine
they are more reliable than the clock's.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from megatron_rc.records.rollout import RolloutBatch, save_rollouts  # noqa: E402
from tests.support.made_rollouts import made_batch  # noqa: E402

PRESETS = ("decoupled_token_is", "decoupled_seq_is_rs", "decoupled_geo_rs_token_tis", "bypass_ppo_clip_k3_rs")


def make_batch(sequences: int, length: int) -> RolloutBatch:
    """Responses that fill all but the first column, and two policies that are a few percent apart."""
    generator = torch.Generator().manual_seed(0)
    shape = (sequences, length)
    rollout = torch.rand(shape, generator=generator).pow_(3).mul_(-6).sub_(1e-4)
    old = torch.randn(shape, generator=generator).mul_(0.05).add_(rollout).clamp_(max=-1e-6)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[:, 0] = False
    versions = torch.randint(4, (sequences, 1), generator=generator).int().expand(shape).contiguous()
    return made_batch(
        torch.randint(0, 50000, shape, generator=generator),
        mask,
        rollout,
        torch.randint(2, (sequences,), generator=generator).float(),
        policy_versions=versions,
        group_ids=torch.arange(sequences) // 8,
        old_log_probs=old,
    )


def main() -> None:
    """Make the file, replay it, and print time and memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4096, help="responses; default: 4096")
    parser.add_argument("--length", type=int, default=4097, help="columns, one of them a prompt; default: 4097")
    parser.add_argument("--html", type=Path, help="also write the page to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "batch.safetensors"
        save_rollouts(make_batch(args.sequences, args.length), file)
        words = [sys.executable, "-m", "megatron_rc.replay", str(file)]
        words += [word for preset in PRESETS for word in ("--preset", preset)]
        words += ["--html", str(args.html.resolve())] if args.html else []
        begun = time.monotonic()
        subprocess.run(words, cwd=ROOT, check=True)
        seconds = time.monotonic() - begun
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        size = file.stat().st_size / 2**30
    tokens = args.sequences * (args.length - 1)
    sys.stdout.write(
        f"\n{tokens} tokens, {size:.2f} GiB file: {seconds:.1f} s, "
        f"of the processor {used.ru_utime + used.ru_stime:.1f} s, {used.ru_maxrss / 2**20:.1f} GiB at most\n"
    )


if __name__ == "__main__":
    main()
