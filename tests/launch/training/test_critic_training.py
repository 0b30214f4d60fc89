"""A run with a critic: what its steps change, what a checkpoint keeps of it, and what a bad step leaves alone."""

import dataclasses
import gc

import pytest
import torch

from megatron_rc.launch.training.checks.step_checks import BadStepError
from tests.support.documented import undocumented
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, refusal, share
from tests.support.training_runs import agreed, equal, rows, run_training, weights_of

POLICY = ["--num-layers=2", "--micro-batch-size=8", "--lr=1e-3", "--grpo-kl-beta=0"]
PPO = [*POLICY, "--advantage-estimator=gae", "--critic-lr=2e-3"]


def both(trainer):
    return weights_of(trainer.chunks), weights_of(trainer.critic.chunks)


def step(trainer, index):
    return trainer.update(trainer.prepare(share(trainer, index)), 0).metrics


def train(words, begin, end, save_at=None):
    """Metrics of the steps from ``begin`` to ``end``; after ``save_at`` steps a checkpoint is written."""
    trainer = make_trainer(words)
    results = []
    assert trainer.iteration == begin
    for index in range(begin, end):
        results.append(step(trainer, index))
        if trainer.iteration == save_at:
            trainer.save()
    return results


def test_the_loop_trains_both_and_reports_it(ranks, tmp_path):
    arguments = ["--config=count_up_ppo", f"--runs-dir={tmp_path}", "--run-name=run", "--cpu", "--train-iters=2"]
    arguments += ["--tensor-model-parallel-size=1", "--pipeline-model-parallel-size=1", "--no-sequence-parallel"]
    arguments += ["--grpo-prompts-per-step=8", "--global-batch-size=8", "--micro-batch-size=8", "--value-clip=0.2"]
    assert ranks.run(run_training, Layout(), arguments) == [None]
    results = rows(tmp_path)
    assert [row["step"] for row in results] == [1, 2]
    names = {name for row in results for name in row if "critic" in name}
    assert {"loss/critic", "critic/lr", "critic/grad_norm", "critic/explained_variance"} <= names
    assert undocumented(names) == []
    assert 0 < results[0]["reward/nonzero_advantages"] <= 1


DISTRIBUTED = ["--use-distributed-optimizer"]


DECAYING = ["--critic-lr-decay-style=linear", "--critic-min-lr=1e-4", "--critic-lr-warmup-iters=1"]


def test_a_run_goes_on_in_any_layout(ranks, tmp_path):
    """In the same layout to the last digit; the second step after a checkpoint shows Adam's moments."""
    before = Layout(dp=2)
    after = Layout(pp=2)
    arguments = flags(tmp_path, *PPO, *DECAYING, "--lr-decay-iters=10", *DISTRIBUTED, f"--save={tmp_path}/save")
    whole = ranks.run(train, before, [*arguments, *before.flags()], 0, 3, 1)[0]
    decaying = [0.0, *(2e-3 - step * (2e-3 - 1e-4) / 9 for step in range(2))]
    assert [step["critic/lr"] for step in whole] == pytest.approx(decaying)
    assert [step["lr"] for step in whole] == [1e-3] * 3, "the policy has a schedule of its own"
    arguments += [f"--load={tmp_path}/save"]
    assert ranks.run(train, before, [*arguments, *before.flags()], 1, 3)[0] == whole[1:]
    (second, third), *_ = ranks.run(train, after, [*arguments, *after.flags()], 1, 3)
    assert second == pytest.approx(whole[1], rel=1e-4, abs=1e-4)
    assert third == pytest.approx(whole[2], rel=1e-3, abs=1e-3)


def bytes_alive():
    """Of all storages that a tensor of this process has."""
    gc.collect()
    tensors = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), torch.Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors)
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def train_away(part, words, begin, end, save_at=None):
    """Metrics of the steps, and bytes of a part on the device for each parameter, by its presence and absence.

    A checkpoint is written in the background while the part comes and goes.
    """
    trainer = make_trainer(words)
    results = []
    ratios = []
    for index in range(begin, end):
        if index == save_at:
            trainer.save()
            assert trainer.writer.pending is not None
        results.append(step(trainer, index))
        trainer.writer.finish()  # else its copies would be counted
        away = bytes_alive()
        with trainer.critic.here() if part == "critic" else trainer.optimizer_here():
            chunks = trainer.critic.chunks if part == "critic" else trainer.chunks
            parameters = sum(weight.numel() for chunk in chunks for weight in chunk.parameters())
            ratios.append((bytes_alive() - away) / parameters)
    return results, ratios


OVERLAPPING = ["--overlap-grad-reduce", "--overlap-param-gather"]


SHARED = ["--bf16", *DISTRIBUTED, *OVERLAPPING]
# The part, its flag, and the bytes of a parameter: weights, gradients and states of a critic, or states alone.
AWAY = {
    "critic-bf16-distributed-overlapping-dp2": ("critic", SHARED, Layout(dp=2), 2 + 4 + 12 / 2),
    "optimizer-pp2": ("optimizer", [], Layout(pp=2), 8),
}


@pytest.mark.parametrize(("part", "more", "layout", "each"), AWAY.values(), ids=AWAY)
def test_what_waits_in_host_memory_leaves_nothing_and_changes_no_number(ranks, tmp_path, part, more, layout, each):
    """Three steps, with a checkpoint after the first and from it; the last one shows the moments that came back."""
    algorithm = PPO if part == "critic" else [*POLICY, "--advantage-estimator=rloo"]
    arguments = flags(tmp_path, *algorithm, *more, *layout.flags())
    stayed = ranks.run(train, layout, arguments, 0, 3)
    files = [f"--save={tmp_path}/save", f"--load={tmp_path}/save", "--async-save", "--save-interval=2"]
    for steps, begin, save_at in ((slice(0, 3), 0, 1), (slice(1, 3), 1, None)):
        went = ranks.run(train_away, layout, part, [*arguments, f"--{part}-offload", *files], begin, 3, save_at)
        for metrics_of_stayed, (metrics, ratios) in zip(stayed, went, strict=True):
            assert metrics == metrics_of_stayed[steps]
            assert ratios == [pytest.approx(each, rel=0.02)] * len(ratios)


def critic_only(words):
    """Whether the policy and the critic have changed after each of two steps, and the metrics of these."""
    trainer = make_trainer(words)
    results = []
    for index in range(2):
        policy, critic = both(trainer)
        metrics = step(trainer, index)
        now = both(trainer)
        times = trainer.passes.timers.metrics()
        results.append((equal(policy, now[0]), equal(critic, now[1]), metrics | times))
    return results


def test_first_the_critic_learns_alone(ranks, tmp_path):
    arguments = flags(tmp_path, *PPO, "--num-critic-only-steps=1", "--grpo-iterations=1")
    arguments += ["--log-timers-to-tensorboard", "--timing-log-level=1"]
    alone, together = ranks.run(critic_only, Layout(), arguments)[0]
    assert alone[:2] == (True, False)
    assert together[:2] == (False, False)
    assert {"loss/critic", "forward-backward-time", "optimizer-time"} <= alone[2].keys()
    assert not {"loss/total", "grad_norm"} & alone[2].keys()
    assert {"loss/total", "loss/critic", "critic/lr", "critic/grad_norm", "grad_norm"} <= together[2].keys()


@pytest.mark.parametrize("values", ["none", "mask"])
def test_where_all_is_rejected_the_critic_steps_unless_its_loss_is_masked_too(ranks, tmp_path, values):
    arguments = flags(tmp_path, *PPO, "--rollout-rs=token_k1", "--rollout-rs-threshold=0.99999_1.00001")
    arguments += [f"--correct-values={values}", "--grpo-iterations=1"]
    (policy_stays, critic_stays, _), _ = ranks.run(critic_only, Layout(), arguments)[0]
    assert policy_stays
    assert critic_stays == (values == "mask")


def start_elsewhere(words, folder):
    """The layers of another policy's critic and of one that starts from its directory, and whether they are its own."""
    from safetensors.torch import save_file

    from megatron_rc.launch.weights.converter import described_model, export_model

    elsewhere = make_trainer([*words, "--seed=5"])
    # With one seed the critic's layers are drawn like the policy's: these must differ from what was drawn.
    with torch.no_grad():
        for weight in (weight for chunk in elsewhere.chunks for weight in chunk.parameters()):
            weight.mul_(1.5)
    elsewhere.critic.start_from(elsewhere.chunks)
    tensors = dict(export_model(elsewhere.chunks, elsewhere.config, elsewhere.groups))
    if torch.distributed.get_rank() == 0:
        # Without TP some are parts of one tensor, which the file's writer refuses.
        copies = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
        save_file(copies, f"{folder}/model.safetensors")
        described_model(elsewhere.config).save_pretrained(folder)
    torch.distributed.barrier()
    trainer = make_trainer([*words, f"--critic-load-hf={folder}"])
    layers = []
    for critic in (elsewhere.critic, trainer.critic):
        for critics_chunk, policys_chunk in zip(critic.chunks, elsewhere.chunks, strict=True):
            weights_of_policy = dict(policys_chunk.named_parameters())
            for name, weight in critics_chunk.named_parameters():
                if name.startswith("output_layer"):
                    continue
                # Of the embeddings on each rank at least five rows are no padding, which a directory does not hold.
                rows = slice(5) if "embedding" in name else slice(None)
                layers.append((name, torch.equal(weight[rows], weights_of_policy[name][rows])))
    same = equal(weights_of(trainer.chunks), weights_of(elsewhere.chunks))
    return layers, same, trainer.critic.optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("layout", "more"),
    [(Layout(tp=2), []), (Layout(pp=2), []), (Layout(pp=2), ["--untie-embeddings-and-output-weights"])],
    ids=["tied-tp2", "tied-pp2", "untied-pp2"],
)
def test_a_critic_starts_from_the_policy_or_from_another_model(ranks, tmp_path, layout, more):
    arguments = flags(tmp_path, *PPO, *more, *layout.flags())
    for layers, same, rate in ranks.run(start_elsewhere, layout, arguments, tmp_path):
        assert not same
        assert rate == 2e-3
        assert len(layers) > 8
        assert [name for name, is_theirs in layers if not is_theirs] == []


def test_a_checkpoint_without_a_critic_is_refused_or_finetuned(ranks, tmp_path):
    arguments = flags(tmp_path, *POLICY, f"--save={tmp_path}/save")
    assert len(ranks.run(train, Layout(), arguments, 0, 1, 1)[0]) == 1
    (message,) = ranks.run(refusal, Layout(), flags(tmp_path, *PPO, f"--load={tmp_path}/save"))
    assert "checkpoint 1 was written without a critic: give another --advantage-estimator than gae, or" in message
    assert len(ranks.run(train, Layout(), flags(tmp_path, *PPO, f"--load={tmp_path}/save", "--finetune"), 0, 1)[0]) == 1
    # So is another learning rate of the critic.
    arguments = flags(tmp_path, *PPO, f"--save={tmp_path}/critic")
    ranks.run(train, Layout(), arguments, 0, 1, 1)
    (message,) = ranks.run(refusal, Layout(), [*arguments, f"--load={tmp_path}/critic", "--critic-lr=5e-3"])
    assert "checkpoint 1: " in message
    assert "value 0.005 and checkpointvalue 0.002 for learning rate do not match" in message


def step_without_signal(words):
    """Which of the two models a step changes whose policy gradient is 0, and the metrics of that step."""
    trainer = make_trainer(words)
    prepared = dataclasses.replace(trainer.prepare(share(trainer, 0)), without_signal=frozenset({0}))
    before = both(trainer)
    metrics = trainer.update(prepared, 0).metrics
    after = both(trainer)
    changed = [not equal(weights, new_weights) for weights, new_weights in zip(before, after, strict=True)]
    return changed, metrics


def test_a_step_without_signal_trains_the_critic_alone(ranks, tmp_path):
    for changed, metrics in ranks.run(step_without_signal, Layout(pp=2), flags(tmp_path, *PPO, *Layout(pp=2).flags())):
        assert changed == [False, True]
        assert metrics["steps_without_signal"] == 1
        assert "critic/grad_norm" in metrics
        assert "grad_norm" not in metrics


def spoil(words):
    """What each bad step raises and whether it has left both models as they were; then what saving a ruin raises."""
    trainer = make_trainer(words)
    results = {}
    checks = trainer.critic.checks
    for part in ("spiky", "large", "critic", "policy"):
        prepared = trainer.prepare(share(trainer, 0))
        before = both(trainer)
        # As after many steps with losses and gradients of next to nothing.
        checks.losses.count = 100 * (part == "spiky")
        checks.losses.largest = 1e-9
        checks.gradients.count = 100 * (part == "large")
        checks.gradients.largest = 1e-9
        if trainer.groups.is_last_stage and part in ("critic", "policy"):
            local = prepared.values.batch.local if part == "critic" else prepared.batch.local
            (local.returns if part == "critic" else local.advantages).fill_(torch.inf)
        with pytest.raises(BadStepError) as error:
            trainer.update(prepared, 0)
        now = both(trainer)
        results[part] = str(error.value), equal(before[0], now[0]), equal(before[1], now[1])
    trainer.critic.chunks[0].decoder.layers[0].mlp.linear_fc1.weight.data.fill_(torch.nan)
    with pytest.raises(RuntimeError) as error:
        trainer.save()
    return results, str(error.value)


def test_a_bad_step_changes_neither_model_and_says_whose_it_was(ranks, tmp_path):
    arguments = flags(tmp_path, *PPO, *Layout(pp=2).flags(), "--check-for-spiky-loss", "--check-for-large-grads")
    results, saved = agreed(ranks.run(spoil, Layout(pp=2), [*arguments, f"--save={tmp_path}/save"]))
    assert {part: unchanged for part, (_, *unchanged) in results.items()} == {part: [True, True] for part in results}
    messages = {part: message for part, (message, *_) in results.items()}
    assert messages["spiky"].startswith("the critic's loss of step 1 is")
    assert "(--check-for-spiky-loss): the step was not made; lower --critic-lr" in messages["spiky"]
    assert messages["large"].startswith("the critic's gradient norm of step 1 is")
    assert "(--check-for-large-grads): the step was not made; lower --critic-lr" in messages["large"]
    assert messages["critic"].startswith("the critic's loss of step 1 is")
    assert messages["policy"].startswith("the loss of step 1 is")
    assert saved.startswith("the critic's weight decoder.layers.0.mlp.linear_fc1.weight is not finite after step 0")
    assert saved.endswith("with a lower --critic-lr")
