"""A rank that ends in the way that its argument names; torchrun starts it instead of the trainer."""

import os
import signal
import sys
import time
from pathlib import Path

from megatron_rc.launch.ending import FOLDER, signal_of_launcher, tell, tell_ending, tell_start
from megatron_rc.launch.stopping import SAVE_AND_END

rank = int(os.environ["RANK"])
how, *where = sys.argv[1:]
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
is_named_rank = not where or rank == int(where[0])


def stop(*_: object) -> None:
    if how == "saves-late":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(1.5)
    tell_ending(kept=how.startswith("saves"))
    sys.exit(0)


def meet() -> None:
    """Wait until the other rank has started too."""
    folder = Path(os.environ[FOLDER])
    (folder / f"here-{restart}-{rank}").touch()
    while len(list(folder.glob(f"here-{restart}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


def fail_as_a_victim() -> None:
    """Tell what a rank tells whose connection breaks because the other one is gone."""
    time.sleep(0.3)
    tell(error="connection closed by peer", code=1)
    sys.exit(1)


def fail(message: str, code: int) -> None:
    tell(error=message, code=code)
    sys.exit(code)


if signal_of_launcher() is not None:
    sys.exit(0)
if how in ("saves", "saves-late", "stops"):
    signal.signal(SAVE_AND_END, stop)
tell_start()
meet()
if how in ("saves", "saves-late", "stops", "interrupts"):
    if rank == 0:
        os.kill(os.getppid(), signal.SIGINT)
elif how == "vanishes":
    os._exit(0)
elif how == "agrees":
    sys.stderr.write("what a rank says is above the last line\n")
    fail("the rollout of step 3 failed: no answer in 60 s", 1)
elif how == "restarts-guard":
    if rank == 0:
        tell(error="stopped by --stop-if 'lr > 0'", code=3)
    tell_ending(kept=True)
    sys.exit(0)
elif how == "restarts-stopped" and restart == "1":
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
elif how == "told" or restart == "1":
    tell_ending(kept=restart == "1")
    sys.exit(0)
elif how.startswith("restarts"):
    fail("of an older start", 1)
elif how == "afterwards":
    tell_ending(kept=True)
    time.sleep(0.5)
    if rank == 1:
        fail("the last evaluation failed", 1)
elif is_named_rank and how == "usage":
    fail("--lr 0 must be positive", 2)
elif is_named_rank and how == "leaves":
    os._exit(7)
elif is_named_rank and how == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
elif how in ("leaves", "killed"):
    fail_as_a_victim()
time.sleep(60)
