"""Numbers that are none of any run are refused at once, before anything of that size is made."""

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import options_of, out_of_range

COUNTED = [option for _, section, _ in sections_of(RunConfig) for option in options_of(section) if option.kind is int]


def test_every_whole_number_has_a_bound():
    assert len(COUNTED) > 60
    for option in COUNTED:
        assert out_of_range(option, 10**19), option.field
        assert not out_of_range(option, option.most if isinstance(option.most, int) else 10**15), option.field


@pytest.mark.parametrize(("processes", "nodes"), [("1000000000", "1"), ("8", "1000000000"), ("8", "1:1000000000")])
def test_more_processes_than_any_cluster_has_are_refused(capsys, processes, nodes):
    """Where nothing is started too: the table of ranks would fill the memory."""
    for more in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as end:
            main(["--config=count_up", f"--nproc-per-node={processes}", f"--nnodes={nodes}", *more])
        error = capsys.readouterr().err
        assert end.value.code == 2
        assert all(part in error for part in (f"--nproc-per-node {processes} ", f"--nnodes {nodes} ", "262144"))


@pytest.mark.parametrize("name", ["num-layers", "run-name", "normalization", "profile-ranks", "moe-layer-freq"])
def test_two_dashes_are_no_value(name):
    """Of a flag of any type argparse made an empty list of them, before Python 3.13."""
    with pytest.raises(ConfigurationError, match=f"--{name}: .*'--'"):
        build_parser().parse_args([f"--{name}=--"])
