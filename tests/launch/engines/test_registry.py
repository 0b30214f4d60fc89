"""Which engine the flags name, and what of them cannot work."""

import importlib.util
from functools import partial

import pytest

from megatron_rc.launch.engines import EngineError, registry
from megatron_rc.launch.engines.registry import make_engine
from megatron_rc.launch.engines.requests import API_KEY
from megatron_rc.launch.engines.sglang_client import SglangClient
from megatron_rc.launch.engines.transformers_engine import TransformersEngine
from megatron_rc.launch.engines.vllm_client import VllmClient
from megatron_rc.launch.environment import environment
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.resolved_file import as_launch_file, as_mapping
from megatron_rc.launch.tasks.text import CharacterText
from tests.support.recorded_training import flags, run_config

TWO = "--rollout-url=http://one:8000,http://two:8000"


def parse(folder, *words, world=1):
    return run_config(flags(folder, *words), world)


@pytest.mark.parametrize(
    ("words", "kind", "url"),
    [
        ([], TransformersEngine, None),
        (["--rollout-engine=vllm-server", TWO, "--rollout-model=policy"], VllmClient, "http://two:8000"),
        (["--rollout-engine=sglang-server", TWO], SglangClient, "http://two:8000"),
    ],
)
def test_each_replica_has_its_own(tmp_path, words, kind, url):
    shared = [] if url is None else [f"--rollout-weights-dir={tmp_path}/weights", "--rollout-attempts=2"]
    config = parse(tmp_path, *words, *shared, world=2)
    engine = make_engine(config, CharacterText(), replica=1)
    if url is None:
        assert type(engine) is kind
    else:
        assert type(engine.client) is kind
        assert engine.client.url == url
        assert engine.client.http.retries.attempts == 2
        assert engine.publisher.directory.path == tmp_path / "weights" / "replica-1"


SERVER = ["--rollout-engine=vllm-server", "--rollout-url=http://a:1", "--rollout-weights-dir=w"]


def test_the_servers_key_is_in_no_file_and_no_error(tmp_path, monkeypatch):
    """It comes from the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(API_KEY, "secret")
    config = parse(tmp_path, *SERVER)
    assert make_engine(config, CharacterText(), 0).client.http._headers["Authorization"] == "Bearer secret"
    for text in (repr(config), as_launch_file(config.flags), str(as_mapping(config.flags)), str(environment())):
        assert "secret" not in text
    monkeypatch.setenv(API_KEY, "secret\n")
    with pytest.raises(ConfigurationError, match=f"variable {API_KEY} has characters other than") as caught:
        parse(tmp_path, *SERVER)
    assert "secret" not in str(caught.value)


@pytest.fixture
def vllm(monkeypatch):
    """Makes the package vllm present, or absent with None."""
    right = importlib.util.find_spec

    def make(results):
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *a: results if name == "vllm" else right(name, *a)
        )

    return make


def test_weights_in_memory_of_a_killed_run_go_at_its_next_start(tmp_path, monkeypatch, vllm):
    """Those of other runs and of other replicas stay."""
    vllm(object())
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(registry, "_memory", lambda: str(memory))
    monkeypatch.setattr(registry.atexit, "register", lambda *_, **__: None)  # as in a killed process

    def start(run_name, replica=0):
        config = parse(tmp_path, "--rollout-engine=vllm", f"--run-name={run_name}", world=2)
        return make_engine(config, CharacterText(), replica).directory.path

    left = start("killed")
    left.mkdir()
    (left / "model.safetensors").write_text("a whole model")
    others = [start("killed", replica=1).parent, start("other").parent]
    assert start("killed") == left
    assert not left.exists()
    assert sorted(memory.iterdir()) == sorted([left.parent, *others])
    assert left.parent.stat().st_mode & 0o777 == 0o700


def test_weights_in_memory_go_at_the_end(tmp_path, monkeypatch, vllm):
    vllm(object())
    monkeypatch.setattr(registry, "_memory", lambda: str(tmp_path))
    at_exit = []

    def register(function, *args, **options):
        at_exit.append(partial(function, *args, **options))

    monkeypatch.setattr(registry.atexit, "register", register)
    folder = make_engine(parse(tmp_path, "--rollout-engine=vllm"), CharacterText(), 0).directory.path.parent
    assert folder.is_dir()
    for function in at_exit:
        function()
    assert not folder.exists()


def test_a_link_in_memory_is_not_followed(tmp_path, monkeypatch, vllm):
    """Another user could make one, whose end would be written over."""
    vllm(object())
    monkeypatch.setattr(registry, "_memory", lambda: str(tmp_path))
    config = parse(tmp_path, "--rollout-engine=vllm")
    folder = make_engine(config, CharacterText(), 0).directory.path.parent
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineError, match="--rollout-weights-dir"):
        make_engine(config, CharacterText(), 0)


def test_vllm_is_named_where_it_is_missing(tmp_path, vllm):
    vllm(None)
    with pytest.raises(ConfigurationError, match=r"--rollout-engine vllm needs vllm, .*pip install .*\[vllm\]'"):
        parse(tmp_path, "--rollout-engine=vllm")


@pytest.mark.parametrize(
    ("dtype", "computed", "read"),
    [("fp32", "float32", None), ("bf16", "bfloat16", None), *((d, "float32", d) for d in ("fp8-e4m3", "int8"))],
)
def test_vllm_reads_what_it_could_not_round_itself(tmp_path, vllm, dtype, computed, read):
    vllm(object())
    engine = make_engine(parse(tmp_path, "--rollout-engine=vllm", f"--rollout-dtype={dtype}"), CharacterText(), 0)
    assert engine._options["dtype"] == computed
    assert (engine.directory._rounded.dtype if engine.directory._rounded else None) == read
