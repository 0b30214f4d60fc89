"""The default run for 1,000 steps on 4 ranks: what the ranks hold does not grow."""

import logging
import statistics
import time

import psutil

from tests.support.paths import ROOT
from tests.support.runs import children, launch, rows_of, start, wait_for

STEPS = 1000
WARM = 200  # steps after which caches, and what is loaded at first use, are there
WINDOW = 50  # steps, of which the least memory counts: what a step needs for itself is not held
SLOPE = 512  # bytes a step and rank
SECONDS = 3500
# Every Python that starts imports it: a rank tells how many bytes are in use. Its pages are no measure: they come and
# go by megabytes, as the heap is trimmed.
IN_EVERY_RANK = """
import ctypes, os, threading, time

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c mapped d e used free f".split()]

def tell(path):
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Info
    with open(path, "w", buffering=1) as file:
        while True:
            info = mallinfo2()
            file.write(f"{time.time()} {info.used + info.mapped}\\n")
            time.sleep(0.03)

if "RANK" in os.environ:
    own = os.path.join(os.path.dirname(__file__), os.environ["RANK"])
    threading.Thread(target=tell, args=[own], daemon=True).start()
"""


def test_memory_descriptors_and_threads_stay_flat(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(IN_EVERY_RANK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    arguments = ["--nproc-per-node=4", "--config=count_up", f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}"]
    with (tmp_path / "log").open("w") as log:
        process = start(launch(*arguments, f"--runs-dir={tmp_path}"), stdout=log, stderr=log)
    folder = tmp_path / "count_up"
    wait_for(lambda: rows_of(folder), process, 300)
    ranks = [psutil.Process(pid) for pid in children(process.pid)]
    assert len(ranks) == 4
    times = {}
    seen = []
    begun = time.monotonic()
    while process.poll() is None:
        assert time.monotonic() - begun < SECONDS
        step = rows_of(folder)
        times.setdefault(step, time.time())
        if WARM <= step < STEPS - 10:  # not what the end of a run does
            seen.append([(rank.num_fds(), rank.num_threads()) for rank in ranks])
        time.sleep(0.2)
    assert process.returncode == 0, (tmp_path / "log").read_text()
    assert rows_of(folder) == STEPS
    slopes = [slope_of(tmp_path / str(rank), times) for rank in range(4)]
    logging.info("bytes a step: %s, after %.0f s", [round(slope) for slope in slopes], time.monotonic() - begun)
    assert max(slopes) <= SLOPE
    for rank in range(4):
        for counts in zip(*(counts_of_ranks[rank] for counts_of_ranks in seen), strict=True):
            logging.info("rank %d: descriptors, then threads: %s", rank, {*counts})
            # Of rank 0 the least: it has the file of metrics open for a moment in each step.
            usual = max if rank else min
            assert usual(counts[-50:]) <= usual(counts[:50])


def slope_of(file, times):
    """Of the least memory in every window of steps, in bytes a step.

    Args:
        file: (time, bytes in use), a line each.
        times: when each step was seen to be done.
    """
    steps = sorted(times)
    least = {}
    for line in file.read_text().splitlines()[:-1]:
        clock, used = line.split()
        while len(steps) > 1 and times[steps[1]] <= float(clock):
            steps.pop(0)
        if WARM <= steps[0] < STEPS - 10:
            window = steps[0] // WINDOW
            least[window] = min(int(used), least.get(window, int(used)))
    return statistics.linear_regression([WINDOW * window for window in least], list(least.values())).slope
