"""Rollout batches that are sampled one at a time, or all open ones at once: seconds of a run, at equal staleness.

    python benchmarks/open_batches.py [--spread 1.0] [--ahead 2]

The server waits as long as a response takes, and computes nothing: durations are lognormal, as lengths of reasoning
often are, and do not depend on the number of open requests. The trainer waits as long as a step takes.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import sys
import tempfile
import time
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_rc.launch.engines import Progress
from megatron_rc.launch.engines.vllm_client import ROUTE, VllmClient
from megatron_rc.launch.rollouts.work_threads import WorkThreads
from megatron_rc.records.rollout import SamplingParams
from tests.support.rollout_servers import Server, given, running

CONCURRENCY = 32
RESPONSES = 64
BATCHES = 12
ROUNDS = 3
MEDIAN = 0.1  # seconds of a response


def server_of(spread: float) -> type[Server]:
    """A server whose responses take lognormal times, which follow from their seeds."""

    class Slow(Server):
        def answer(self, path: str, body: Any) -> Any:
            if path == ROUTE:
                seed = body["sampling_params"]["seed"]
                time.sleep(MEDIAN * math.exp(spread * random.Random(seed).gauss(0, 1)))
            return super().answer(path, body)

    return Slow


def run(spread: float, ahead: int, threads: int, step_seconds: float) -> float:
    """Seconds of a run of some batches."""
    with tempfile.TemporaryDirectory() as folder, running(kind=server_of(spread)) as server:
        engine = given(VllmClient, server, Path(folder), 0, partial_rollouts=True, concurrency=CONCURRENCY)
        prompts = [[2 + index % 9, index // 9] for index in range(RESPONSES)]

        def obtain(batch: int) -> list[Any]:
            progress = Progress(batch, prompts, SamplingParams(), {})
            return engine.sample(prompts, SamplingParams(), 4, batch, progress)

        workers = WorkThreads(threads, "rollouts")
        ordered: dict[int, Future[list[Any]]] = {}
        begun = time.perf_counter()
        for batch in range(BATCHES):
            for later in range(batch, min(batch + ahead + 1, BATCHES)):
                if later not in ordered:
                    ordered[later] = workers.submit(partial(obtain, later))
            ordered[batch].result()
            time.sleep(step_seconds)
        seconds = time.perf_counter() - begun
        workers.close()
    return seconds


def main() -> None:
    """Print a row for each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the logarithm of a duration")
    parser.add_argument("--ahead", type=int, default=2, help="batches that are sampled ahead")
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a step of the trainer")
    words = parser.parse_args()
    times: dict[str, list[float]] = {"one at a time": [], "all open ones": []}
    for _ in range(ROUNDS):
        for name, threads in (("one at a time", 1), ("all open ones", words.ahead + 1)):
            times[name].append(run(words.spread, words.ahead, threads, words.step))
    for name, seconds in times.items():
        sys.stdout.write(f"{name}: {', '.join(f'{value:.2f}' for value in seconds)} s\n")
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    sys.stdout.write(f"ratio {medians['one at a time'] / medians['all open ones']:.2f}\n")


if __name__ == "__main__":
    main()
