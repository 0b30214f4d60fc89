"""Signals to a rank: heard at once, whatever its main thread does; under plain torchrun the rank leaves in time."""

import os
import signal
import subprocess
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_rc.launch.ending import messages, tell
from megatron_rc.launch.stopping import SAVE_AND_END, STOPPING, StopRequest
from tests.support.paths import ROOT
from tests.support.runs import wait_for


@pytest.mark.parametrize("number", STOPPING)
def test_under_torchrun_each_of_three_signals_asks_to_stop(number):
    before = signal.getsignal(number)
    request = StopRequest()
    with request.installed():
        os.kill(os.getpid(), number)
        wait_for(lambda: request.signal)
        os.kill(os.getpid(), signal.SIGHUP)  # a later signal changes nothing
    assert request.signal == number.name
    assert signal.getsignal(number) == before


def test_under_the_launcher_its_signal_has_the_name_of_the_users_and_sigterm_stays_the_systems():
    request = StopRequest()
    with messages(), request.installed():
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "another rank is gone: this one ends at once"
        tell(stop="SIGINT")
        os.kill(os.getpid(), SAVE_AND_END)
        wait_for(lambda: request.signal)
    assert request.signal == "SIGINT"


def test_a_signal_is_heard_while_the_main_thread_is_in_compiled_code():
    request = StopRequest()
    heard_in_time = threading.Event()

    def send():
        os.kill(os.getpid(), signal.SIGTERM)
        wait_for(lambda: request.signal)
        heard_in_time.set()
        store.set("end of the wait", "")

    store = dist.HashStore()
    thread = threading.Thread(target=send)
    with request.installed():
        thread.start()
        store.wait(["end of the wait"], timedelta(seconds=60))
        thread.join()
    assert heard_in_time.is_set()


WAITING = """
import datetime, sys
import torch.distributed as dist
from megatron_rc.launch import phases
from megatron_rc.launch.stopping import StopRequest

phases.enter("the training of step 3")
request = StopRequest()
request.is_saved = sys.argv[1] == "saved"
with request.installed():
    print("begun", flush=True)
    dist.HashStore().wait(["what never comes"], datetime.timedelta(seconds=60))
"""


@pytest.mark.parametrize(("state", "code"), [("unsaved", 1), ("saved", 0)])
def test_under_torchrun_a_rank_that_cannot_save_leaves_before_it_is_killed(state, code):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "RANK": "0", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "6"}
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, state],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == code
    assert "SIGTERM: the run stops after the training of step 3, if that ends within 1 s\n" in errors
    assert ("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in errors) == (state == "unsaved")
