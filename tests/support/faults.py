"""The trainer with a signal in the middle of a phase; torchrun starts it.

``MEGATRON_RC_FAULTS`` holds a JSON list of :class:`Fault`, one for each start of the ranks.
"""

import json
import os
import threading
import time
from dataclasses import asdict, dataclass

from megatron_rc.launch import phases, train_ppo
from megatron_rc.launch.ending import ATTEMPT
from megatron_rc.launch.rollouts.sampler import RolloutSampler

VARIABLE = "MEGATRON_RC_FAULTS"


@dataclass(frozen=True)
class Fault:
    """A signal.

    Attributes:
        phase: name of the phase; the first one after a phase ``after``.
        rank: rank that sends the signal.
        number: number of the signal.
        log: file that gets the name of the phase.
        to: "rank", the rank itself, or "parent", the process that started it.
        delay: seconds after the beginning of the phase; 0: at its beginning.
        longer: seconds that an engine's answers then take.
    """

    phase: str
    rank: int
    number: int
    log: str
    to: str = "rank"
    delay: float = 0.0
    after: str = ""
    longer: float = 0.0


# Starts of this module: words before torchrun's flags, and words between them and the run's.
STARTS = {
    "torchrun": (["-m", "torch.distributed.run", "--standalone"], ["--module", __name__]),
    "launcher": (["-c", f"from megatron_rc.launch.__main__ import main; main(module='{__name__}')"], []),
}


def environment(faults):
    return os.environ | {"OMP_NUM_THREADS": "1", VARIABLE: json.dumps([asdict(fault) for fault in faults])}


def strike(fault):
    with open(fault.log, "a") as file:
        file.write(f"{phases.current()}\n")
    os.kill(os.getppid() if fault.to == "parent" else os.getpid(), fault.number)


def arm(fault):
    enter = phases.enter
    is_due = threading.Event()
    struck = threading.Event()

    def enter_and_strike(name):
        enter(name)
        if name == fault.phase and is_due.is_set() and not struck.is_set():
            struck.set()
            if fault.delay:
                threading.Timer(fault.delay, strike, [fault]).start()
            else:
                strike(fault)
        if fault.after in ("", name):
            is_due.set()

    def slow(work):
        def slower(*args):
            time.sleep(fault.longer * struck.is_set())
            return work(*args)

        return slower

    phases.enter = enter_and_strike
    RolloutSampler.sample, RolloutSampler.evaluate = slow(RolloutSampler.sample), slow(RolloutSampler.evaluate)


if __name__ == "__main__":
    faults = [Fault(**fault) for fault in json.loads(os.environ[VARIABLE])]
    attempt = int(os.environ[ATTEMPT])
    if attempt < len(faults) and faults[attempt].rank == int(os.environ["RANK"]):
        arm(faults[attempt])
    train_ppo.main()
