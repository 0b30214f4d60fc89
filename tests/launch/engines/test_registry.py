"""Which engine the flags name, and what of them cannot work."""

import importlib.util

import pytest

from megatron_rc.launch.engines import registry
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

    def make(found):
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: found if name == "vllm" else right(name, *a))

    return make


def test_weights_in_memory_of_killed_runs_go_at_the_next_start(tmp_path, monkeypatch, vllm):
    """Whatever engine that start asks for; those of vLLM in a live run, here this one, stay."""
    vllm(object())
    monkeypatch.setattr(registry, "_memory", lambda: str(tmp_path / "memory"))
    (tmp_path / "memory" / "rollout-weights-killed" / "replica-0").mkdir(parents=True)
    engine = make_engine(parse(tmp_path, "--rollout-engine=vllm"), CharacterText(), 0)
    assert engine.directory.path.parent.is_dir()
    assert list((tmp_path / "memory").iterdir()) == [engine.directory.path.parent]
    (tmp_path / "memory" / "rollout-weights-killed").mkdir()
    make_engine(parse(tmp_path), CharacterText(), 0)
    assert list((tmp_path / "memory").iterdir()) == [engine.directory.path.parent]


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
