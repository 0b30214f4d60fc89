"""Numbers that are none of any run are refused at once, before anything of that size is made."""

import time

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.parser import build_parser
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import options_of, out_of_range

COUNTED = [option for _, section, _ in sections_of(RunConfig) for option in options_of(section) if option.kind is int]
LATENT = "--multi-latent-attention --no-group-query-attention --sequence-parallel"
EXPERTS = "--num-experts=8"

BEYOND = {
    "--num-layers=1000000000": "--num-layers 1000000000 must be at most 1000",
    "--hidden-size=4000000000000": "--hidden-size 4000000000000 must be at most 1048576",
    "--ffn-hidden-size=10000000000000000": "--ffn-hidden-size 10000000000000000 must be at most 16777216",
    "--vocab-size=100000000000000000000": "--vocab-size 100000000000000000000 must be at most 2147483648",
    "--seq-length=100000000000000000000": "--seq-length 100000000000000000000 must be at most 2147483648",
    "--seed=100000000000000000000": "--seed 100000000000000000000 must be at most 9007199254740992",
    "--num-experts=1000000": "--num-experts 1000000 must be at most 2048",
    "--rollout-staleness=1000000000": "--rollout-staleness 1000000000 must be at most 10000",
    "--grpo-prompts-per-step=1000000000": "= 8000000000 sequences: a rollout batch has at most 2097152",
    "--overlap-grad-reduce --ddp-bucket-size=100000000000000000": "--ddp-bucket-size 100000000000000000 must be at mo",
    "--grpo-prompts-per-step=1024 --global-batch-size=4 --micro-batch-size=1": "make 2048 batches of --global-batch-",
    f"{LATENT} --original-max-position-embeddings=1000000000": "--original-max-position-embeddings 1000000000 must be",
}


@pytest.mark.parametrize("words", BEYOND)
def test_a_number_of_no_run_is_refused(words):
    start = time.process_time()
    with pytest.raises(ConfigurationError) as error:
        configure(["--config=count_up", "--cpu", *words.split()], 4, folders=False, elsewhere=True)
    assert BEYOND[words] in str(error.value)
    assert time.process_time() - start < 5


def test_every_whole_number_has_a_bound():
    assert len(COUNTED) > 60
    for option in COUNTED:
        assert out_of_range(option, 10**19), option.field
        assert not out_of_range(option, option.most), option.field


@pytest.mark.parametrize(("processes", "nodes"), [("1000000000", "1"), ("8", "1000000000"), ("8", "1:1000000000")])
def test_more_processes_than_any_cluster_has_are_refused(capsys, processes, nodes):
    """Where nothing is started too: the table of ranks would fill the memory."""
    for more in ([], ["--dry-run"]):
        with pytest.raises(SystemExit) as end:
            main(["--config=count_up", f"--nproc-per-node={processes}", f"--nnodes={nodes}", *more])
        error = f"error: --nproc-per-node {processes} · --nnodes {nodes} must be at most 262144 processes\n"
        assert (end.value.code, capsys.readouterr().err) == (2, error)


@pytest.mark.parametrize("name", ["num-layers", "run-name", "normalization", "profile-ranks", "moe-layer-freq"])
def test_two_dashes_are_no_value(name):
    """Of a flag of any type argparse made an empty list of them, before Python 3.13."""
    with pytest.raises(ConfigurationError, match=f"^argument --{name}: expected a value, got '--'"):
        build_parser().parse_args([f"--{name}=--"])
