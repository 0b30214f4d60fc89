"""Who is silent, slow or dead is named: heartbeats through a real store, and ranks of a real run that are stopped."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from dataclasses import asdict
from datetime import timedelta
from unittest import mock

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_rc.launch import heartbeats, phases
from megatron_rc.launch.ending import tell_start
from megatron_rc.launch.heartbeats import Beat, Heartbeats, tell_other_machines
from tests.support.forked import launch_forked
from tests.support.runs import ONE, SMALL, TWO, finish, read, rows_of, wait_for

HOST = socket.gethostname()
SINCE = r"since \d\d:\d\d:\d\d"
BEAT = 0.02


@pytest.fixture
def make(monkeypatch):
    """Ranks of one store, all in this process and so in one phase; ``ended`` is what they ended the run for."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True)
    monkeypatch.setattr(heartbeats, "BEAT_SECONDS", BEAT)
    for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": server.port, "WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    made, ended = [], []

    def make_rank(rank, limit=60):
        monkeypatch.setenv("RANK", str(rank))
        one = Heartbeats(limit, ended.append)
        one.start()
        made.append(one)
        return one

    make_rank.ended = ended
    yield make_rank
    for one in made:
        one.close()


def test_a_look_at_ranks_that_are_known_is_one_request(make):
    first, *_ = [make(rank) for rank in range(3)]
    wait_for(lambda: len(first.heard) == 3)
    first.close()
    first._store = mock.Mock(wraps=first._store)
    first._look()
    assert [call[0] for call in first._store.method_calls] == ["multi_get"]


@pytest.mark.parametrize(("world", "every"), [(1, 1), (4096, 1), (16384, 4)])
def test_one_store_hears_4096_ranks_a_second_at_most(monkeypatch, world, every):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    assert Heartbeats(60, print).every == every


def broken_receive():
    """The error of a rank that waits for a receive begun before, as Megatron does between pipeline stages."""
    store, groups = dist.HashStore(), {}

    def join(rank):
        groups[rank] = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))

    other = threading.Thread(target=join, args=(1,))
    other.start()
    join(0)
    other.join()
    work = groups[0].recv([torch.zeros(1)], 1, 0)
    del groups[1]
    try:
        work.wait()
    except RuntimeError as error:
        return error


def test_no_beat_follows_a_ranks_last_word(make, monkeypatch):
    rank, begun = make(0), threading.Event()
    tell = rank._store.set

    def tell_slowly(name, beat):
        if not json.loads(beat)["end"]:
            begun.set()
            rank._over.wait()
            time.sleep(2 * BEAT)
        tell(name, beat)

    rank._store = mock.Mock(wraps=rank._store, set=tell_slowly)
    assert begun.wait(60)
    rank.every = 10.0  # it is waited for as long as that takes, which is no time
    monkeypatch.setattr(heartbeats, "time", mock.Mock(wraps=time, sleep=lambda _: None))
    rank.who_is_missed(broken_receive())
    rank._thread.join()
    assert json.loads(rank._store.get("0"))["end"] == "ended"


@pytest.mark.parametrize(("watcher", "silent"), [(0, 2), (1, 0)])
def test_a_silent_rank_is_named_soon_and_ends_the_run_at_the_limit(make, capsys, watcher, silent):
    """Rank 1 watches rank 0; a rank that has ended is not missed."""
    phases.enter("the training of step 3")
    make(watcher, limit=10 * BEAT), make(3 - watcher - silent).close()
    make(silent)._over.set()
    wait_for(lambda: make.ended)
    sentence = rf"rank {silent} on {HOST} has not answered {SINCE}, in the training of step 3 {SINCE}"
    assert re.fullmatch(sentence + "; the run ends if it stays so for 0 s", capsys.readouterr().err.splitlines()[0])
    missed = make.ended[0]
    assert re.fullmatch(sentence + ": its process is dead, stopped or cut off", missed.words)
    assert missed.rank == silent
    assert re.fullmatch(rf"on {HOST}, in the training of step 3 {SINCE}", missed.last_seen)


def last_words(rank, process):
    """(last word of a rank, sentence of the other ranks about it): killed, failed, ended well."""
    ended = rf"rank {rank} on {HOST} is gone, in the rollout of step 3 {SINCE}: its process {process} has ended"
    failed = rf"rank {rank} on {HOST} failed in the rollout of step 3 {SINCE}: see what it said"
    return [("", ended), ("failed", failed), ("ended", None)]


@pytest.mark.parametrize(("last", "sentence"), last_words(1, r"\d+"))
def test_a_process_that_is_gone_ends_the_other_ranks_of_its_machine_at_once(make, monkeypatch, last, sentence):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    rank, process = make(0), subprocess.Popen(["sleep", "600"])

    def tell(end):
        beat = Beat(1, HOST, process.pid, phases.Phase("the rollout of step 3"), end)
        rank._store.set("1", json.dumps(asdict(beat)))

    tell("")
    wait_for(lambda: rank._processes == {1: process.pid})
    assert make.ended == []
    tell(last)
    process.kill()
    process.wait()
    told = rank._count
    wait_for(lambda: make.ended or (sentence is None and rank._count > told + 10))
    assert [missed.rank for missed in make.ended[:1]] == [1] * bool(sentence)
    assert sentence is None or re.fullmatch(sentence, make.ended[0].words)


@pytest.mark.parametrize(("last", "sentence"), last_words(2, 1))
def test_ranks_of_other_machines_end_at_once(make, monkeypatch, tmp_path, last, sentence):
    """Rank 2 is alone on its machine; its launcher knows where the ranks' store is."""
    monkeypatch.setenv("MEGATRON_RC_ENDINGS", str(tmp_path))
    tell_start()
    first, second = make(0), make(1)
    beat = Beat(1, HOST, 1, phases.Phase("the rollout of step 3"), last)
    first._store.set("2", json.dumps(asdict(beat)))
    tell_other_machines(tmp_path, [2])
    told = first._count, second._count
    wait_for(lambda: len(make.ended) > 1 or (first._count > told[0] + 10 and second._count > told[1] + 10))
    assert {missed.rank for missed in make.ended} == ({2} if sentence else set())
    assert all(re.fullmatch(sentence, missed.words) for missed in make.ended)


@pytest.mark.processes
def test_a_rank_that_is_killed_takes_those_with_it_that_wait_for_its_engine(tmp_path, monkeypatch):
    """Rank 1 is killed in its rollout, for which rank 0 waits; torchrun would kill rank 0 after half a minute."""
    words = ["--nproc-per-node=2", *SMALL, *ONE, "--train-iters=3", f"--runs-dir={tmp_path}"]
    monkeypatch.setenv("SLOW_ROLLOUT", "600 1")
    process = launch_forked(tmp_path, words, "tests.support.slow_engine")
    started = tmp_path / "count_up" / "rollout"
    wait_for(started.is_file, process)
    rank_0, rank_1 = (child.pid for child in psutil.Process(process.pid).children())
    begun = time.monotonic()
    os.kill(rank_1, signal.SIGKILL)
    code, _, errors = finish(process)
    assert time.monotonic() - begun < 15, "seen: 2 s"
    assert code == 1
    last = rf"error: rank 1 \(process {rank_1}\) was ended by SIGKILL: .*; it was on {HOST}, in .*"
    assert re.fullmatch(last, errors.splitlines()[-1])
    assert not psutil.pid_exists(rank_0)


def test_a_rank_that_works_for_an_engine_is_named_every_half_minute(make, capsys, monkeypatch):
    rank = make(0)
    rank._over.set()
    rank._thread.join()
    phases.enter("the rollout of step 3", engine="the engine vllm_server at http://a")
    since = phases.current().since
    for second in range(1, 100):
        monkeypatch.setattr(heartbeats, "time", mock.Mock(wraps=time, time=lambda second=second: since + second))
        rank._tell()
        rank._look()
        rank._watch()
    phases.enter("the rollout of step 3", waits=True)
    lines = capsys.readouterr().err.splitlines()
    expected = rf"waiting for rank 0 on {HOST}: the engine vllm_server at http://a is in the rollout of step 3 {SINCE}"
    for line, seconds in zip(lines, (30, 60, 90), strict=True):
        assert re.fullmatch(rf"{expected} \({seconds} s\)", line)


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ("silent", rf"rank 1 on {HOST} has not answered {SINCE}, in scoring {SINCE}: its process is dead, stopped or"),
        ("failed", rf"rank 1 on {HOST} failed in scoring {SINCE}: see what it said"),
        ("elsewhere", rf"rank 1 on {HOST} did not come to where the others wait: it is in scoring {SINCE}"),
        ("waits", None),
        ("both work", None),
    ],
)
def test_a_rank_whose_collective_failed_names_the_one_it_misses(make, monkeypatch, state, sentence):
    phases.enter("scoring", waits=state in ("elsewhere", "waits"))
    rank, other = make(0), make(1)
    if state == "silent":
        other._over.set()
    elif state == "failed":
        other.close(failed=True)
    error = broken_receive()

    def wait_for_a_beat(_):
        if state == "elsewhere":  # the phase of the other rank, in the same process
            phases.enter("scoring")
        told = other._count
        wait_for(lambda: other._count > told or other._over.is_set())

    monkeypatch.setattr(heartbeats, "time", mock.Mock(wraps=time, sleep=wait_for_a_beat))
    missed = rank.who_is_missed(error)
    assert (missed is None) == (sentence is None)
    assert sentence is None or re.match(sentence, missed.words)
    for own in (ZeroDivisionError(), torch.OutOfMemoryError(), NotImplementedError()):
        assert other.who_is_missed(own) is None, "an error of the rank's own"


def test_a_phase_says_that_it_waits_in_a_collective():
    phases.enter("scoring")
    with phases.waiting():
        assert phases.current().waits
    assert not phases.current().waits
    since = phases.current().since
    with pytest.raises(RuntimeError), phases.waiting():
        raise RuntimeError
    assert phases.current() == phases.Phase("scoring", "", True, since), "whoever asks after the error hears of it"


@pytest.mark.processes
def test_a_long_rollout_is_none_too_long_and_a_stopped_rank_is_named(tmp_path, monkeypatch):
    """The limit of collectives is 4 s: the first rollout takes longer, and later rank 1 is stopped."""
    words = ["--nproc-per-node=2", *SMALL, *TWO, "--train-iters=100000", "--lr-decay-iters=100000"]
    monkeypatch.setenv("SLOW_ROLLOUT", "5 0 1")
    process = launch_forked(tmp_path, [*words, f"--runs-dir={tmp_path}"], "tests.support.slow_engine")
    folder = tmp_path / "count_up"
    wait_for(lambda: rows_of(folder) > 1, process)
    assert read(folder)[0]["perf/rollout_seconds"] > 4.5
    rank_0, rank_1 = (child.pid for child in psutil.Process(process.pid).children())
    os.kill(rank_1, signal.SIGSTOP)
    wait_for(lambda: not psutil.pid_exists(rank_0) or psutil.Process(rank_0).status() == "zombie", process)
    # torchrun waits 30 s for what does not end; now it does.
    os.kill(rank_1, signal.SIGCONT)
    code, _, errors = finish(process)
    assert code == 1
    assert "Traceback" not in errors
    _, _, after = errors.partition(" 1/100000 ")
    assert "gloo" not in after
    silence = rf"rank 1 on {HOST} has not answered {SINCE}, in the .* {SINCE}"
    assert re.search(silence + "; the run ends if it stays so for 4 s", after)
    assert re.fullmatch(f"error: {silence}: its process is dead, stopped or cut off", errors.splitlines()[-1])
