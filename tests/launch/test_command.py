"""The console command: its names, its version, and the usage of a bare launch."""

import pytest

import megatron_rc
from megatron_rc.launch.__main__ import main as launch
from megatron_rc.launch.command import main


def test_the_version(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"megatron-rc {megatron_rc.__version__}\n"


def test_the_usage_names_every_command(capsys):
    main([])
    usage = capsys.readouterr().out
    assert all(name in usage for name in ("launch", "dry-run", "doctor", "replay", "check-engine", "export", "docs"))


def test_a_bare_launch_prints_its_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        launch([])
    assert ended.value.code == 2
    assert "usage: python -m megatron_rc.launch" in capsys.readouterr().err
