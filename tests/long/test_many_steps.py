"""The default run for 1,000 steps on 4 ranks: what the ranks hold does not grow."""

import logging
import statistics
import time

import psutil

from tests.support.runs import children, launch, rows_of, start, wait_for

STEPS = 1000
WARM = 200  # steps after which caches, and what is loaded at first use, are there
WINDOW = 50  # steps, of which the least memory counts: what a step needs for itself is not held
SLOPE = 512  # bytes a step and rank
SECONDS = 3600


def test_memory_descriptors_and_threads_stay_flat(tmp_path):
    words = ["--nproc-per-node=4", "--config=count_up", f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}"]
    with (tmp_path / "log").open("w") as log:
        process = start(launch(*words, f"--runs-dir={tmp_path}"), stdout=log, stderr=log)
    folder = tmp_path / "count_up"
    wait_for(lambda: rows_of(folder), process, 300)
    ranks = [psutil.Process(pid) for pid in children(process.pid)]
    assert len(ranks) == 4
    seen, begun = [], time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - begun < SECONDS
        step = rows_of(folder)
        if step < STEPS - 10:  # not what the end of a run does
            seen.append((step, [held(rank) for rank in ranks]))
        time.sleep(0.2)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert rows_of(folder) == STEPS
    slopes = [slope_of([(step, values[rank][0]) for step, values in seen]) for rank in range(4)]
    logging.info("bytes a step: %s, after %.0f s", [round(slope) for slope in slopes], time.monotonic() - begun)
    assert max(slopes) <= SLOPE
    for rank in range(4):
        for held_of in (1, 2):
            counts = [values[rank][held_of] for step, values in seen if step >= WARM]
            logging.info("rank %d: %s %s", rank, ("descriptors", "threads")[held_of - 1], {*counts})
            assert max(counts[-50:]) <= max(counts[:50])


def slope_of(curve):
    """Of the least memory in every window of steps."""
    least = {}
    for step, memory in curve:
        if step >= WARM:
            least[step // WINDOW] = min(memory, least.get(step // WINDOW, memory))
    return statistics.linear_regression([WINDOW * window for window in least], list(least.values())).slope


def held(process):
    """(bytes that are this process's alone, open descriptors, threads)."""
    return process.memory_full_info().uss, process.num_fds(), process.num_threads()
