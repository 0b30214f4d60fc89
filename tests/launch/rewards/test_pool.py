"""Workers that score: what they give, what they survive, and that nothing outlives them."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError
from contextlib import suppress

import psutil
import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.rewards.pool import RewardPool, check_loads
from megatron_rc.launch.rewards.rules import Source
from tests.support.paths import ROOT
from tests.support.runs import wait_for

# Each test starts workers of its own.
pytestmark = pytest.mark.processes

USER = "python:tests.support.user_rewards"
SECONDS = 120  # nothing here takes as long unless it is broken


def request(response, **changed):
    return {"prompt": "2 + 2 = ?", "response": response, "label": "4", "record": {}, **changed}


def source(name):
    return Source("count_up", 1, f"{USER}:{name}")


@pytest.fixture(scope="module")
def pool():
    pool = RewardPool(source("misbehave"), 2, SECONDS)
    yield pool
    pool.close()


def test_outcomes_come_in_the_order_of_the_requests(pool):
    slow_first = ["sleep 0.3", "give numpy", "give true", "give fraction", "else"]
    assert [one.reward for one in pool.score([request(text) for text in slow_first])] == [1.0, 0.5, 1.0, 0.5, 1.0]
    assert pool.score([request("heavy")])[0].reward == 0.0, "a worker knows neither torch nor Megatron"


def test_what_a_rule_forks_scores_nothing(pool):
    assert [one.reward for one in pool.score([request("fork")] * 4)] == [1.0] * 4
    forked = [one for worker in pool._workers for one in psutil.Process(worker._process.pid).children()]
    wait_for(lambda: forked and not any(map(runs, forked)))


@pytest.mark.parametrize(
    ("response", "failure", "place"),
    [
        ("exit 0", "ended its process with exit code 0", ""),
        ("segfault", "ended its process with signal SIGSEGV", "in misbehave"),
        ("raise " + "x" * 10_000, "raised ValueError: xxx", "raise ValueError(rest)"),
        ("quit", "raised SystemExit: 4", "sys.exit(4)"),
        ("read", "raised EOFError", "input()"),
        ("give none", "gave None, which is no number", ""),
        ("give lambda", "gave <function", ""),
        ("give awkward", "raised RuntimeError: not today", "not today"),
        ("give nan", "gave nan, which cannot be trained on", ""),
        ("give beyond", "gave 1e+39, which cannot be trained on", ""),
        ("give without", "gave a dict without the entry 'reward': {'fluency': 1}", ""),
        ("give nested", "gave 'reward': {'reward': 1}, which is no number", ""),
        ("give taken", "gave a component named 'mean'", ""),
        ("give many", "gave a dict of 41 entries, 32 can be logged", ""),
        ("give huge", "gave a component named 'xxx", ""),
    ],
)
def test_what_goes_wrong_costs_its_sample_alone(pool, response, failure, place):
    good, bad, also = pool.score([request("fine"), request(response), request("fine")])
    assert (good.reward, also.reward) == (1.0, 1.0)
    assert bad.failure.startswith(failure), bad
    assert len(bad.failure) < 500
    assert bad.reward != bad.reward, "NaN"
    assert place in bad.traceback
    assert "multiprocessing" not in bad.traceback
    if place and bad.failure.startswith("raised"):
        assert "launch/rewards" not in bad.traceback, "the traceback begins with the user's own function"


def test_what_takes_too_long_costs_its_sample_alone():
    """Also a function that lets no other thread run; what a function has started ends with it."""
    pool = RewardPool(source("misbehave"), 2, 0.6)
    seconds = "1234.5"
    long = ["sleep 100", "regex", f"start {seconds}"]
    results = pool.score([request(text) for text in ("fine", *long, "fine")])
    pool.close()
    assert (results[0].reward, results[-1].reward) == (1.0, 1.0)
    for outcome in results[1:-1]:
        assert outcome.failure == "took longer than --reward-timeout 0.6 s"
        assert outcome.reward != outcome.reward, "NaN"
        assert "in misbehave" in outcome.traceback
        assert "multiprocessing" not in outcome.traceback
    wait_for(lambda: not processes_of(["sleep", seconds]))


def processes_of(words):
    return [one for one in psutil.process_iter(["cmdline", "status"]) if one.info["cmdline"] == words]


def test_what_a_function_prints_is_printed(capfd):
    pool = RewardPool(source("misbehave"), 1, SECONDS)
    assert [one.reward for one in pool.score([request("print ab"), request("print cd")])] == [1.0, 1.0]
    pool.close()
    out, err = capfd.readouterr()
    assert (out.count("ab"), out.count("cd"), err.count("ab"), err.count("cd")) == (100_000,) * 4


def test_all_that_is_known_of_a_sample_arrives_unchanged():
    pool = RewardPool(source("everything"), 1, SECONDS)
    label = {"is": (4,)}
    record = {"level": 1, "é": None}
    whole = request("5", label=label, record=record)
    cut = request("5" * 3_000_000, label=label, record=record)
    assert [one.reward for one in pool.score([whole, cut])] == [1.0, 0.0]
    (unsent,) = pool.score([request("5", label=lambda: 1)])
    assert unsent.failure.startswith("gets a label or record that no process can be sent: ")
    pool.close()


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("import time\ntime.sleep(100)\n", r"broken\.py\", line 2 in <module>.*\n--reward \S+ .* after 0\.4 s$"),
        ("import os\nos._exit(5)\n", r"ended its process with exit code 5 while it was loaded$"),
        ("1 / 0\n", r"^Traceback.*line 1.*\n--reward \S+: broken cannot be imported, it raises ZeroDivisionError: .*$"),
        ("class score: pass\n", r"is a class: name a function$"),
    ],
)
def test_a_rule_that_cannot_be_loaded_is_one_sentence(tmp_path, monkeypatch, module, message):
    (tmp_path / "broken.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    # A worker that hangs says where, if its Python has started by then.
    monkeypatch.setattr("megatron_rc.launch.rewards.pool._GRACE_SECONDS", 2.0)
    with pytest.raises(ConfigurationError) as caught:
        check_loads(Source("count_up", 1, "python:broken:score"), 0.4 if "sleep" in module else SECONDS)
    assert re.search(message, str(caught.value), re.DOTALL), str(caught.value)
    assert str(caught.value).splitlines()[-1].startswith("--reward python:broken:score")


def test_a_rule_that_loads_no_more_costs_samples_and_not_the_run(tmp_path, monkeypatch):
    """Its process dies, and when the next one is started the module is another."""
    monkeypatch.syspath_prepend(tmp_path)
    rule = "import os\ndef score(response, **_):\n    return os._exit(1) if response == 'die' else 1.0\n"
    (tmp_path / "changed.py").write_text(rule)
    pool = RewardPool(Source("count_up", 1, "python:changed:score"), 1, SECONDS)
    assert pool.score([request("fine")])[0].reward == 1.0
    (tmp_path / "changed.py").write_text("1 / 0\n")
    died, lost = pool.score([request("die"), request("fine")])
    assert died.failure == "ended its process with exit code 1"
    assert lost.failure.startswith("was not scored: --reward python:changed:score: ")
    assert "line 1, in <module>" in lost.traceback
    (tmp_path / "changed.py").write_text(rule + "# mended\n")
    assert pool.score([request("fine")])[0].reward == 1.0
    pool.close()


def test_a_process_that_cannot_be_started_is_one_sentence(monkeypatch):
    def refuse(*words, **how):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    pool = RewardPool(source("misbehave"), 1, SECONDS)
    with pytest.raises(ConfigurationError, match=r"^--reward \S+ has no process to run in: .*temporarily unavailable$"):
        pool.score([request("fine")])
    monkeypatch.undo()
    assert pool.score([request("fine")])[0].reward == 1.0
    pool.close()


def test_closing_ends_workers_in_the_middle_of_a_function():
    before = set(psutil.Process().children())
    pool = RewardPool(source("misbehave"), 2, 100.0)
    pool.score([request("fine")] * 4)
    workers = set(psutil.Process().children()) - before
    assert len(workers) == 2
    thread = threading.Thread(target=lambda: suppressed(pool, ["sleep 100"] * 5))
    thread.start()
    time.sleep(0.2)
    pool.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not [worker for worker in workers if worker.is_running()]


def suppressed(pool, responses):
    with suppress(CancelledError):
        pool.score([request(text) for text in responses])


PARENT = f"""
from megatron_rc.launch.rewards.pool import RewardPool
from megatron_rc.launch.rewards.rules import Source
pool = RewardPool(Source("count_up", 1, "{USER}:misbehave"), 2, 100.0)
request = dict(prompt="", label="", record={{}})
pool.score([dict(request, response="fine")] * 50)
print("loaded", flush=True)
pool.score([dict(request, response=text) for text in ("sleep 100", "regex")])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends a child with its parent on Linux")
def test_no_worker_outlives_a_trainer_that_is_killed():
    """In the middle of a function, even of one that lets no other thread run: one worker each."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout.readline() == "loaded\n"
    workers = psutil.Process(parent.pid).children()
    assert len(workers) == 2
    time.sleep(0.3)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(map(runs, workers)))


def runs(process):
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


ENTRY = {"question": "2 + 2 = ?", "answer": "4", "metadata": {}}
# A rule, the responses, and their rewards with the other entries of its dict. Tokens and lengths of Bare come by flags.
RULES = [
    (source("parts"), ["4", "4, please"], [(1.0, {"length": 1.0}), (0.0, {"length": 9.0, "polite": 1.0})]),
    (Source(f"{USER}:Bare", 1), ["4", "44"], [(1.0, {}), (0.0, {})]),
    (Source(f"{USER}:Doubles", 1), ["4", "44"], [(1.0, {"ended": 1.0}), (0.0, {"ended": 0.0})]),
    pytest.param(Source("reasoning_gym:chain_sum", 1), ["4"], [(1.0, {})], marks=pytest.mark.reasoning_gym),
]


@pytest.mark.parametrize(("rule", "responses", "outcomes"), RULES, ids=["parts", "bare", "task", "library"])
def test_rules_of_every_kind_score_in_a_worker(rule, responses, outcomes):
    pool = RewardPool(rule, 1, SECONDS)
    results = pool.score([request(text, record=ENTRY) for text in responses])
    pool.close()
    assert [(one.reward, one.components) for one in results] == outcomes
