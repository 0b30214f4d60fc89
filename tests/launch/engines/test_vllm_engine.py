"""vLLM in a process of the trainer's own: its arguments, its GPUs, and its sleep, without vLLM.

``tests/vllm/check_vllm.py`` has the rest with vLLM, on a CPU.
"""

import os
from unittest import mock

import pytest
import torch

from megatron_rc.launch.engines import EngineError
from megatron_rc.launch.engines.model_directory import ModelDirectory
from megatron_rc.launch.engines.registry import make_engine
from megatron_rc.launch.engines.vllm_args import OWN, read_engine_args
from megatron_rc.launch.engines.vllm_engine import VllmEngine, _devices, without_torchrun
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.checks.rollouts import check_engine
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rollouts.collector import RolloutCollector
from megatron_rc.launch.tasks.text import CharacterText
from megatron_rc.records.rollout import SamplingParams
from tests.support.recorded_training import flags, run_config
from tests.support.rollout_servers import CONFIG, ENDS, EOS, weights


@pytest.fixture(autouse=True)
def installed(monkeypatch):
    """As if vLLM were installed."""
    monkeypatch.setattr("megatron_rc.launch.flags.checks.rollouts.require", lambda *_: None)


def parse(folder, *words):
    return run_config(flags(folder, "--rollout-engine=vllm", *words))


def test_the_file_adds_arguments_and_replaces_this_projects_choices(tmp_path):
    file = tmp_path / "args.yaml"
    file.write_text("gpu_memory_utilization: 0.5\nmax_num_seqs: 256\n")
    config = parse(tmp_path, f"--rollout-engine-args={file}", "--rollout-tensor-parallel-size=2")
    options = make_engine(config, CharacterText(), 0)._options
    assert options.items() >= {"gpu_memory_utilization": 0.5, "max_num_seqs": 256, "tensor_parallel_size": 2}.items()
    assert make_engine(parse(tmp_path), CharacterText(), 0)._options["max_num_seqs"] == 64


WRONG = {
    "missing": (None, "cannot be read"),
    "broken": ("a: [", "cannot be read"),
    "list": ("- max_num_seqs", "expected lines of the form"),
    "share": ("gpu_memory_utilization: 50%", "gpu_memory_utilization: 50%, expected a number above 0"),
    **{name: (f"{name}: 1", f"it has {name}, but ") for name in OWN},
}


@pytest.mark.parametrize(("text", "message"), WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused_by_name(tmp_path, text, message):
    file = tmp_path / "args.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigurationError, match=f"--rollout-engine-args {file}: .*{message}") as caught:
        parse(tmp_path, f"--rollout-engine-args={file}")
    assert "\n" not in str(caught.value)
    assert read_engine_args(None) == {}


def test_a_memory_to_share_needs_a_gpu(tmp_path, caplog):
    parse(tmp_path, "--rollout-colocate")
    assert "--rollout-colocate (needs a GPU)" in caplog.text


def test_more_gpus_than_the_replica_has_are_refused(tmp_path):
    config = run_config(flags(tmp_path, "--rollout-engine=vllm", "--tensor-model-parallel-size=2"), 4)
    # The check alone, because this machine may have no GPU.
    check_engine(config.changed(launch={"on_cpu": False}, engine={"rollout_tensor_parallel_size": 2}), samples=True)
    config = config.changed(launch={"on_cpu": False}, engine={"rollout_tensor_parallel_size": 3})
    message = "--rollout-tensor-parallel-size 3 with 2 replicas .* give at most 2"
    with pytest.raises(ConfigurationError, match=message):
        check_engine(config, samples=True)


@pytest.mark.parametrize(
    ("visible", "current", "number", "found"),
    [(None, 0, 1, "0"), (None, 2, 2, "2,3"), ("4,5,6,7", 1, 2, "5,6"), ("GPU-a,GPU-b,GPU-c,GPU-d", 3, 1, "GPU-d")],
)
def test_vllm_gets_this_ranks_gpu_and_the_next_ones(monkeypatch, visible, current, number, found):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=current),
        mock.patch.object(torch.cuda, "device_count", return_value=4),
    ):
        assert _devices(number) == found
        with pytest.raises(EngineError, match=rf"--rollout-tensor-parallel-size {5 - current} needs as many GPUs"):
            _devices(5 - current)


def test_vllms_processes_do_not_see_the_trainers_job(monkeypatch):
    """With torchrun's variables they would wait for its ranks."""
    of_torchrun = {"RANK": "3", "MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in of_torchrun.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    before = dict(os.environ)
    with without_torchrun({"OMP_NUM_THREADS": "8", "CUDA_VISIBLE_DEVICES": "2"}):
        assert not of_torchrun.keys() & os.environ.keys()
        assert (os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]) == ("8", "2")
    assert dict(os.environ) == before


def test_vllm_sleeps_from_the_rollout_to_the_next_weights(tmp_path):
    engine = VllmEngine(ModelDirectory(tmp_path / "weights", CONFIG, EOS), "fp32", ENDS, 16, sleeps=True)
    llm = mock.Mock()
    with mock.patch.object(VllmEngine, "_start", return_value=llm):
        engine.sleep()  # it has not started yet
        engine.load_weights(weights().items(), 0)
        engine.sleep()
        engine.sleep()
        with pytest.raises(EngineError, match="call load_weights first"):
            engine.sample([[3]], SamplingParams(), 4, 0)
        engine.load_weights(weights().items(), 1)
    path = str(engine.directory.path)
    assert llm.mock_calls[:4] == [
        mock.call.sleep(level=2),
        mock.call.wake_up(tags=["weights"]),
        mock.call.collective_rpc("reload_weights", kwargs={"weights_path": mock.ANY}),
        mock.call.wake_up(tags=["kv_cache"]),
    ]
    assert llm.collective_rpc.call_args.kwargs["kwargs"]["weights_path"].startswith(path)
    assert engine.version == 1


def test_the_collector_lets_the_engine_sleep_after_each_rollout():
    collector = RolloutCollector.__new__(RolloutCollector)
    collector.open_rollouts = None
    collector.is_engine_rank = True
    collector.config = mock.Mock()
    collector.config.engine.rollout_colocate = True
    collector.config.has_teacher_input = False
    collector.work = mock.Mock()
    collector.work.run = lambda work, words: work()
    collector._checked = lambda sampled, step: sampled
    collector._scored = lambda sampled, step: sampled
    order = mock.Mock()
    collector.engine = order.engine
    collector.scheduler = order.scheduler
    collector.broadcast = order.broadcast
    collector._said_experts = True
    collector.collect(3)
    assert [name for name, *_ in order.mock_calls] == ["scheduler.take", "broadcast.batch", "engine.sleep"]


def test_vllm_loads_the_tokenizer_for_stop_strings_alone(tmp_path):
    config, task = configure(flags(tmp_path, "--rollout-engine=vllm", "--rollout-stop=78"), 1)
    assert make_engine(config, task.text, 0)._options["skip_tokenizer_init"] is False
    assert make_engine(parse(tmp_path), CharacterText(), 0)._options["skip_tokenizer_init"] is True
