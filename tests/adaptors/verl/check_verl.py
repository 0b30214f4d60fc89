"""verl's own driver and losses with the adaptor: ``make test-adaptors``, which installs verl 0.9.1."""

import itertools
import os
import re
import subprocess
import sys

import pytest
import torch
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.config.algorithm import RolloutCorrectionConfig as VerlConfig
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.utils import tensordict_utils
from verl.workers.config import ActorConfig
from verl.workers.config.actor import PolicyLossConfig
from verl.workers.utils.losses import ppo_loss

from megatron_rc import RolloutCorrectionConfig, SamplingParams, from_verl, kl_penalty
from megatron_rc.adaptors.check.__main__ import main as check
from megatron_rc.adaptors.check.verl import AGGREGATIONS, SETTINGS
from megatron_rc.adaptors.verl import VerlCorrection
from megatron_rc.doctor.__main__ import main
from megatron_rc.doctor.inputs import read_evidence
from megatron_rc.doctor.report import UNUSABLE
from tests.adaptors.pages import blocks
from tests.settings.test_documents import quoted, rows
from tests.support.paths import ROOT

ROWS = 12
WIDTH = 10


def batch(seed, dtype=torch.float32):
    """(old, rollout, current, advantages, mask) of ragged responses."""
    generator = torch.Generator().manual_seed(seed)
    rollout = -0.2 - 2 * torch.rand(ROWS, WIDTH, generator=generator)
    old, new = ((rollout + 0.4 * torch.randn(ROWS, WIDTH, generator=generator)).clamp(max=0) for _ in range(2))
    lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=generator)
    lengths[0] = WIDTH
    advantages = torch.randn(ROWS, 1, generator=generator).expand(ROWS, WIDTH).contiguous()
    mask = (torch.arange(WIDTH) < lengths).long()
    return *(value.to(dtype) for value in (old, rollout, new, advantages)), mask


def proto(old, rollout, mask):
    tensors = {"old_log_probs": old.clone(), "rollout_log_probs": rollout.clone(), "response_mask": mask.clone()}
    return DataProto.from_dict(tensors, non_tensors={"uid": [f"prompt {row // 4}" for row in range(ROWS)]})


def test_the_command_finds_equality_whole_and_on_shards(capsys):
    assert check(["verl", "--seeds", "2"]) == 0
    *lines, verdict = capsys.readouterr().out.splitlines()
    assert verdict == f"verl and megatron_rc agree in all {len(lines)} results"
    for layout in ("whole batch", "2 context ranks", "2 data ranks"):
        assert sum(f"weights, {layout}" in line for line in lines) == 2 * 3
    assert sum("gradient of the loss" in line for line in lines) == 2 * len(AGGREGATIONS)


def test_the_command_sees_a_verl_that_bounds_weights_otherwise(monkeypatch, capsys):
    """As a later verl might."""
    compute_of_verl = rollout_corr_helper.compute_rollout_correction_and_add_to_batch

    def other(data, settings):
        data, metrics = compute_of_verl(data, settings)
        weights = data.batch.get("rollout_is_weights", None)
        if weights is not None:
            data.batch["rollout_is_weights"] = weights.clamp(max=1.2)
        return data, metrics

    monkeypatch.setattr(rollout_corr_helper, "compute_rollout_correction_and_add_to_batch", other)
    assert check(["verl"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("DIFFERS")]
    assert len(lines) == 9
    assert all(", weights, " in line for line in lines)


def actor(mode, loss_mode, settings=None, **bounds):
    policy_loss = {"loss_mode": loss_mode} | ({} if settings is None else {"rollout_correction": settings})
    return ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=ROWS,
        loss_agg_mode=mode,
        **{"clip_ratio_low": 0.1, "clip_ratio_high": 0.2} | bounds,
        policy_loss=PolicyLossConfig(**policy_loss),
    )


def worker_loss(config, old, new, advantages, mask, weights, dp_size=2):
    """(loss, gradient) by the loss of verl's workers, for any engine, from a model's results."""
    lengths = mask.sum(1)
    prompts = torch.nested.as_nested_tensor([torch.zeros(2, dtype=torch.long)] * ROWS, layout=torch.jagged)

    def ragged(values):
        rows = [row[:length] for row, length in zip(values, lengths.tolist(), strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)

    fields = {"old_log_probs": old, "advantages": advantages, "response_mask": mask, "responses": mask}
    fields |= {} if weights is None else {"rollout_is_weights": weights}
    data = TensorDict({name: ragged(value) for name, value in fields.items()} | {"prompts": prompts}, batch_size=ROWS)
    info = {"dp_size": dp_size, "batch_num_tokens": 2 * int(mask.sum()), "global_batch_size": 2 * ROWS}
    tensordict_utils.assign_non_tensor(data, max_response_len=WIDTH, **info)
    theta = new.clone().requires_grad_()
    # The model's log-probs: the prompt's last position has the response's first token, and so on, and one after.
    rows = [
        torch.cat([row.new_zeros(1), row[:length], row.new_zeros(1)])
        for row, length in zip(theta, lengths.tolist(), strict=True)
    ]
    output = {"log_probs": torch.nested.as_nested_tensor(rows, layout=torch.jagged)}
    loss, metrics = ppo_loss(config, output, data)
    (gradient,) = torch.autograd.grad(loss, theta)
    return loss.detach(), gradient, metrics


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_workers_get_the_loss_of_verls_vanilla(mode):
    old, rollout, new, advantages, mask = batch(1)
    config = RolloutCorrectionConfig.decoupled_token_is(threshold=1.3)
    core_algos.register_policy_loss("rollout_correction")(VerlCorrection(config).policy_loss)
    batch_of_driver, _ = VerlCorrection(config).add_to_batch(proto(old, rollout, mask))
    weights = batch_of_driver.batch["rollout_is_weights"]
    tensors = (old, new, advantages, mask, weights)
    loss, gradient, metrics = worker_loss(actor(mode, "rollout_correction"), *tensors)
    their_loss, their_gradient, their_metrics = worker_loss(actor(mode, "vanilla"), *tensors)
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-5, atol=1e-7)
    assert gradient.norm() > 1e-3
    for name in ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower"):
        got, want = (float(metrics_of_side[name].aggregate()) for metrics_of_side in (metrics, their_metrics))
        assert got == pytest.approx(want, rel=1e-4, abs=1e-6), name


# verl's name and ours, the actor's settings; whether verl counts clipped tokens as we do.
TRUST_REGIONS = {
    "dppo_tv": ("dppo_tv", {"clip_ratio_low": 0.05, "clip_ratio_high": 0.08, "clip_ratio_c": 1.5}, True),
    "dppo_kl": ("dppo_kl", {"clip_ratio_low": 0.02, "clip_ratio_high": 0.03, "clip_ratio_c": 1.5}, True),
    "sapo": ("sapo", {"tau_pos": 1.5, "tau_neg": 2.0}, True),
    "geo_mean": ("gmpo", {"clip_ratio_low": 0.2, "clip_ratio_high": 0.1}, False),
}


@pytest.mark.parametrize("name", TRUST_REGIONS)
def test_workers_get_the_loss_of_verls_trust_regions(name):
    algorithm, settings, counts_alike = TRUST_REGIONS[name]
    correction = VerlCorrection(RolloutCorrectionConfig.disabled(), algorithm=algorithm)
    core_algos.register_policy_loss("rollout_correction")(correction.policy_loss)
    for seed in range(5):
        old, _, new, advantages, mask = batch(seed, torch.float64)
        new[0, :2], old[0, 1:3] = 0.0, 0.0
        # SAPO and GMPO are averaged like this whatever verl is told, and GMPO over the rows at hand.
        outcomes = [
            worker_loss(actor("seq-mean-token-mean", mode, **settings), old, new, advantages, mask, None)
            for mode in ("rollout_correction", name)
        ]
        for got, want in zip(outcomes[0][:2], outcomes[1][:2], strict=True):
            torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-8)
        assert outcomes[0][1].norm() > 1e-3
        shares = [float(outcome[2]["actor/pg_clipfrac"].aggregate()) for outcome in outcomes]
        if counts_alike:
            assert shares[0] == pytest.approx(shares[1], abs=1e-6)
            assert (shares[0] > 0) == name.startswith("dppo")
            lower = [float(outcome[2]["actor/pg_clipfrac_lower"].aggregate()) for outcome in outcomes]
            assert lower[0] == pytest.approx(lower[1], abs=1e-6)
        else:
            assert shares[0] > 0


@pytest.mark.parametrize("loss_type", ["ppo_clip", "reinforce"])
@pytest.mark.parametrize(
    "settings",
    [{"rollout_is": None}, *(one for one in SETTINGS.values() if "rollout_is_batch_normalize" not in one)],
    ids=str,
)
def test_workers_get_the_loss_of_verls_bypass_mode(settings, loss_type, monkeypatch):
    _, rollout, new, advantages, mask = batch(2)
    config = actor("token-mean", "bypass_mode", VerlConfig(**settings, bypass_mode=True, loss_type=loss_type))
    tensors = (rollout, new, advantages, mask, None)
    their_loss, their_gradient, _ = worker_loss(config, *tensors)
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "bypass_mode", VerlCorrection().policy_loss)
    loss, gradient, metrics = worker_loss(config, *tensors)
    torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gradient, their_gradient, rtol=1e-5, atol=1e-7)
    assert "rollout_corr/kl" in metrics


@pytest.mark.parametrize("cells", rows("docs/migrating.md", "`kl_loss_type` | here"), ids=str)
def test_kl_penalties_are_those_that_the_page_says(cells):
    reference, _, current, *_ = batch(0)
    for name, estimator in itertools.product(quoted(cells[0]), quoted(cells[1])):
        names = []
        for penalty in (core_algos.kl_penalty, kl_penalty):
            theta = current.clone().requires_grad_()
            value = penalty(theta, reference, name if penalty is not kl_penalty else estimator)
            value.sum().backward()
            names.append((value.detach(), theta.grad))
        torch.testing.assert_close(names[1], names[0], rtol=1e-5, atol=1e-6)


def readme_module():
    """The module that README shows for verl."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (module,) = re.findall(r"^```python\n(from verl.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    return module


@pytest.mark.parametrize(
    ("module", "criterion"),
    [(blocks("verl")[0], "seq_mean_k1"), (readme_module(), "None")],
    ids=["docs/adaptors.md", "README.md"],
)
def test_the_pages_put_both_into_verl(tmp_path, module, criterion):
    """The module of a page, named by verl's variable, in a separate process."""
    (tmp_path / "my_correction.py").write_text(module, encoding="utf-8")
    code = (
        "import verl\n"
        "from verl.trainer.ppo import core_algos, rollout_corr_helper\n"
        "own = core_algos.get_policy_loss_fn('rollout_correction').__self__\n"
        "assert rollout_corr_helper.compute_rollout_correction_and_add_to_batch.__self__ is own\n"
        "print(own.config and own.config.rollout_rs)"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "VERL_USE_EXTERNAL_MODULES": "my_correction", "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == criterion, done.stderr


def columns(old, rollout, mask):
    """Whole responses with prompts of two to four tokens, padded as in verl, and the record's other columns."""
    width = torch.arange(4) >= 2 - torch.arange(ROWS).unsqueeze(1) % 3
    tokens = torch.arange(1, ROWS * (4 + WIDTH) + 1).view(ROWS, 4 + WIDTH)
    attention = torch.cat([width, mask != 0], dim=1)
    return {
        "prompts": tokens[:, :4] * width,
        "responses": tokens[:, 4:] * mask,
        "attention_mask": attention.long(),
        "response_mask": mask,
        "rollout_log_probs": rollout * mask,
        "old_log_probs": old * mask,
        "rm_scores": mask / mask.sum(1, keepdim=True),
    }


@pytest.mark.parametrize("method", ["torch", "numpy"])
def test_what_verl_saves_becomes_a_record_of_the_doctor(tmp_path, monkeypatch, method):
    """The block of docs/rollouts.md on a file of DataProto.save_to_disk."""
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    monkeypatch.chdir(tmp_path)
    old, rollout, _, _, mask = batch(3)
    tensors = columns(old, rollout, mask)
    uid = [f"prompt {row // 4}" for row in range(ROWS)]
    DataProto.from_dict(tensors, non_tensors={"uid": uid}).save_to_disk("batch.pkl")
    page = (ROOT / "docs" / "rollouts.md").read_text(encoding="utf-8")
    (block,) = [code for code in re.findall(r"^```python\n(.*?)^```", page, flags=re.M | re.S) if "verl" in code]
    exec(compile(block, "docs/rollouts.md", "exec"), {})
    assert main(["batch.pkl"]) == UNUSABLE
    evidence = read_evidence(tmp_path / "step_12.safetensors")
    assert evidence.facts["num_tokens"] == mask.sum()
    kl = ((rollout - old) * mask).sum() / mask.sum()
    assert evidence.facts["kl"] == pytest.approx(float(kl), rel=1e-4)


def test_the_nested_tensors_of_verls_default_trainer_are_records():
    old, rollout, _, _, mask = batch(3)
    padded = columns(old, rollout, mask)
    uid = [f"prompt {row // 4}" for row in range(ROWS)]
    rows_of_column = []
    for row in range(ROWS):
        is_token = padded["attention_mask"][row] != 0
        fields = {name: value[row][is_token[4:]] for name, value in padded.items() if value.shape[1] == WIDTH}
        rows_of_column.append({"prompts": padded["prompts"][row][is_token[:4]], "uid": uid[row], **fields})
    data = tensordict_utils.list_of_dict_to_tensordict(rows_of_column)
    assert data["prompts"].is_nested
    sampling = SamplingParams()
    records = from_verl(data, {"uid": data["uid"].tolist()}, sampling=sampling)
    expected = from_verl(padded, {"uid": uid}, sampling=sampling)
    for name in ("tokens", "response_mask", "rollout_log_probs", "old_log_probs", "group_ids", "rewards"):
        torch.testing.assert_close(getattr(records, name), getattr(expected, name), rtol=0, atol=0)
