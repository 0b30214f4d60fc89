"""A rollout server that is killed and started again under a run: the run takes the same steps."""

import logging
import random
import socket
import subprocess
import sys
import threading
import time

from tests.support.paths import ROOT
from tests.support.runs import SMALL, TWO, finish, launch, rows_of, start, steps

STEPS = 40
KILLS = 5


class Supervised:
    """The server, started when its directory is there, and again whenever it is gone, after a pause."""

    def __init__(self, directory, pause):
        self.directory = directory
        self.pause = pause
        self.starts = 0
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.process = None
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._keep_alive)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.ended.set()
        self.thread.join()
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def _keep_alive(self):
        while not self.ended.wait(0.1):
            if (self.process is None or self.process.poll() is not None) and self.directory.is_dir():
                self.ended.wait(self.pause * (self.process is not None))
                arguments = ["-m", "tests.support.served_engine", str(self.port), str(self.directory)]
                self.process = subprocess.Popen([sys.executable, *arguments], cwd=ROOT)
                self.starts += 1


def run(folder, kills):
    """The rows of a run whose server is killed so often, at any moment, and the seconds it took."""
    rng = random.Random(0)
    begun = time.monotonic()
    (folder / "weights").mkdir(parents=True)
    with Supervised(folder / "weights" / "replica-0", pause=1) as server, (folder / "log").open("w") as log:
        arguments = ["--nproc-per-node=2", *SMALL, *TWO, f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}"]
        arguments += ["--rollout-engine=vllm-server", f"--rollout-url=http://127.0.0.1:{server.port}"]
        arguments += [f"--rollout-weights-dir={folder}/weights", "--rollout-timeout=120", "--rollout-dtype=fp32"]
        process = start(launch(*arguments, f"--runs-dir={folder}"), stdout=log, stderr=log)
        killed = 0
        while process.poll() is None:
            time.sleep(0.02)
            if (
                killed < kills
                and rows_of(folder / "count_up") >= (killed + 1) * STEPS // (kills + 1)
                and server.starts > killed
            ):
                time.sleep(rng.random())
                server.process.kill()
                killed += 1
        code, _, _ = finish(process)
        assert code == 0, (folder / "log").read_text()
        assert (killed, server.starts) == (kills, kills + 1)
    return steps(folder / "count_up"), time.monotonic() - begun


def test_a_server_that_is_killed_under_way_costs_nothing_but_time(tmp_path):
    whole, seconds = run(tmp_path / "whole", 0)
    broken, longer = run(tmp_path / "broken", KILLS)
    logging.info("%d steps took %.0f s, with %d kills of the server %.0f s", STEPS, seconds, KILLS, longer)
    assert len(whole) == STEPS
    assert whole == broken, "to the last digit"
    log = (tmp_path / "broken" / "log").read_text()
    assert log.count("probably in a restart: it gets them again") >= 1
