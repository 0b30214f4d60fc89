"""A run's settings: declared once, typed, frozen, and under Megatron's names where they go into its dataclasses."""

import dataclasses
from collections import Counter

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import check_range, options_of, values_of
from tests.support.recorded_training import LLAMA, flags, run_config


def test_no_flag_and_no_field_is_declared_twice_and_every_number_has_a_sign():
    options = [option for _, section, _ in sections_of(RunConfig) for option in options_of(section)]
    assert max(Counter(option.flag for option in options).values()) == 1
    fields = [field.name for _, section, _ in sections_of(RunConfig) for field in dataclasses.fields(section)]
    assert max(Counter(fields).values()) == 1
    assert all(option.help for option in options)
    numbers = [option for option in options if option.kind in (int, float)]
    assert len(numbers) > 80
    for option in numbers:
        error = "must be positive"
        if option.not_negative:
            error = "must be 0 or more"
        if option.any_sign:
            error = "must be a finite number"
        for value in (-1, float("nan"), float("inf"), 0):
            may_pass = (value == 0 and option.not_negative) or (value in (0, -1) and option.any_sign)
            if not option.many and not may_pass:
                with pytest.raises(ConfigurationError, match=error):
                    check_range(option, value)
            elif may_pass:
                check_range(option, value)


def test_settings_reach_megatron_unchanged(tmp_path):
    from megatron_rc.launch.run_config.megatron_configs import build_optimizer_config, build_transformer_config

    arguments = """--num-experts=4 --moe-z-loss-coeff=0.1 --moe-layer-freq=([0]+[1]*3) --norm-epsilon=1e-6
    --recompute-granularity=selective --multi-latent-attention --q-lora-rank=12 --qk-head-dim=6 --rotary-base=500
    --rotary-scaling-factor=40 --beta-fast=16 --mscale=0.5""".split()
    model = [word for word in LLAMA if "group" not in word]
    config = run_config(flags(tmp_path, *arguments, model=model), engine=False)
    built = vars(build_transformer_config(config))
    for section in (config.parallel, config.transformer, config.compute, config.experts, config.latent):
        expected = values_of(section)
        for flag_alone in ("group_query_attention", "num_layers_per_virtual_pipeline_stage"):
            expected.pop(flag_alone, None)
        if "moe_layer_freq" in expected:
            assert expected["moe_layer_freq"] == "[0]*1+[1]*3"
            expected["moe_layer_freq"] = [0, 1, 1, 1]  # as Megatron-LM's parser would have read it
        assert {name: built[name] for name in expected} == expected
    assert built["rotary_base"] == 500
    assert values_of(config.optimizer).items() <= vars(build_optimizer_config(config)).items()
