"""Signals to a rank: heard at once, whatever its main thread does; under plain torchrun the rank leaves in time."""

import os
import signal
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_rc.launch import phases
from megatron_rc.launch.ending import messages, tell
from megatron_rc.launch.stopping import SAVE_AND_END, STOPPING, StopRequest
from tests.support.forked import ForkedCall
from tests.support.runs import finish, wait_for


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


def wait_in_a_collective(is_saved, begun):
    """A rank that waits in compiled code for what never comes."""
    phases.enter("the training of step 3")
    request = StopRequest()
    request.is_saved = is_saved
    with request.installed():
        begun.touch()
        dist.HashStore().wait(["what never comes"], timedelta(seconds=60))


@pytest.mark.processes
@pytest.mark.parametrize(("is_saved", "code"), [(False, 1), (True, 0)])
def test_under_torchrun_a_rank_that_cannot_save_leaves_before_it_is_killed(tmp_path, monkeypatch, is_saved, code):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "6")
    begun = tmp_path / "begun"
    process = ForkedCall(tmp_path, wait_in_a_collective, is_saved, begun)
    wait_for(begun.exists)
    process.send_signal(signal.SIGTERM)
    returned, _, errors = finish(process, timeout=20)
    assert returned == code
    assert "SIGTERM: the run stops after the training of step 3, if that ends within 1 s\n" in errors
    assert ("export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=" in errors) != is_saved
