"""The commands a user types, on real processes: a run, its files, its resumption, its end, its errors."""

import os
import re
import shutil
import signal
import time
from importlib.metadata import version
from pathlib import Path

import psutil
import pytest
from torch.distributed.run import main as torchrun_main

from megatron_rc.launch import train_ppo
from megatron_rc.launch.flags.configure import configure
from tests.support.commands import code_of
from tests.support.forked import ForkedCall, launch_forked
from tests.support.paths import ROOT
from tests.support.runs import (
    LOOPBACK,
    ONE,
    SMALL,
    TWO,
    children,
    finish,
    listening,
    read,
    rows_of,
    start,
    torchrun,
    wait_for,
)


@pytest.mark.processes
def test_a_run_from_flags_to_picture(tmp_path):
    """As a file under torchrun, with every process started anew: one rank, because a start takes seconds.

    The processes tell their imports: no rank on the CPU loads a compiler, Weights & Biases, or what needs a GPU.
    """
    arguments = [*SMALL, *ONE, "--train-iters=2", f"--runs-dir={tmp_path}"]
    for name in ("transformer_engine", "apex"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('a rank on the CPU imports this')")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{tmp_path}"}
    environment["PYTHONPROFILEIMPORTTIME"] = "1"
    code, output, errors = finish(start(torchrun(1, "launch/train_ppo.py", *arguments), env=environment))
    assert code == 0, errors
    imported = set(re.findall(r"(?m)^import time: .*\| *(\S+)$", errors))
    assert "megatron.core.fusions.fused_bias_swiglu" in imported
    assert "torch._inductor.compile_fx" not in imported
    # A package that is looked for and hidden has its own name here, and none of its modules.
    unwanted = ["wandb."]
    # Later ones cannot be imported without it.
    if version("megatron-core") < "0.17":
        unwanted.append("triton.")
    assert not [name for name in imported if name.startswith(tuple(unwanted))]
    assert output == ""
    assert "Traceback" not in errors
    assert "finished at step 2" in errors
    assert "--grpo-iterations 1 makes 1 optimizer steps of each rollout batch; --train-iters 2: 2 rollout b" in errors
    rows = read(tmp_path / "count_up")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert all(isinstance(value, (int, float)) for value in row.values())
        assert 0 <= row["reward/mean"] <= 1
        assert row["rollout_corr/k3_kl"] > 0, "the engine's weights are rounded, so the policies differ"
        assert 0 < row["rollout_corr/rollout_is_eff_sample_size"] <= 1
        assert row["policy/approx_kl"] == 0, "the first update scores with the weights that made log π_old"
    assert (tmp_path / "count_up" / "summary.png").read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "count_up" / "tensorboard").rglob("events.*"))
    again, _ = configure([f"--config={tmp_path}/count_up/config.yaml"], 1)
    assert again == configure(arguments, 1)[0]


@pytest.mark.processes
def test_ranks_that_are_started_again_go_on_and_a_signal_saves_and_ends_them(tmp_path):
    """One is killed; torchrun keeps its store, in which the dead one's address still stands. Later comes Ctrl-C."""
    arguments = [
        "--nproc-per-node=2",
        "--max-restarts=1",
        *SMALL,
        *TWO,
        "--train-iters=100000",
        "--lr-decay-iters=100000",
    ]
    files = [f"--save={tmp_path}/save", f"--load={tmp_path}/save", "--save-interval=2"]
    process = launch_forked(tmp_path, [*arguments, *files, f"--runs-dir={tmp_path}"])
    folder = tmp_path / "count_up"
    wait_for(lambda: rows_of(folder) >= 3, process)
    assert listening(process.pid) == {LOOPBACK}, "no other machine can connect"
    os.kill(children(process.pid)[1], signal.SIGKILL)
    before = read(folder)
    # A row that is overwritten may be seen half-written.
    wait_for(lambda: rows_of(folder) > len(before) + 1, process)
    ranks = children(process.pid)
    assert listening(process.pid) == {LOOPBACK}
    process.send_signal(signal.SIGINT)
    code, _, errors = finish(process)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "restart 1 of 1" in errors
    assert errors.count("Megatron-Core runs on the CPU") == 2, "of the two ranks one says it, at each start"
    assert errors.splitlines()[-1] == f"picture {tmp_path}/count_up/summary.png"
    saved = int((tmp_path / "save" / "latest_checkpointed_iteration.txt").read_text())
    assert f"at step {saved}, saved to" in errors
    assert f"report {folder}/report.html\n" in errors
    page = (folder / "report.html").read_text()
    assert f"After step {saved}: stopped by SIGINT at step {saved}, saved to {tmp_path}/save, after " in page
    assert not [pid for pid in ranks if Path(f"/proc/{pid}").exists()]
    rows = read(folder)
    assert [row["step"] for row in rows] == list(range(1, saved + 1))
    for row, again in zip(before, rows, strict=False):
        for name in ("reward/mean", "loss/total", "grad_norm", "rollout_corr/kl"):
            assert row[name] == again[name], "the same steps, to the last digit"


@pytest.mark.processes
def test_a_rank_that_is_killed_takes_those_with_it_that_wait_for_its_engine(tmp_path, monkeypatch):
    """Rank 1 is killed in its rollout, for which rank 0 waits; torchrun would kill rank 0 after half a minute."""
    arguments = ["--nproc-per-node=2", *SMALL, *ONE, "--train-iters=3", f"--runs-dir={tmp_path}"]
    monkeypatch.setenv("SLOW_ROLLOUT", "600 1")
    process = launch_forked(tmp_path, arguments, "tests.support.slow_engine")
    wait_for((tmp_path / "count_up" / "rollout").is_file, process)
    rank_0, rank_1 = (child.pid for child in psutil.Process(process.pid).children())
    begun = time.monotonic()
    os.kill(rank_1, signal.SIGKILL)
    code, _, errors = finish(process)
    assert time.monotonic() - begun < 10
    assert code == 1
    assert re.fullmatch(rf"error: rank 1 \(process {rank_1}\) was ended by SIGKILL: .*", errors.splitlines()[-1])
    assert not psutil.pid_exists(rank_0)


@pytest.mark.processes
def test_a_launcher_that_is_killed_leaves_no_rank(tmp_path, monkeypatch):
    arguments = ["--nproc-per-node=1", *SMALL, *ONE, "--train-iters=3", f"--runs-dir={tmp_path}"]
    monkeypatch.setenv("SLOW_ROLLOUT", "600 0")
    process = launch_forked(tmp_path, arguments, "tests.support.slow_engine")
    wait_for((tmp_path / "count_up" / "rollout").is_file, process)
    ranks = children(process.pid)
    assert ranks
    process.send_signal(signal.SIGKILL)
    wait_for(lambda: not any(map(psutil.pid_exists, ranks)), seconds=10)


@pytest.mark.processes
def test_nothing_after_the_last_save_fails_the_run(tmp_path, monkeypatch):
    """The folder of temporary files is cleaned, and the report's folder is a file's place."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    arguments = ["--nproc-per-node=1", *SMALL, *ONE, "--train-iters=100000", "--lr-decay-iters=100000"]
    process = launch_forked(tmp_path, [*arguments, f"--save={tmp_path}/save", f"--runs-dir={tmp_path}"])
    folder = tmp_path / "count_up"
    wait_for(lambda: rows_of(folder) >= 1, process)
    shutil.rmtree(temporary)
    for name in ("report.html", "summary.png"):
        (folder / name).mkdir()
    process.send_signal(signal.SIGTERM)
    code, _, errors = finish(process)
    assert code == 0, errors
    assert "Traceback" not in errors
    assert f"saved to {tmp_path}/save" in errors
    assert (tmp_path / "save" / "latest_checkpointed_iteration.txt").is_file()


@pytest.mark.processes
def test_under_torchrun_rank_0_speaks_alone(tmp_path):
    arguments = ["--standalone", "--nproc-per-node=2", "--module", "megatron_rc.launch.train_ppo", *SMALL, *TWO]
    process = ForkedCall(tmp_path, torchrun_main, [*arguments, "--num-attention-heads=1", f"--runs-dir={tmp_path}"])
    code, _, errors = finish(process)
    assert code == 1, "torchrun's own code"

    sentence = "error: --num-attention-heads 1 must be a multiple of --num-query-groups = 2"
    assert errors.count(sentence) == 1

    # What follows is torchrun's: its table of failures, or, where a rank ends
    # while torchrun is about to kill it, a ProcessLookupError of its own.
    before, _ = errors.split(sentence)
    assert "Traceback" not in before


def test_without_torchrun_the_remedy_is_named(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert code_of(train_ppo.main) == 2
    assert capsys.readouterr().err.startswith("error: start this with torchrun")
