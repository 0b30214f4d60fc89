"""The default run for 1,000 steps on 4 ranks: what the ranks hold does not grow."""

import logging
import statistics
import time

import psutil

from tests.support.runs import children, launch, read, start, wait_for

STEPS = 1000
WARM = 200  # steps after which caches, and what is loaded at first use, are there
SLOPE = 512  # bytes a step and rank
SECONDS = 3600


def test_memory_descriptors_and_threads_stay_flat(tmp_path):
    words = ["--nproc-per-node=4", "--config=count_up", f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}"]
    log = (tmp_path / "log").open("w")
    process = start(launch(*words, f"--runs-dir={tmp_path}"), stdout=log, stderr=log)
    metrics = tmp_path / "count_up" / "metrics.jsonl"
    wait_for(lambda: metrics.is_file() and metrics.read_text(), process, 300)
    ranks = [psutil.Process(pid) for pid in children(process.pid)]
    assert len(ranks) == 4
    seen, begun = {}, time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - begun < SECONDS
        step = len(metrics.read_bytes().splitlines())
        if step < STEPS - 10:  # not what the end of a run does
            seen[step] = [held(rank) for rank in ranks]
        time.sleep(0.5)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert len(read(tmp_path / "count_up")) == STEPS
    steps = [step for step in seen if step >= WARM]
    for rank in range(4):
        memory, descriptors, threads = zip(*(seen[step][rank] for step in steps), strict=True)
        slope = statistics.linear_regression(steps, memory).slope
        logging.info("rank %d: %.0f bytes a step, descriptors %s, threads %s", rank, slope, {*descriptors}, {*threads})
        assert slope <= SLOPE
        assert max(descriptors[-50:]) <= max(descriptors[:50])
        assert max(threads[-50:]) <= max(threads[:50])


def held(process):
    """(bytes that are this process's alone, open descriptors, threads)."""
    return process.memory_full_info().uss, process.num_fds(), process.num_threads()
