"""The reference policy waits in host memory, follows the policy, or is another model."""

import pytest
import torch
import transformers
from safetensors.torch import load_file

from megatron_rc.launch.errors import ConfigurationError
from tests.support.live import storages_of
from tests.support.published_models import ATTENTION_YARN, DYNAMIC, LINEAR, MODELS, changed, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, refusal, run_config, save_initial, share
from tests.support.training_runs import agreed, equal, run_training, weights_of

KL = ["--grpo-kl-beta=0.1", "--kl-estimator=k2"]


def batches(trainer, numbers):
    """Two optimizer steps on each recorded batch: metrics, and whether the reference is what it was before."""
    results = []
    for number in numbers:
        before = weights_of(trainer.reference.chunks)
        policy = weights_of(trainer.chunks)
        prepared = trainer.prepare(share(trainer, number))
        now = weights_of(trainer.reference.chunks)
        kind = "kept" if equal(now, before) else "the policy" if equal(now, policy) else "other"
        assert equal(weights_of(trainer.chunks), policy), "the policy has its own weights again"
        results += [(kind, trainer.update(prepared, 0).metrics) for _ in range(2)]
    return results


def refreshed(words, numbers):
    trainer = make_trainer(words)
    results = batches(trainer, numbers)
    if trainer.config.checkpoints.save:
        trainer.save()
    return results


def test_it_follows_the_policy_by_steps_and_over_a_restart(ranks, tmp_path):
    """Two steps a batch: at an interval of four, the third batch is compared with the policy before it."""
    layout = Layout(dp=2)
    more = ["--num-layers=2", "--bf16", "--use-distributed-optimizer"]
    arguments = flags(tmp_path, *KL, *layout.flags(), *more, "--lr=1e-3", "--ref-update-interval=4")
    save = [f"--save={tmp_path}/save", f"--load={tmp_path}/save"]
    whole = ranks.run(refreshed, layout, arguments, range(4))
    parts = zip(
        *(ranks.run(refreshed, layout, [*arguments, *save], numbers) for numbers in ([0, 1, 2], [3])), strict=True
    )
    for straight, broken in zip(whole, parts, strict=True):
        assert [kind for kind, _ in straight] == ["kept"] * 4 + ["the policy"] * 2 + ["kept"] * 2
        assert [step for part in broken for step in part] == straight, "to the last digit"
    distances = [step["policy/reference_kl"] for _, step in whole[0]]
    assert distances[0] == distances[4] == 0
    assert min(distances[1:4] + distances[5:]) > 0


def own_directory(words, more):
    """(the reference policy's own weights, the policy's), by Hugging Face's names."""
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer([*words, *more])
    results = []
    with trainer.reference.in_place_of(trainer.chunks):
        results.append(dict(export_model(trainer.chunks, trainer.config, trainer.groups)))
    return [*results, dict(export_model(trainer.chunks, trainer.config, trainer.groups))]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Two random models of one architecture."""
    folders = []
    for seed in range(2):
        torch.manual_seed(seed)
        folders.append(tmp_path_factory.mktemp(f"model{seed}"))
        transformers.AutoModelForCausalLM.from_config(MODELS["qwen3"]).save_pretrained(folders[-1])
    return folders


def test_it_has_a_directory_of_its_own(ranks, tmp_path, published):
    """Of Hugging Face's form, or checkpoints of another layout; the policy begins from another one."""
    layout = Layout(tp=2)
    saved = Layout(pp=2)
    ranks.run(save_initial, saved, [*words_of(published[1], saved), f"--save={tmp_path}/other"])
    policy, other = (load_file(folder / "model.safetensors") for folder in published)
    for own in (f"--ref-load-hf={published[1]}", f"--ref-load={tmp_path}/other"):
        results = ranks.run(own_directory, layout, words_of(published[0], layout), [*KL, own])
        for got, want in zip(results[0], (other, policy), strict=True):
            assert got.keys() == want.keys()
            assert [name for name in want if not torch.equal(got[name], want[name])] == []


def test_finetuning_compares_with_the_weights_it_starts_from_or_with_the_other_ones(ranks, tmp_path, published):
    start = published[0]
    layout = Layout()
    arguments = words_of(start, layout, *KL)
    ranks.run(refreshed, layout, [*arguments, f"--save={tmp_path}/save", "--lr=1e-3"], [0])
    arguments += [f"--load={tmp_path}/save", "--finetune"]
    for own, distant in (([], False), ([f"--ref-load-hf={published[1]}"], True)):
        ((_, first), *_) = ranks.run(refreshed, layout, [*arguments, *own], [0])[0]
        assert (first["policy/reference_kl"] > 0) == distant


def test_a_checkpoint_has_its_reference_policy_still(ranks, tmp_path, published):
    arguments = words_of(published[0], Layout(dp=2), *KL, "--rollout-engine=transformers", "--train-iters=2")
    ranks.run(refreshed, Layout(dp=2), [*arguments, f"--save={tmp_path}/save"], [0])
    message = agreed(
        ranks.run(run_training, Layout(dp=2), [*arguments, f"--load={tmp_path}/save", f"--ref-load-hf={published[1]}"])
    )
    assert f"--ref-load-hf {published[1]} would do nothing; drop it, or give --finetune" in message


def test_a_checkpoint_whose_weights_fit_another_function_is_refused(ranks, tmp_path):
    arguments = flags(tmp_path, *KL)
    ranks.run(save_initial, Layout(), [*arguments, f"--save={tmp_path}/save"])
    for load in (["--ref-load"], ["--load"], ["--finetune", "--load"]):
        words_of_load = [*load[:-1], f"{load[-1]}={tmp_path}/save"]
        (message,) = ranks.run(refusal, Layout(), [*arguments, "--norm-epsilon=1e-3", *words_of_load])
        assert f"{load[-1]} {tmp_path}/save: checkpoint 0 is of another architecture than" in message
        assert "the policy (--norm-epsilon 0.001; it was written with 1e-05" in message


def bytes_while_it_is_compared(words):
    """(bytes of all weights outside the pass, in it, the most that the exchange made, of the largest weight)."""
    from megatron_rc.launch.training.models.offload import exchanged
    from tests.support.live_bytes import LiveBytes

    trainer = make_trainer(words)
    both = [*trainer.chunks, *trainer.reference.chunks]
    own, other = (weights_of(chunks) for chunks in (trainer.chunks, trainer.reference.chunks))
    with torch.no_grad():
        for weight in trainer.reference.chunks[0].parameters():
            weight.add_(1)
    outside = storages_of(both)
    with exchanged(trainer.chunks, trainer.reference.chunks):
        assert equal(weights_of(trainer.reference.chunks), own)
        assert not any(map(torch.equal, weights_of(trainer.chunks), other))
    assert equal(weights_of(trainer.chunks), own)
    with LiveBytes() as live, exchanged(trainer.chunks, trainer.reference.chunks):
        inside = storages_of(both)
    return outside, inside, live.peak, max(weight.nbytes for weight in own)


def test_no_second_model_comes_into_being(ranks, tmp_path):
    """The exchange needs one weight beside the two models, of which one is in host memory."""
    outside, inside, most, largest = ranks.run(bytes_while_it_is_compared, Layout(), flags(tmp_path, *KL))[0]
    assert outside == inside
    assert 0 < most <= largest


# Settings of the policy's file, settings of the other file, and parts of the error. Tensors have equal shapes.
OTHER_FUNCTIONS = {
    "linear-rope": ("llama", {"rope_parameters": LINEAR}, {}, r"without --rotary-seq-len-interpolation-factor, "),
    "dynamic-rope": ("llama", {}, {"rope_parameters": DYNAMIC}, r"--rope-dynamic-factor 3"),
    "no-rope-layers": ("smollm3", {}, {"no_rope_layers": [1, 1, 1, 1]}, r"without --no-rope-freq, "),
    "window": ("mistral", {}, {"sliding_window": 8}, "reaches 8 tokens"),
    "epsilon": ("llama", {"rms_norm_eps": 1e-4}, {}, r"--norm-epsilon 1e-06.* 0\.0001"),
    "yarn": (
        "llama-yarn",
        {},
        {"rope_parameters": ATTENTION_YARN | {"attention_factor": None}},
        r"without --yarn-attention-factor, .* 1\.25",
    ),
}


def described(name, folder, change):
    """A directory with the ``config.json`` of a published model, with changes."""
    folder.mkdir()
    MODELS[name].save_pretrained(folder)
    return changed(folder, folder, change)


@pytest.mark.parametrize(
    ("flag", "more"),
    [("--ref-load-hf", KL), ("--critic-load-hf", ["--advantage-estimator=gae"])],
    ids=["reference", "critic"],
)
@pytest.mark.parametrize(("name", "change", "other_change", "message"), OTHER_FUNCTIONS.values(), ids=OTHER_FUNCTIONS)
def test_a_directory_of_another_function_is_refused(tmp_path, flag, more, name, change, other_change, message):
    policy = described(name, tmp_path / "policy", change)
    other = described(name, tmp_path / "other", other_change)
    arguments = words_of(policy, Layout(), *more)
    with pytest.raises(ConfigurationError, match=rf"^{flag} {other} .*{message}"):
        run_config([*arguments, f"{flag}={other}"], engine=False)
    config = run_config([*arguments, f"{flag}={described(name, tmp_path / 'equal', change)}"], engine=False)
    assert config.model.hf_model_type == MODELS[name].model_type


def test_another_architecture_is_refused(tmp_path, published):
    other = changed(published[1], tmp_path, {"num_hidden_layers": 2})
    with pytest.raises(ConfigurationError, match=r"--num-layers 2.* 4"):
        run_config(words_of(published[0], Layout(), *KL, f"--ref-load-hf={other}"), engine=False)
