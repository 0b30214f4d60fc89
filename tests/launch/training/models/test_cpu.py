"""The switch that runs Megatron-Core on a CPU: what it answers, and that it leaves nothing behind."""

import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import PrefixStore, ProcessGroupGloo

from tests.support.partial_rollouts import wait_until


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU answers where the switch is off")
def test_the_cpu_switch_is_reversible(caplog):
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    from megatron_rc.launch.train_ppo import cpu_backend  # also imports the training modules without torch.compile

    names = ("current_device", "synchronize", "Stream", "get_rng_state", "manual_seed", "current_stream", "empty_cache")
    compile_function = torch.compile
    owners = (mappings, moe_utils, token_dispatcher, token_dispatcher.MoEAlltoAllTokenDispatcher)

    def present():
        return [{name: getattr(torch.cuda, name) for name in names}, *(dict(vars(owner)) for owner in owners)]

    before = present()
    with cpu_backend():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert (
            torch.ones(2, device=torch.cuda.current_device(), pin_memory=True).cuda().type() == "torch.cuda.FloatTensor"
        )
        assert torch.ones(2).to("cuda").device.type == torch.ones(2).to(device="cuda").device.type == "cpu"
        generator = torch.get_rng_state()
        torch.cuda.manual_seed(1)
        assert torch.equal(torch.get_rng_state(), generator), "the CPU's own generator stays apart"
    assert present() == before
    assert torch.compile is compile_function
    assert torch.ones(2).type() == "torch.FloatTensor"
    assert [record.message for record in caplog.records if "runs on the CPU" in record.message]
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


def gloo_threads():
    """Threads of gloo's devices in this process."""
    return [path for path in Path("/proc/self/task").glob("*/comm") if path.read_text() == "gloo_tcp_loop\n"]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
def test_all_groups_share_one_thread_for_their_connections():
    from megatron_rc.launch.training.models.cpu import cpu_backend

    store = torch.distributed.HashStore()
    before = len(gloo_threads())
    with cpu_backend():
        groups = [ProcessGroupGloo(PrefixStore(name, store), 0, 1, timedelta(seconds=9)) for name in "abc"]
        wait_until(lambda: len(gloo_threads()) > before)  # a thread gives itself its name
        assert len(gloo_threads()) == before + 1
        assert {group.options._timeout for group in groups} == {timedelta(seconds=9)}
    groups.append(ProcessGroupGloo(PrefixStore("d", store), 0, 1))
    wait_until(lambda: len(gloo_threads()) == before + 2)
