"""Two runs that write to one folder: the second one is refused, unless the first one has ended, in whatever way."""

import os
import signal

import pytest

from megatron_rc.launch.training.checks.folder_locks import IN_USE_FILE, in_use
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, run_config
from tests.support.training_runs import LIVE, run_training


@pytest.mark.parametrize("shared", ["run", "save"])
def test_a_second_run_in_one_folder_is_refused(ranks, tmp_path, shared):
    """This process stands for the first run, which is between two names of a checkpoint."""
    folder = tmp_path / shared
    replaced = tmp_path / shared / "iter_0000001.replaced"
    replaced.mkdir(parents=True)
    first = {"run": ["--run-name=run"], "save": ["--run-name=other", f"--save={tmp_path}/save"]}[shared]
    arguments = [*LIVE, "--train-iters=1", f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    expected_folders = {"run": {"run"}, "save": {"save", "other"}}[shared]
    with in_use(run_config(flags(tmp_path, *first, "--train-iters=1"))):
        (error,) = ranks.run(run_training, Layout(), flags(tmp_path, *arguments))
        assert {path.name for path in tmp_path.iterdir()} == expected_folders, "what is refused leaves nothing"
    assert replaced.is_dir()
    name = {"run": f"--runs-dir {tmp_path}, --run-name run", "save": f"--save {folder}"}[shared]
    assert error.startswith(f"RunError: {name}: another run (process {os.getpid()} on ")
    assert error.endswith(
        f") writes there: wait until it has ended, or choose another folder (if it has ended, remove {folder}/.in-use)"
    )
    assert list(tmp_path.rglob("*")) == [folder, replaced], "nor does a run that wrote nothing"


def test_a_killed_run_keeps_nobody_out(tmp_path):
    """Its file stays and its lock does not, even where a process lives on that it began, as to write a checkpoint."""
    config = run_config(flags(tmp_path, "--run-name=run", "--train-iters=1"))
    reader, writer = os.pipe()
    first = os.fork()
    if not first:
        with in_use(config):
            child = os.fork()
            if child:
                os.write(writer, str(child).encode())
            else:
                signal.pause()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(first, 0)
    lives_on = int(os.read(reader, 20))
    try:
        assert (tmp_path / "run" / IN_USE_FILE).is_file()
        with in_use(config):
            pass
    finally:
        os.kill(lives_on, signal.SIGKILL)
    # A folder that cannot be written to is no error of the lock.
    config = run_config(flags(tmp_path, "--run-name=file", "--train-iters=1"))
    (tmp_path / "file").write_text("")
    with in_use(config):
        pass


def test_a_link_is_not_written_through(tmp_path):
    config = run_config(flags(tmp_path, "--run-name=run", "--train-iters=1"))
    other = tmp_path / "other"
    other.write_text("of somebody else")
    (tmp_path / "run").mkdir()
    link = tmp_path / "run" / IN_USE_FILE
    link.symlink_to(other)
    with in_use(config):
        pass
    assert other.read_text() == "of somebody else"
