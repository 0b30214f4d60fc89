"""GGUF files that cannot become a Hugging Face directory."""

import importlib.util
import json
import sys
import types
from pathlib import Path

import pytest
import transformers

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.weights import from_gguf
from megatron_rc.launch.weights.from_gguf import unpack


def test_a_gguf_file_without_a_tensor_is_named():
    """Where one was renamed, transformers takes random weights and says so in its report alone."""
    good = {"missing_keys": set(), "unexpected_keys": {"x"}, "mismatched_keys": set()}
    from_gguf.check_complete(Path("a.gguf"), good)
    for kind, verb in (("missing_keys", "lacks"), ("mismatched_keys", "has in another shape")):
        with pytest.raises(ConfigurationError, match=rf"a\.gguf {verb} the tensor of model\.up: it is damaged"):
            from_gguf.check_complete(Path("a.gguf"), {kind: {"model.up"}})


def test_a_gguf_file_that_cannot_be_unpacked_is_named(tmp_path, monkeypatch):
    with pytest.raises(ConfigurationError, match=r"none\.gguf: no such file"):
        unpack(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "a.gguf").write_bytes(b"not one")
    right = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "gguf" else right(name, *a))
    monkeypatch.setitem(sys.modules, "accelerate", types.ModuleType("accelerate"))
    with pytest.raises(ConfigurationError, match=r"a GGUF file needs .*pip install .*\[gguf\]'"):
        unpack(tmp_path / "a.gguf", tmp_path / "out")
    with pytest.raises(SystemExit, match=r"usage: python -m megatron_rc\.launch\.weights\.from_gguf"):
        from_gguf.main(["a.gguf"])
    with pytest.raises(SystemExit, match=r"error: .*no such file"):
        from_gguf.main([str(tmp_path / "none.gguf"), str(tmp_path / "out")])


def test_a_folder_is_written_or_named_and_what_stands_beside_it_left_alone(tmp_path, monkeypatch):
    def save(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        rotary = {"rope_type": "default", "rope_theta": 5e5}
        (Path(folder) / "config.json").write_text(json.dumps({"dtype": "float32", "rope_parameters": rotary}))

    def save_tokenizer(folder):
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))

    file = tmp_path / "a.gguf"
    file.write_bytes(b"")
    (tmp_path / "out.part").mkdir()
    (tmp_path / "out.part" / "mine").write_text("")
    loaded = types.SimpleNamespace(save_pretrained=save, config=types.SimpleNamespace())
    tokenizer = types.SimpleNamespace(save_pretrained=save_tokenizer)
    monkeypatch.setattr(from_gguf, "require", lambda *_: None)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda **_: tokenizer)
    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: (loaded, {}))
    unpack(file, tmp_path / "out")
    # A folder that holds a model is not unpacked again.
    unpack(tmp_path / "gone.gguf", tmp_path / "out")
    names = sorted(path.name for path in tmp_path.rglob("*"))
    assert names == ["a.gguf", "config.json", "mine", "out", "out.part", "tokenizer_config.json"]
    # Programs older than transformers 5 read it too.
    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (entries["rope_theta"], entries["rope_scaling"], entries["torch_dtype"]) == (5e5, None, "float32")
    described = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert described["tokenizer_class"] == "PreTrainedTokenizerFast"
    with pytest.raises(ConfigurationError, match=r"a\.gguf/out cannot be written to: .*Not a directory"):
        unpack(file, file / "out")
