"""A disk that fills up while a run saves to it: a small one, mounted for this run alone."""

import os
import shutil
import subprocess
import sys
import time

import pytest

from tests.support.runs import SMALL, TWO, finish, launch, rows_of, start, steps, wait_for

STEPS = 16
WORDS = ["--nproc-per-node=2", *SMALL, *TWO, f"--train-iters={STEPS}", f"--lr-decay-iters={STEPS}", "--save-interval=2"]
# In a namespace of its own, which needs no rights; the process keeps its number.
ON_A_DISK = """
import os, sys
mount = 'mount -t tmpfs -o size=24m tmpfs "$0" && exec "$@"'
os.execvp("unshare", ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, sys.argv[1], *sys.argv[2:]])
"""


@pytest.fixture
def run(tmp_path):
    """Starts the run; the process, and the folder of its disk as this process sees it, which outlives the other."""
    (tmp_path / "disk").mkdir()
    opened = []

    def begin(*more):
        arguments = launch(*WORDS, f"--runs-dir={tmp_path}", f"--save={tmp_path}/disk/save", *more)
        process = start(["-c", ON_A_DISK, tmp_path / "disk", sys.executable, *arguments])
        wait_for(lambda: rows_of(tmp_path / "count_up") >= 5, process, 300)
        opened.append(os.open(f"/proc/{process.pid}/root{tmp_path}/disk", os.O_RDONLY))
        return process, f"/proc/self/fd/{opened[0]}"

    try:
        subprocess.run(["unshare", "--user", "--map-root-user", "--mount", "true"], check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("this machine lets nobody mount a disk in a namespace")
    yield begin
    for descriptor in opened:
        os.close(descriptor)


def fill(disk):
    with pytest.raises(OSError, match="No space left on device"):
        write_without_end(f"{disk}/filler")


def names_the_disk(text):
    """Whether a text has the reason: of one file PyTorch does not say why it cannot be written."""
    return "No space left on device" in text or "a file could not be written, as on a full disk" in text


def write_without_end(path):
    with open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def test_the_run_ends_in_one_sentence_and_goes_on_when_there_is_room(run, tmp_path):
    process, disk = run()
    fill(disk)
    code, _, errors = finish(process, 300)
    assert code == 1
    assert "Traceback" not in errors
    assert names_the_disk(errors.splitlines()[-1]), errors
    shutil.copytree(f"{disk}/save", tmp_path / "save")
    saved = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert saved >= 2
    process = start(launch(*WORDS, f"--runs-dir={tmp_path}", f"--save={tmp_path}/save", f"--load={tmp_path}/save"))
    code, _, errors = finish(process, 300)
    assert code == 0, errors
    whole = launch(*WORDS, f"--runs-dir={tmp_path}/whole", f"--save={tmp_path}/whole/save")
    code, _, errors = finish(start(whole), 300)
    assert code == 0, errors
    assert steps(tmp_path / "count_up") == steps(tmp_path / "whole" / "count_up"), "to the last digit"


def test_the_run_outlasts_the_lack_of_room_by_flag(run, tmp_path):
    process, disk = run("--continue-after-failed-save")
    fill(disk)
    filled = rows_of(tmp_path / "count_up")
    while rows_of(tmp_path / "count_up") < filled + 3:  # a save was due meanwhile
        assert process.poll() is None
        time.sleep(0.02)
    os.unlink(f"{disk}/filler")
    code, _, errors = finish(process, 300)
    assert code == 0, errors
    assert names_the_disk(errors)
    with open(f"{disk}/save/latest_checkpointed_iteration.txt") as file:
        assert int(file.read()) == STEPS == rows_of(tmp_path / "count_up")
