"""``megatron-rc attribute``: a checkpoint and recorded rollouts; the engine's weights from each kind of source.

The reference is an attribution of the trainer's own batch in the same process, and autograd through ``transformers``.
"""

import dataclasses
import json

import pytest
import torch
import transformers

from megatron_rc.attribution import attribute, shards_of
from megatron_rc.launch import attribute as command
from megatron_rc.records.formats.jsonl import write_jsonl
from megatron_rc.records.rollout import save_rollouts
from tests.support.commands import code_of
from tests.support.made_rollouts import made_batch
from tests.support.published_models import MODELS, save_random
from tests.support.ranks import Layout
from tests.support.read_back import ReadableServer
from tests.support.recorded_training import COMMON, make_trainer
from tests.support.rollout_servers import running

LAYOUT = Layout(pp=2)
LENGTH = 12
ROWS = 6


def save_two_steps(words, folder):
    """Checkpoints 3 and 5 of a run: the engine's weights, then the trainer's."""
    from megatron_rc.launch.weights.converter import load_model

    trainer = make_trainer([*words, f"--load-hf={folder / 'engine'}"])
    trainer.iteration = 3
    trainer.save()
    load_model(trainer.chunks, trainer.config, trainer.groups, folder / "trainer")
    trainer.optimizer.reload_model_params()
    trainer.iteration = 5
    trainer.save()


def log_probs_of(model, tokens):
    """Log-prob of each token but the first, [n, s - 1]."""
    log_probs = model(tokens).logits[:, :-1].log_softmax(-1)
    return log_probs.gather(2, tokens[:, 1:].unsqueeze(2)).squeeze(2)


def model_of(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def home(tmp_path_factory, ranks):
    """Directories of both models, checkpoints of both by a run on two pipeline stages, and records of the engine."""
    folder = tmp_path_factory.mktemp("attribute")
    save_random(MODELS["llama"], folder / "trainer", seed=1)
    engine = model_of(folder / "trainer")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in engine.parameters():
            weight += 0.01 * torch.randn(weight.shape, generator=generator)
    engine.save_pretrained(folder / "engine")
    arguments = [*COMMON, "--tokenizer-type=CharacterTokenizer", f"--runs-dir={folder}/runs", f"--save={folder}/run"]
    ranks.run(save_two_steps, LAYOUT, [*arguments, *LAYOUT.flags()], folder)

    tokens = torch.randint(2, 30, (ROWS, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) > 3).expand(ROWS, LENGTH) & (torch.rand(ROWS, LENGTH, generator=generator) > 0.2)
    with torch.no_grad():
        sampled = log_probs_of(engine, tokens)
    log_probs = torch.cat([torch.zeros(ROWS, 1), sampled], dim=1)
    versions = torch.full(tokens.shape, 3, dtype=torch.int32)
    batch = made_batch(tokens, mask, log_probs, torch.zeros(ROWS), policy_versions=versions)
    save_rollouts(batch, folder / "records.safetensors")
    write_jsonl([batch], folder / "records.jsonl")
    return folder, batch


def result_of(capsys, *words):
    assert code_of(command.main, *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def reference(home):
    """The parts of both models under Hugging Face's names."""
    folder, batch = home
    trainer = model_of(folder / "trainer")
    engine = model_of(folder / "engine")
    mask = batch.response_mask[:, 1:]

    def score(model):
        return torch.where(mask, log_probs_of(model, batch.tokens), 0.0)

    with torch.no_grad():
        differences = score(trainer) - score(engine)
    weights = {name: weight.detach() for name, weight in engine.named_parameters()}
    result = attribute(
        shards_of(trainer), weights, lambda a: (a * score(trainer)).sum().backward(), differences, nodes=2
    )
    return result.metrics()


@pytest.mark.parametrize(
    ("engine", "records"),
    [("engine", "records.safetensors"), ("run/iter_0000003", "records.jsonl")],
    ids=["directory", "older-checkpoint"],
)
def test_the_parts_are_those_of_autograd_through_transformers(home, capsys, engine, records):
    folder, _ = home
    arguments = ["--load", folder / "run", "--engine-weights", folder / engine, "--attribution-nodes=2"]
    metrics = result_of(capsys, *arguments, folder / records)
    expected = reference(home)
    assert expected["attribution/explained"] == pytest.approx(1, abs=0.2)
    for name, share in expected.items():
        assert metrics[name] == pytest.approx(share, abs=1e-3), name
    assert metrics["attribution/completeness"] == pytest.approx(metrics["attribution/explained"], abs=1e-3)


def test_equal_weights_leave_the_whole_mismatch_to_the_rest(home, capsys):
    """With the engine's own checkpoint as the trainer, and recorded log-probs of the trainer that differ."""
    folder, batch = home
    recorded = dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs - 0.1)
    save_rollouts(recorded, folder / "with-log-probs.safetensors")
    arguments = ["--load", folder / "run", "--ckpt-step=3", "--engine-weights", folder / "engine"]
    metrics = result_of(capsys, *arguments, folder / "with-log-probs.safetensors")
    assert metrics["attribution/explained"] == pytest.approx(0, abs=1e-9)
    assert metrics["attribution/rest"] == pytest.approx(1)


def test_the_checkpoint_scores_the_tokens_whose_log_probs_are_not_recorded(home, capsys):
    """One file has the trainer's log-probs, another has none: together they are as two files without."""
    folder, batch = home
    with torch.no_grad():
        scored = log_probs_of(model_of(folder / "trainer"), batch.tokens)
    recorded = dataclasses.replace(batch, old_log_probs=torch.cat([torch.zeros(ROWS, 1), scored], dim=1))
    save_rollouts(recorded, folder / "recorded.safetensors")
    arguments = [
        "--load",
        folder / "run",
        "--engine-weights",
        folder / "engine",
        "--json",
        folder / "records.safetensors",
    ]

    assert code_of(command.main, *arguments, folder / "recorded.safetensors") == 0
    printed = capsys.readouterr()
    num_tokens = int(batch.response_mask.sum())
    assert f"{num_tokens} of {2 * num_tokens} sampled tokens have no log-prob of the trainer" in printed.err

    assert code_of(command.main, *arguments, folder / "records.safetensors") == 0
    expected = json.loads(capsys.readouterr().out)
    for name, share in json.loads(printed.out).items():
        if name.startswith("attribution/"):
            assert share == pytest.approx(expected[name], abs=1e-4), name


def test_a_rounding_is_that_of_the_flag(home, tmp_path, capsys):
    """Rounded weights of the trainer have parts in the linear layers alone, beside those of bfloat16."""
    folder, _ = home
    arguments = ["--load", folder / "run", "--rollout-dtype=int8", f"--picture={tmp_path}/parts.png"]
    metrics = result_of(capsys, *arguments, folder / "records.jsonl", folder / "records.safetensors")
    assert metrics["attribution/attention"] != 0
    assert (tmp_path / "parts.png").read_bytes().startswith(b"\x89PNG")


STALE = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def stale_server(home):
    """A server with the trainer's weights in bfloat16, but for one projection, which an update left out."""
    folder, _ = home
    weights = {name: weight.detach().bfloat16() for name, weight in model_of(folder / "trainer").named_parameters()}
    weights[STALE] = model_of(folder / "engine").get_parameter(STALE).detach().bfloat16()
    with running(kind=ReadableServer) as server:
        server.weights = weights
        yield server


@pytest.mark.parametrize("engine", ["sglang-server", "vllm-server"])
def test_a_servers_stale_projection_is_all_of_the_excess(home, stale_server, capsys, engine):
    folder, _ = home
    arguments = ["--load", folder / "run", "--rollout-url", stale_server.url, "--rollout-engine", engine]
    arguments += ["--rollout-dtype=bf16", "--attribution-nodes=2"]
    metrics = result_of(capsys, *arguments, folder / "records.jsonl")
    excess = {name: share for name, share in metrics["excess"].items() if share}
    assert excess.keys() == {"decoder.layers.1.mlp.linear_fc2.weight"}
    (name,) = excess
    assert metrics["parts"][name] == pytest.approx(excess[name], rel=0.05), "its rounding is the rest of its part"
    assert metrics["parts"][name] != excess[name]


@pytest.mark.parametrize(
    ("engine", "words"), [("run/iter_0000005", "no excess"), ("run/iter_0000003", "largest excess")]
)
def test_the_excess_of_an_older_checkpoint_in_the_same_format(home, capsys, engine, words):
    folder, _ = home
    flags = ["--load", folder / "run", "--engine-weights", folder / engine, "--rollout-dtype=fp8-e4m3"]
    assert code_of(command.main, *flags, folder / "records.jsonl") == 0
    text = capsys.readouterr().out
    assert words in text
    assert ("the engine's weights are not the trainer's in its format in" in text) == (words == "largest excess")


def test_the_text_names_layers_and_largest_parts(home, capsys):
    folder, _ = home
    arguments = ["--load", folder / "run", "--engine-weights", folder / "engine", "--attribution-nodes=3"]
    assert code_of(command.main, *arguments, folder / "records.jsonl") == 0
    text = capsys.readouterr().out
    assert "half of the mismatch is in the weights of" in text
    assert "decoder.layers." in text


@pytest.mark.parametrize(("engine", "is_noted"), [("run/iter_0000003", False), ("run", True)])
def test_records_of_other_weights_are_noted(home, capsys, engine, is_noted):
    folder, _ = home
    arguments = ["--load", folder / "run", "--engine-weights", folder / engine]
    assert code_of(command.main, *arguments, folder / "records.jsonl") == 0
    assert ("step 3 sampled the records" in capsys.readouterr().err) == is_noted


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--load=nowhere", "--rollout-dtype=int8", "records.jsonl"], 2, "nowhere"),
        (["--load=run", "records.jsonl"], 2, "--engine-weights"),
        (["--load=run", "--rollout-url=http://h:1", "records.jsonl"], 2, "--rollout-engine"),
        (["--load=run", "--rollout-dtype=bf16", "--rollout-engine=vllm-server", "a"], 2, "--rollout-url"),
        (["--load=run", "--rollout-url=h", "--rollout-engine=sglang-server", "records.jsonl"], 2, "'h'"),
        (
            ["--load=run", "--engine-weights=run", "--rollout-url=http://h:1", "--rollout-engine=vllm-server", "a"],
            2,
            "--engine-weights and --rollout-url",
        ),
        (["--load=run", "--rollout-dtype=int8", "--attribution-nodes=0", "records.jsonl"], 2, "--attribution-nodes 0"),
        (["--load=run", "--engine-weights=run/iter_0000004", "records.jsonl"], 2, "iter_0000004"),
        (["--load=run", "--ckpt-step=4", "--rollout-dtype=int8", "records.jsonl"], 1, "4"),
        (["--load=run", "--rollout-dtype=int8", "none.jsonl"], 1, "none.jsonl"),
        (["--load=run", "--rollout-dtype=int8", "empty.jsonl"], 1, "empty.jsonl"),
        (["--load=run", "--rollout-dtype=int8", "no-response.safetensors"], 1, "no-response.safetensors"),
        (["--load=run", "--rollout-dtype=int8", "other-model.safetensors"], 2, "token id 99999"),
        (["--load=run", "--rollout-dtype=int8", "--picture=gone/a.png", "records.jsonl"], 2, "the folder gone"),
        (["--load=run", "--rollout-dtype=int8", "--picture=a.html", "records.jsonl"], 2, "--picture a.html"),
    ],
)
def test_wrong_words_are_told(home, monkeypatch, capsys, words, code, named):
    folder, batch = home
    monkeypatch.chdir(folder)
    (folder / "empty.jsonl").touch()
    without_response = dataclasses.replace(batch, response_mask=torch.zeros_like(batch.response_mask))
    save_rollouts(without_response, folder / "no-response.safetensors")
    of_other_model = dataclasses.replace(batch, tokens=torch.full_like(batch.tokens, 99999))
    save_rollouts(of_other_model, folder / "other-model.safetensors")
    assert code_of(command.main, *words) == code
    assert named in capsys.readouterr().err
