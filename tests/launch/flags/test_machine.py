"""Limits of the machine are found at the start."""

import os
import resource

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks import files as machine
from tests.support.recorded_training import flags, run_config


def test_shared_memory_that_cannot_be_written_to_is_named(tmp_path, monkeypatch):
    shared = tmp_path / "shm"
    shared.write_text("no folder")
    monkeypatch.setattr(machine, "SHARED_MEMORY", shared)
    of_vllm = run_config(flags(tmp_path)).changed(engine={"rollout_engine": "vllm"})
    with pytest.raises(ConfigurationError, match=rf"^{shared} cannot be written to \(Not a directory\)"):
        machine.check_machine(of_vllm)


def limited(soft, hard):
    """What a process with these limits ends with: its new limit, or the sentence."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            machine.raise_open_files()
            message = str(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        except ConfigurationError as error:
            message = str(error)
        os.write(writer, message.encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    with os.fdopen(reader) as file:
        return file.read()


def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be():
    assert limited(64, 1000) == "1000"
    assert limited(300, 20_000) == "4096"
    assert limited(5000, 20_000) == "5000"
    assert all(part in limited(64, 128) for part in ("ulimit -n 128", "256"))
