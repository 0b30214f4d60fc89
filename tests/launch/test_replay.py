"""A replay with a model: its angles and lengths are those of the trainer's own gradients."""

import dataclasses
import json

import pytest
import torch

from megatron_rc.launch import replay
from megatron_rc.records.rollout import save_rollouts
from megatron_rc.replay.reading import NamedBatch
from megatron_rc.replay.tokens import recorded
from tests.support.commands import code_of
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch, run_config, save_initial

TRAINED = {
    "own": "rollout_is: token\nrollout_is_threshold: 1.1\nrollout_rs: token_k1\nrollout_rs_threshold: 0.5_1.5\n",
    "disabled": "",
    "bypass_pg_token_icepop": "",
}


def words_of(folder, *more):
    """A run without a correction of its own; the first step on a batch has no ratio to clip."""
    plain = [word for word in flags(folder, *more) if not word.startswith("--rollout-") and "clamp-eps" not in word]
    return [*plain, "--grpo-kl-beta=0", "--grpo-entropy-term-weight=0", "--init-method-std=0.3"]


def gradient(words):
    """(the gradient of all weights of one step on a batch, the batch with log π_old), by the trainer."""
    trainer, batch = make_trainer(words), recorded_batch(0)
    cut = trainer.prepare(batch).batch if not trainer.config.correction.bypass_mode else None
    prepared = trainer.prepare(batch)
    assert trainer.accumulate(prepared, 0) is not None
    (chunk,) = trainer.chunks
    found = torch.cat([parameter.main_grad.flatten().double() for parameter in chunk.parameters()])
    if cut is not None:
        old = torch.nn.functional.pad(cut.local.train_log_probs[:, :-1], (1, 0))
        batch = dataclasses.replace(batch, old_log_probs=torch.where(batch.response_mask, old, torch.nan))
    return found, batch


def run(capsys, *words):
    """(exit code, standard output, standard error) of the command."""
    return code_of(replay.main, *words), *capsys.readouterr()


@pytest.mark.ranks
def test_angles_and_lengths_are_those_of_the_trainers_gradients(ranks, tmp_path, capsys):
    """The checkpoint was written by two ranks that share its matrices, and is read by one process."""
    layout = Layout(tp=2)
    ranks.run(save_initial, layout, [*words_of(tmp_path), f"--save={tmp_path}/ckpt", *layout.flags()])
    (tmp_path / "own.yaml").write_text(TRAINED["own"])
    load = [f"--load={tmp_path}/ckpt", "--finetune"]
    chosen = {
        name: [f"--rollout-correction-config={tmp_path}/own.yaml"] if text else [f"--rollout-correction-preset={name}"]
        for name, text in TRAINED.items()
    }
    found = {
        name: ranks.run(gradient, Layout(), [*words_of(tmp_path), *load, *more])[0] for name, more in chosen.items()
    }
    plain, batch = found["disabled"]
    save_rollouts(batch, tmp_path / "batch.safetensors")
    words = [tmp_path / "batch.safetensors", f"--load={tmp_path}/ckpt", "--micro-batch-size=5", "--json"]
    words += [f"--correction={tmp_path}/own.yaml", "--preset=disabled", "--preset=bypass_pg_token_icepop"]
    code, text, error = run(capsys, *words)
    assert (code, error) == (0, "")
    report = json.loads(text)
    words_of_it = report["gradient_of"]
    assert words_of_it.startswith("gradient of the mean policy loss (clipped at 1 ± 0.2) with GRPO's advantages")
    assert f"with respect to the weights of step 0 of {tmp_path}/ckpt, whose log-probs" in words_of_it
    for one in report["corrections"]:
        vector, _ = found[one["name"]]
        cosine = float(vector @ plain / (vector.norm() * plain.norm()))
        assert one["gradient"]["cosine"] == pytest.approx(cosine, abs=1e-5), one["name"]
        assert one["gradient"]["length"] == pytest.approx(float(vector.norm() / plain.norm()), rel=1e-4)
        assert one["name"] == "disabled" or cosine < 0.99
    assert float(report["gradient_of"].split("log-probs are ")[1].split()[0]) < 1e-5
    # Another model is told by its distance, a smaller one by its words.
    moved = dataclasses.replace(batch, old_log_probs=batch.old_log_probs - 0.5)
    save_rollouts(moved, tmp_path / "batch.safetensors")
    assert "whose log-probs are 0.5 nats from" in run(capsys, *words[:3], "--preset=disabled")[1]
    tokens = torch.where(batch.tokens == 3, 99, batch.tokens)
    save_rollouts(dataclasses.replace(batch, tokens=tokens), tmp_path / "batch.safetensors")
    code, _, error = run(capsys, *words)
    assert code == 2
    assert "has token ids up to 99 in 16 columns, the model of" in error
    assert "knows 13 tokens in 16: give the checkpoints of its own run" in error


REQUESTS = {
    "--load=nowhere": "error: --load nowhere: no such folder; give the --save of a run",
    "--load=. --micro-batch-size=0": "error: --micro-batch-size 0: expected at least 1",
    "": "--load",
    "--load=. --preset=disabled": "batch.safetensors is missing: expected a file of rollouts",
}


def test_requests_that_cannot_work_are_one_sentence(tmp_path, capsys):
    for words, message in REQUESTS.items():
        code, _, error = run(capsys, "batch.safetensors", *words.split())
        assert (code, message in error) == (2, True), words
    batch = recorded_batch(0)
    save_rollouts(dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs), tmp_path / "batch.safetensors")
    code, _, error = run(capsys, tmp_path / "batch.safetensors", f"--load={tmp_path}", "--preset=disabled")
    assert (code, str(tmp_path) in error, error.count("\n")) == (2, True, 1), "a folder without checkpoints"


def test_other_advantages_of_the_run_are_said(tmp_path):
    assert replay._otherwise(run_config(flags(tmp_path))) == ""
    config = run_config(flags(tmp_path, "--advantage-estimator=rloo", "--reward-clip=2"))
    expected = "; the run's advantages were other ones: --advantage-estimator rloo, --reward-clip 2.0"
    assert replay._otherwise(config) == expected


def test_a_mixture_of_experts_is_refused(tmp_path):
    batch = recorded_batch(0)
    data = recorded([NamedBatch("a", dataclasses.replace(batch, old_log_probs=batch.rollout_log_probs))])
    config = run_config([*flags(tmp_path), "--num-experts=4", "--moe-ffn-hidden-size=24"])
    with pytest.raises(ValueError, match="the gradient of a mixture of experts is not measured: leave --load out"):
        replay._check(data, config, tmp_path)
