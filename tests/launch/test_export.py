"""Checkpoints of any layout as Hugging Face directories: every bit, the tokenizer, the memory, and what is refused."""

import hashlib
import json
import re
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rc.launch import export
from megatron_rc.launch.checkpoint_folders import put_in_place
from megatron_rc.launch.flags.stored import stored_config
from megatron_rc.launch.tasks.text import CharacterText
from megatron_rc.launch.training import hugging_face
from megatron_rc.launch.training.checkpoints.checksums import MANIFEST
from megatron_rc.launch.weights.named_weights import kept_buffers, named_weights
from tests.launch.weights.test_memory import most_alive
from tests.support.commands import code_of
from tests.support.paths import ROOT
from tests.support.published_models import DEEPSEEK, GATED, LLAMA3, SMALL_GPT2
from tests.support.ranks import Layout
from tests.support.recorded_training import COMMON, make_trainer

WIDE = {
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 224,
    "vocab_size": 256,
    "tie_word_embeddings": False,
}
# Every parameter is a load of its own, so models are as small as what they show allows.
TWO_LAYERS = {"num_hidden_layers": 2}
LLAMA = GATED | TWO_LAYERS | {"rope_parameters": LLAMA3, "max_position_embeddings": 131072}
CONFIGS = {
    "llama3": transformers.LlamaConfig(**LLAMA, head_dim=16, tie_word_embeddings=True),
    # A dense layer and one of experts.
    "deepseek_v3": transformers.DeepseekV3Config(**DEEPSEEK | TWO_LAYERS),
    "mistral": transformers.MistralConfig(**GATED, sliding_window=32, tie_word_embeddings=False),
    "gpt2": transformers.GPT2Config(**SMALL_GPT2 | {"n_layer": 2}, bos_token_id=None, eos_token_id=1),
    "wide": transformers.LlamaConfig(**GATED | WIDE),
}
STEP = "iter_0000003"
# Task settings of a run with the tokenizer of --load-hf.
OWN = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": None}
CASES = {
    "llama3": (Layout(tp=2, pp=2), ["--use-distributed-optimizer"]),
    "wide": (Layout(tp=2), []),
    "deepseek_v3": (Layout(tp=2, sp=True, dp=2, ep=2), ["--bf16"]),
    "mistral": (Layout(pp=2, vpp=True), ["--bf16"]),
    "gpt2": (Layout(), []),
}


def save_at(words, step):
    """A checkpoint of the model as it was loaded, under the number of a step."""
    trainer = make_trainer(words)
    trainer.iteration = step
    trainer.save()


@pytest.fixture(scope="module")
def home(tmp_path_factory, ranks):
    """A directory of each model, and a checkpoint of it."""
    folder = tmp_path_factory.mktemp("export")
    for name, (layout, more) in CASES.items():
        torch.manual_seed(5)
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
        for buffer in kept_buffers(model).values():
            buffer.uniform_()  # no 16 bits hold such a bias of experts
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms, which begin as 1
                parameter.data.uniform_(0.5, 1.5)
        model.save_pretrained(folder / name)
        arguments = [
            *COMMON,
            f"--load-hf={folder / name}",
            "--tokenizer-type=CharacterTokenizer",
            f"--runs-dir={folder}/runs",
        ]
        arguments += ["--micro-batch-size=8", f"--save={folder / name}-checkpoints", *layout.flags(), *more]
        ranks.run(save_at, layout, arguments, 3)
    return folder


def exported(checkpoints, target, *more):
    """The exit code of an export of these checkpoints."""
    return code_of(export.main, "--load", checkpoints, "--save-hf", target, *more)


def described(checkpoints, target, tokenizer_folder=None):
    """Write what an export writes beside the weights."""
    config = stored_config(checkpoints / STEP)
    text = export.tokenizer_of(config, tokenizer_folder)
    text.ends = export._ends_of(config, text)
    target.mkdir()
    hugging_face._describe(target, config, text)


DOCUMENTS = [(ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("launching.md", "models.md")]


@pytest.fixture(scope="module")
def llama3_folder(home, tmp_path_factory):
    """The directory of Llama's checkpoints, by the command of both documents."""
    commands = [re.findall(r"^python -m megatron_rc\.launch\.export (.+)$", text, re.MULTILINE) for text in DOCUMENTS]
    assert commands == [["--load ckpt --save-hf my_model"]] * 2
    folder = tmp_path_factory.mktemp("documented")
    (folder / "ckpt").symlink_to(home / "llama3-checkpoints")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        assert code_of(export.main, *commands[0][0].split()) == 0
    return folder / "my_model"


def assert_it_has_the_trained_weights(directory, home, name):
    dtype = torch.bfloat16 if "--bf16" in CASES[name][1] else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(directory)
    trained = transformers.AutoModelForCausalLM.from_pretrained(home / name, dtype=dtype)
    assert type(model) is type(trained)
    assert model.dtype == dtype
    tensors = named_weights(model)
    expected = named_weights(trained)
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(tensors[key], value), key
    tokens = torch.tensor([[3, 4, 5, 6, 7]])
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, trained(tokens).logits)


@pytest.mark.parametrize("name", ["deepseek_v3", "mistral"])
def test_transformers_reads_what_was_trained(home, tmp_path, name):
    """Written by tensor, virtual pipeline and expert parallel ranks; read by one process."""
    assert exported(home / f"{name}-checkpoints", tmp_path / "out") == 0
    assert_it_has_the_trained_weights(tmp_path / "out", home, name)


def test_transformers_reads_what_the_documents_command_writes(home, llama3_folder, monkeypatch, capsys):
    """Also by the documents' lines below the command, which generate from the directory."""
    assert_it_has_the_trained_weights(llama3_folder, home, "llama3")
    monkeypatch.chdir(llama3_folder.parent)
    (block,) = re.findall(r"^```python\n(from transformers.+?)^```", DOCUMENTS[1], re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/models.md", "exec"), {})
    assert re.search(r"^24\d*$", capsys.readouterr().out, re.MULTILINE)


def test_its_tokenizer_and_the_way_it_ends_come_along(home, llama3_folder, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama3_folder)
    assert tokenizer("0123")["input_ids"] == [3, 4, 5, 6]
    assert tokenizer.decode([3, 4, 1], skip_special_tokens=True) == "01"
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama3_folder)
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (1, 0)
    assert (model.config.bos_token_id, model.config.eos_token_id) == (None, 1)
    # Prompts from a file have every printable character.
    described(with_settings(home, tmp_path / "checkpoints", task={"task": None}), tmp_path / "out")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.decode(tokenizer("Hi, 1 + 2?")["input_ids"]) == "Hi, 1 + 2?"


def in_small_files(monkeypatch, size):
    right = hugging_face.write_directory
    monkeypatch.setattr(hugging_face, "write_directory", lambda *args: right(*args, shard_bytes=size))


def test_large_models_are_several_files(home, tmp_path, monkeypatch):
    in_small_files(monkeypatch, 20_000)
    assert exported(home / "gpt2-checkpoints", tmp_path / "out") == 0
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    tensors = {name: (file, tensor) for file in files for name, tensor in load_file(tmp_path / "out" / file).items()}
    assert index["weight_map"] == {name: file for name, (file, _) in tensors.items()}
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in tensors.values())
    assert_it_has_the_trained_weights(tmp_path / "out", home, "gpt2")


def test_memory_is_a_file_and_a_layer(home, tmp_path, monkeypatch):
    """Every byte that is allocated, of a model of four layers."""
    model = 4 * sum(p.numel() for p in transformers.AutoModelForCausalLM.from_config(CONFIGS["wide"]).parameters())
    layer = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 224 + 2 * 64)
    in_small_files(monkeypatch, 50_000)

    def export_once():
        assert exported(home / "wide-checkpoints", tmp_path / "out") == 0

    assert model > 3 * (50_000 + layer)
    assert layer < most_alive(export_once, tries=1) < 50_000 + layer


def test_a_tokenizer_of_a_directory_is_copied(home, tmp_path):
    """From where the run had it, or from another folder; a run that started elsewhere keeps that model's tokens."""
    folder = tmp_path / "model"
    shutil.copytree(home / "llama3", folder)
    CharacterText("0123456789").save(folder)
    transformers.GenerationConfig(eos_token_id=[1, 2], do_sample=True, top_p=0.5).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": [1, 2], "bos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    loaded = {"load_hf": str(folder)}
    ends = {"end_token_ids": [1, 2]}
    checkpoints = with_settings(home, tmp_path / "checkpoints", task=OWN, checkpoints=loaded, rollouts=ends)
    assert exported(checkpoints, tmp_path / "out") == 0
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["eos_token_id"], written["bos_token_id"], written["pad_token_id"]) == ([1, 2], 2, None)
    folder.rename(tmp_path / "moved")
    assert exported(checkpoints, tmp_path / "again") == 2
    described(checkpoints, tmp_path / "again", tmp_path / "moved")
    for name in ("tokenizer.json", "config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("ended", "config_ids", "generation_ids"),
    [
        ([1, 2, 5], [1, 2, 5], [1, 2, 5]),  # --rollout-stop-token-ids 5
        ([1], 1, 1),  # --rollout-no-stop-token-ids 2
        ([1, 2], [1, 2], [2, 1]),
        (None, [1, 2], [2, 1]),  # a checkpoint of an earlier version: all that the files name
    ],
)
def test_the_directory_names_the_ends_that_the_run_had(home, tmp_path, ended, config_ids, generation_ids):
    """A file that names them keeps its own words, all others get the whole set."""
    folder = tmp_path / "model"
    shutil.copytree(home / "llama3", folder)
    CharacterText("0123456789").save(folder)
    transformers.GenerationConfig(eos_token_id=[2, 1], do_sample=True, top_p=0.5).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 2}
    (folder / "config.json").write_text(json.dumps(config))
    settings = {"task": OWN, "checkpoints": {"load_hf": str(folder)}, "rollouts": {"end_token_ids": ended}}
    described(with_settings(home, tmp_path / "checkpoints", **settings), tmp_path / "out")
    both_files = [
        json.loads((tmp_path / "out" / name).read_text()) for name in ("config.json", "generation_config.json")
    ]
    assert [entries["eos_token_id"] for entries in both_files] == [config_ids, generation_ids]
    assert (both_files[1]["do_sample"], both_files[1]["top_p"]) == (True, 0.5)
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == generation_ids


def test_a_tokenizer_of_more_tokens_than_the_model_has_is_refused(home, tmp_path, capsys):
    CharacterText("".join(map(chr, range(32, 127)))).save(tmp_path / "large")
    checkpoints = with_settings(home, tmp_path / "checkpoints", task=OWN)
    assert exported(checkpoints, tmp_path / "out", "--tokenizer-model", tmp_path / "large") == 2
    assert re.search(r"^error: the tokenizer in \S+/large has 98 tokens, the model \d\d: give", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()


def with_settings(home, target, **changes):
    """A copy of Llama's checkpoints with other settings beside the weights; None leaves a section out."""
    path = shutil.copytree(home / "llama3-checkpoints", target) / STEP / "settings.json"
    sections = json.loads(path.read_text())
    for name, change in changes.items():
        sections[name] = None if change is None else sections[name] | change
    path.write_text(json.dumps({name: value for name, value in sections.items() if name == "experts" or value}))
    files = json.loads((path.parent / MANIFEST).read_text())["files"]
    files[path.name] = {"bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    (path.parent / MANIFEST).write_text(json.dumps({"files": files}) + "\n")
    return target


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("model", {"rotary_base": "a"}, r"model: rotary_base is 'a': it was written by another version, or is broken"),
        ("model", {"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ("transformer", {"memory": 5}, "transformer has an unknown field 'memory'"),
        (
            "transformer",
            {"qk_layernorm": True, "add_qkv_bias": True},
            "no Hugging Face architecture here has the settings",
        ),
        ("megatron", {"given": {"rotary_interleaved": True, "of_a_later_release": 1}}, "--rotary-interleaved"),
        ("model", {"hybrid_layer_pattern": "M-*-*-*-"}, "unknown field 'hybrid_layer_pattern'"),
        ("transformer", None, "has no section transformer"),
        ("transformer", {"num_layers": 3}, r"(layers\.\S+ cannot be read|holds no tensor \S*layers\.2\.)"),
        ("model", {"untie_embeddings_and_output_weights": True}, r"holds no tensor output_layer\.weight"),
        ("task", {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "gone"}, "tokenizer was in gone, which"),
    ],
    ids=str,
)
def test_settings_that_are_not_the_models_are_named(home, tmp_path, capsys, section, change, message):
    checkpoints = with_settings(home, tmp_path / "checkpoints", **{section: change})
    assert exported(checkpoints, tmp_path / "out") in (1, 2)
    assert re.search(message, capsys.readouterr().err)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints"]


def test_a_stored_default_of_a_field_that_moved_into_a_section_is_read(home, tmp_path):
    checkpoints = with_settings(home, tmp_path / "checkpoints", megatron={"given": {"softmax_type": "vanilla"}})
    assert stored_config(checkpoints / STEP).transformer.softmax_type == "vanilla"


def test_a_flipped_bit_is_found_unless_nobody_looks_and_half_a_file_always(home, tmp_path, capsys):
    copy = shutil.copytree(home / "llama3-checkpoints", tmp_path / "checkpoints")
    (path, *_) = sorted(copy.rglob("*.distcp"), key=lambda path: -path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    shutil.copytree(home / "llama3-checkpoints" / STEP, copy / "iter_0000002")
    assert exported(copy, tmp_path / "out") == 1
    message = capsys.readouterr().err
    assert f"checkpoint 3 is damaged: {path.name}" in message
    assert "; --ckpt-step takes another one (there are 2, 3)" in message
    assert exported(copy, tmp_path / "other", "--ckpt-step=2") == 0
    assert exported(copy, tmp_path / "out", "--no-verify-integrity") == 0
    path.write_bytes(content[: len(content) // 2])
    assert exported(copy, tmp_path / "half", "--no-verify-integrity") == 1
    assert path.name in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "other", "out"]


def test_a_task_of_ones_own_is_imported_only_where_it_is_named(home, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    spec = "python:exported_task:Task"
    (tmp_path / "exported_task.py").write_text(
        "from pathlib import Path\nPath('it-ran').touch()\nclass Task:\n    characters = '0123456789'\n"
        "    max_response_length = 4\n    def __init__(self, seed):\n        self.problems = list\n"
    )
    checkpoints = with_settings(home, tmp_path / "checkpoints", task={"task": spec})
    assert exported(checkpoints, tmp_path / "out") == 2
    assert f"is that of {spec}, which is code: give --task {spec} if you trust it" in capsys.readouterr().err
    assert exported(checkpoints, tmp_path / "out", "--task=python:other:Task") == 2
    assert not (tmp_path / "it-ran").exists()
    assert exported(checkpoints, tmp_path / "out", f"--task={spec}") == 0
    assert (tmp_path / "it-ran").exists()


FROM = "--load HOME/llama3-checkpoints --save-hf"
REQUESTS = {
    "": "the following arguments are required: --load, --save-hf",
    "--load nowhere --save-hf out": "--load nowhere: no such folder; give the --save of a run",
    f"{FROM} HOME": "is not empty: name another directory",
    f"{FROM} HOME/llama3/config.json": "is a file: name a directory",
    f"{FROM} TMP/out --bf16": "unrecognized arguments: --bf16",
    f"{FROM} TMP/out --ckpt-step=4": "holds no checkpoint 4; there are 3",
    f"{FROM} TMP/out --tokenizer-model=x": "had one token a char",
}


@pytest.mark.parametrize("words", REQUESTS)
def test_requests_that_cannot_work_are_refused(home, tmp_path, capsys, words):
    request = words.replace("HOME", str(home)).replace("TMP", str(tmp_path)).split()
    assert code_of(export.main, *request) in (1, 2)
    assert REQUESTS[words] in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_directory_that_cannot_be_replaced_stays(tmp_path):
    target = tmp_path / "out"
    partial = tmp_path / "partial"
    older = tmp_path / "older"
    target.mkdir()
    (target / "config.json").write_text("old")
    with pytest.raises(FileNotFoundError):
        put_in_place(partial, target, older)
    assert (target / "config.json").read_text() == "old"
    partial.mkdir()
    put_in_place(partial, target, older)
    assert not list(target.iterdir())
    assert (older / "config.json").read_text() == "old"


def test_a_model_without_a_padding_token_stays_without_one(home, tmp_path):
    """Else transformers would never train the row of the token that ends a text."""
    folder = tmp_path / "model"
    shutil.copytree(home / "llama3", folder)
    CharacterText("0123456789").save(folder)
    for path in (folder / "tokenizer_config.json", folder / "config.json"):
        entries = json.loads(path.read_text())
        entries = {name: value for name, value in entries.items() if not name.startswith("pad_token")}
        path.write_text(json.dumps(entries))
    for name, load_hf in (("loaded", str(folder)), ("from-nothing", None)):
        task = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
        checkpoints = with_settings(home, tmp_path / name, task=task, checkpoints={"load_hf": load_hf})
        described(checkpoints, tmp_path / f"{name}-out")
        config = transformers.AutoConfig.from_pretrained(tmp_path / f"{name}-out")
        model = transformers.AutoModelForCausalLM.from_config(config)
        assert (model.config.pad_token_id, model.model.embed_tokens.padding_idx) == (None, None)
        assert model.config.eos_token_id == 1, "as the run had it"
