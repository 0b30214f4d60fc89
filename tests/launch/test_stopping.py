"""Work that a signal or its limit ends, whatever libraries stand between."""

import asyncio
import os
import signal
import time

import anyio
import pytest

from megatron_rc.launch import stopping
from megatron_rc.launch.stopping import Interrupted, StopRequest


async def in_a_task(send):
    """As an HTTP client reads an answer: among others, and with a limit of its own."""

    async def read():
        try:
            with anyio.fail_after(30):
                send()
                await anyio.sleep(30)
        except TimeoutError as error:
            raise ValueError("no whole answer") from error

    async with anyio.create_task_group() as group:
        group.start_soon(read)


async def in_a_callback(send):
    """Where an event loop only logs what is raised."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    asyncio.get_running_loop().call_soon(send)
    await anyio.sleep(30)


@pytest.mark.parametrize("work", [in_a_task, in_a_callback])
@pytest.mark.parametrize(
    ("limit", "send", "ends"),
    [
        (60, lambda: os.kill(os.getpid(), signal.SIGTERM), pytest.raises(Interrupted)),
        (0.1, lambda: time.sleep(5), pytest.raises(TimeoutError, match=r"^late$")),
    ],
    ids=["signal", "limit"],
)
def test_work_ends_wherever_it_is_interrupted(monkeypatch, work, limit, send, ends):
    monkeypatch.setattr(stopping, "_AGAIN_SECONDS", 0.05)
    request, before = StopRequest(), signal.getsignal(signal.SIGALRM)
    with request.installed(), ends, request.interrupts(limit, "late"):
        anyio.run(work, send)
    assert signal.getsignal(signal.SIGALRM) == before
    assert (request.signal == "SIGTERM") == (limit == 60)


def test_a_closed_terminal_is_a_signal_to_stop():
    before, request = signal.getsignal(signal.SIGHUP), StopRequest()
    with request.installed():
        os.kill(os.getpid(), signal.SIGHUP)
    assert request.signal == "SIGHUP"
    assert signal.getsignal(signal.SIGHUP) == before


def test_work_fails_by_an_error_of_its_own():
    with pytest.raises(TimeoutError, match=r"^of its own$"), StopRequest().interrupts(60, "late"):
        raise TimeoutError("of its own")
