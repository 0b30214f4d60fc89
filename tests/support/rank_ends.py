"""A rank that ends in the way that its argument names; torchrun starts it instead of the trainer."""

import os
import signal
import sys
import time
from pathlib import Path

from megatron_rc.launch.ending import FOLDER, tell_ending, tell_start

rank = int(os.environ["RANK"])
how, *where = sys.argv[1:]
restart = os.environ["TORCHELASTIC_RESTART_COUNT"]
mine = not where or rank == int(where[0])


def stop(*_: object) -> None:
    if how == "saves-late":
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.5)
    tell_ending(kept=how.startswith("saves"))
    sys.exit(0)


def fail_as_a_victim(*_: object) -> None:
    tell_ending(error="connection closed by peer", code=1)
    sys.exit(1)


def meet() -> None:
    """Wait until the other rank has started too."""
    folder = Path(os.environ[FOLDER])
    (folder / f"here-{restart}-{rank}").touch()
    while len(list(folder.glob(f"here-{restart}-*"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.01)


if how in ("saves", "saves-late", "stops"):
    signal.signal(signal.SIGINT, stop)
if how == "interrupts":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
if how == "restarts-stopped":
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
if not mine:
    signal.signal(signal.SIGTERM, fail_as_a_victim)
tell_start()
if how == "agrees":  # before the other rank ends, which would end this one
    sys.stderr.write("what a rank says is above the last line\n")
meet()
if how in ("saves", "saves-late", "stops", "interrupts") and rank == 0:
    os.kill(os.getppid(), signal.SIGINT)
elif how == "vanishes":
    os._exit(0)
elif how == "agrees":
    tell_ending(error="the rollout of step 3 failed: no answer in 60 s", code=1)
    sys.exit(1)
elif how == "restarts-guard":
    tell_ending(error="stopped by --stop-if 'lr > 0'", code=3)
    sys.exit(0)
elif how == "restarts-stopped" and restart == "1":
    if rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)
elif how == "told" or restart == "1":
    tell_ending(kept=restart == "1")
    sys.exit(0)
elif how.startswith("restarts"):
    tell_ending(error="of an older start", code=1)
    sys.exit(1)
elif mine and how == "usage":
    tell_ending(error="--lr 0 must be positive", code=2)
    sys.exit(2)
elif mine and how == "leaves":
    sys.exit(7)
elif mine and how in ("killed", "aborts"):
    os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGABRT)
time.sleep(60)
