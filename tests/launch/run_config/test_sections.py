"""A run's settings: declared once, typed, frozen, and under Megatron's names where they go into its dataclasses."""

import dataclasses
from collections import Counter
from typing import Literal

import pytest

from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.megatron import (
    ComputeSection,
    ExpertSection,
    OptimizerSection,
    ParallelSection,
    TransformerSection,
)
from megatron_rc.launch.run_config.options import option, options_of, out_of_range, values_of
from tests.support.paths import ROOT
from tests.support.recorded_training import LLAMA, flags, run_config


def test_no_flag_and_no_field_is_declared_twice_and_every_number_has_a_sign():
    options = [one for _, section, _ in sections_of(RunConfig) for one in options_of(section)]
    assert max(Counter(one.flag for one in options).values()) == 1
    fields = [field.name for _, section, _ in sections_of(RunConfig) for field in dataclasses.fields(section)]
    assert max(Counter(fields).values()) == 1
    assert all(one.help for one in options)
    numbers = [one for one in options if one.kind in (int, float)]
    assert len(numbers) > 80
    assert {one.field for one in numbers if not (one.positive or one.not_negative)} == OF_ANY_SIGN
    assert {one.field for one in numbers if one.not_negative} == NOT_NEGATIVE
    for one in numbers:
        misses = [out_of_range(one, value) for value in (0, -1, float("nan"), float("inf"))]
        wanted = "must be positive" if one.positive else "must be 0 or more" if one.not_negative else ""
        assert misses == [wanted * one.positive, *[wanted] * 3], one.field
        # Whole numbers that no run has would fill the memory before another check finds them.
        if one.kind is int:
            assert out_of_range(one, 10**19), one.field
            assert not out_of_range(one, one.most if isinstance(one.most, int) else 10**15), one.field


def test_what_is_called_megatrons_is_there():
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    for section in (ParallelSection, TransformerSection, ExpertSection, ComputeSection):
        assert {field.name for field in dataclasses.fields(section)} <= vars(TransformerConfig)[
            "__dataclass_fields__"
        ].keys()
    assert {field.name for field in dataclasses.fields(OptimizerSection)} <= vars(OptimizerConfig)[
        "__dataclass_fields__"
    ].keys()


def test_settings_reach_megatron_unchanged(tmp_path):
    from megatron_rc.launch.run_config.megatron_configs import build_transformer_config

    words = ("--num-experts=4", "--moe-z-loss-coeff=0.1", "--norm-epsilon=1e-6", "--recompute-granularity=selective")
    config = run_config(flags(tmp_path, *words, model=LLAMA), engine=False)
    built = vars(build_transformer_config(config))
    for section in (config.parallel, config.transformer, config.compute, config.experts):
        wanted = values_of(section)
        if "moe_layer_freq" in wanted:
            wanted["moe_layer_freq"] = 1  # a pattern that Megatron-LM's parser would have read
        assert {name: built[name] for name in wanted} == wanted


def test_every_whole_number_has_a_bound():
    counted = [one for _, section, _ in sections_of(RunConfig) for one in options_of(section) if one.kind is int]
    assert len(counted) > 60
    assert [one.field for one in counted if not out_of_range(one, 10**19)] == []


def test_nothing_can_be_written_to_it(tmp_path):
    config = run_config(flags(tmp_path))
    for _, section in [(None, config), *[(name, getattr(config, name)) for name, *_ in sections_of(RunConfig)]]:
        if section is not None:
            name = dataclasses.fields(section)[0].name
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(section, name, getattr(section, name))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """A section with one field of each kind."""

    width: int = option("how wide", required=True)
    rate: float | None = option("how fast")
    shape: Literal["round", "square"] = option("of what form", default="round", flag="form")
    plain: bool = option("without decoration", flag="decorated", inverted=True)
    follows: int


def test_the_flag_follows_from_the_field():
    width, rate, shape, plain = options_of(Example)
    assert (width.flag, width.kind, width.required, width.positive) == ("width", int, True, True)
    assert (rate.kind, rate.default, rate.choices) == (float, None, ())
    assert (shape.flag, shape.field, shape.choices) == ("form", "shape", ("round", "square"))
    assert (plain.kind, plain.inverted) == (bool, True)


def test_a_switch_that_the_launch_file_set_can_be_taken_back(tmp_path):
    (tmp_path / "a.yaml").write_text("finetune: true\nload: /nowhere\n")
    words = flags(tmp_path, f"--config={tmp_path}/a.yaml", f"--load={tmp_path}")
    assert run_config(words).checkpoints.finetune
    assert not run_config([*words, "--no-finetune"]).checkpoints.finetune


# Their ranges stand with the checks of what they are, or there is none.
OF_ANY_SIGN = {"attention_dropout", "hidden_dropout", "profile_ranks", "reward_on_error"}
# All others are positive.
NOT_NEGATIVE = set(
    """adam_beta1 adam_beta2 clip_grad critic_lr_warmup_iters critic_min_lr dynamic_sampling end_weight_decay
    eval_answers gae_lambda gamma kl_in_reward lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_warmup_samples
    min_lr moe_aux_loss_coeff moe_router_bias_update_rate moe_z_loss_coeff mscale mscale_all_dim num_critic_only_steps
    profile_step_start rollout_min_p rollout_staleness rollout_top_k seed sgd_momentum start_weight_decay
    timing_log_level weight_decay""".split()
)


def test_only_the_flags_know_of_the_command_line():
    """All modules of a run take typed settings; ``ranks.py`` and ``loopback.py`` hold torchrun's own arguments.

    The commands ``export.py`` and ``replay.py`` read their own few flags.
    """
    knowing = {path for path in (ROOT / "launch").rglob("*.py") if "argparse" in path.read_text(encoding="utf-8")}
    folders = {path.relative_to(ROOT / "launch").parts[0] for path in knowing}
    assert folders == {"flags", "__main__.py", "ranks.py", "loopback.py", "export.py", "replay.py"}
