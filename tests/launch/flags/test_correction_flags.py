"""The correction that flags make of the launch file ``count_up``, which has a preset and a criterion of its own."""

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.ranks import Outcome
from megatron_rc.settings.config import RolloutCorrectionConfig
from tests.support.recorded_training import flags, run_config

WEIGHTS = {"rollout_is": "token", "rollout_is_threshold": 2.0}
FILE = {**WEIGHTS, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.9_1.1"}


def checked_alone(tmp_path, *words):
    """A run that no launch file says anything of."""
    return run_config(flags(tmp_path, *words))


def checked(tmp_path, *words):
    """A run of ``count_up`` with these flags."""
    return run_config(["--config=count_up", f"--runs-dir={tmp_path}", *words], 4)


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", FILE),
        ("--policy-loss cispo --rollout-rs none", WEIGHTS),
        ("--rollout-is none", {**FILE, "rollout_is": None, "rollout_is_threshold": None}),
        ("--proximal-interpolation", {**FILE, "proximal_interpolation": True}),
        (
            "--rollout-correction-preset disabled --rollout-is-apply --bad-log-probs reject_token",
            {**WEIGHTS, "bad_log_probs": "reject_token"},
        ),
    ],
)
def test_flags_override_the_launch_files_correction(tmp_path, words, fields):
    config = checked(tmp_path, *words.split())
    assert config.correction == RolloutCorrectionConfig(**fields)
    assert config.loss.algorithm == ("cispo" if "cispo" in words else "ppo_clip")


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("--rollout-correction-preset=disabled", ""),
        ("--rollout-correction-preset=disabled --rollout-is=token --rollout-is-apply", ""),
        ("--rollout-is=sequence --rollout-is-threshold=3 --no-rollout-is-apply", ""),
        ("--rollout-correction-preset=disabled --rollout-is=token", "--rollout-is token | the preset disabled"),
        (
            "--rollout-correction-preset=disabled --rollout-is-threshold=3 --rollout-token-veto-threshold=1e-4",
            "--rollout-is-threshold 3 | --rollout-token-veto-threshold 0.0001 | the preset disabled",
        ),
        ("--rollout-correction-config=FILE --rollout-is=sequence", "--rollout-is sequence | the file FILE"),
    ],
)
def test_weights_that_a_preset_only_measures_are_said(tmp_path, caplog, words, named):
    (tmp_path / "measured.yaml").write_text("rollout_is: token\nrollout_is_threshold: 2.0\nrollout_is_apply: false\n")
    path = str(tmp_path / "measured.yaml")
    checked(tmp_path, *words.replace("FILE", path).split())
    lines = [record.message for record in caplog.records if "only measured" in record.message]
    assert len(lines) == bool(named)
    assert all(part in lines[0] for part in named.replace("FILE", path).split(" | ") if part)
    assert not lines or "--rollout-is-apply" in lines[0]


IN_THE_LOSS = [
    ("--rollout-correction-preset=bypass_pg_is", "--rollout-is-batch-normalize"),
    ("--rollout-is-batch-normalize", "--proximal-interpolation", "--rollout-staleness=4"),
]


@pytest.mark.parametrize("words", IN_THE_LOSS, ids=["bypass", "proximal"])
def test_penalties_that_were_not_given_are_none_beside_batch_normalisation_in_the_loss(tmp_path, words, caplog):
    """Given ones are refused there; elsewhere they have Megatron's defaults."""
    config = checked_alone(tmp_path, *words)
    assert (config.loss.kl_coef, config.loss.entropy_coef) == (0.0, 0.0)
    (message,) = [record.message for record in caplog.records]
    assert all(part in message for part in ("--grpo-kl-beta", "0.001", "--rollout-is-batch-normalize"))
    for given in ("--grpo-kl-beta=0.001", "--grpo-entropy-term-weight=0.04"):
        with pytest.raises(ConfigurationError, match="rollout_is_batch_normalize=True"):
            checked_alone(tmp_path, *words, given)
    for others in ((), ("--rollout-is-batch-normalize",), ("--rollout-correction-preset=bypass_pg_is",)):
        config = checked_alone(tmp_path, *others)
        assert (config.loss.kl_coef, config.loss.entropy_coef) == (0.001, 0.0)


def slimes_settings(tmp_path):
    """Flags that name a file of slime whose correction is switched off."""
    path = tmp_path / "mis.yaml"
    path.write_text("use_tis: false\nuse_rs: true\nrs_level: geometric\nrs_upper_bound: 1.001\n")
    return f"--rollout-correction-config={path}", "--rollout-correction-dialect=slime"


def test_notes_of_a_translation_are_lines_of_rank_0(tmp_path, caplog):
    config = checked_alone(tmp_path, *slimes_settings(tmp_path), "--bad-log-probs=reject_token")
    lines = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert lines == list(config.correction.notes)
    assert any("use_rs=True dropped: slime does nothing" in line for line in lines)


@pytest.mark.parametrize("has_notes", [False, True])
def test_lines_of_rank_0_are_not_the_launchers(tmp_path, monkeypatch, caplog, has_notes):
    monkeypatch.setattr("megatron_rc.launch.__main__.run_ranks", lambda words: Outcome(0))
    words = slimes_settings(tmp_path) if has_notes else IN_THE_LOSS[0]
    with pytest.raises(SystemExit):
        main(flags(tmp_path, *words))
    assert not caplog.records
