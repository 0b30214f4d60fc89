"""Settings beside a checkpoint's weights that somebody has changed: named, before a model is made of them."""

import json

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.stored import stored_config
from megatron_rc.launch.training.checkpoints.saved_settings import settings_text
from tests.support.recorded_training import LLAMA, flags, run_config

EXPERTS = ["--num-experts=4", "--moe-ffn-hidden-size=32", "--num-layers=4", "--moe-layer-freq=[0]*1+[1]*3"]


@pytest.fixture
def sections(tmp_path):
    return json.loads(settings_text(run_config(flags(tmp_path, *EXPERTS, model=LLAMA), 1, engine=False)))


def test_what_a_run_wrote_is_that_run(sections):
    found = stored_config(sections, "settings.json")
    assert found.layers_with_experts == [False, True, True, True]
    assert (found.transformer.num_layers, found.experts.num_moe_experts) == (4, 4)


CHANGED = {
    ("experts", "moe_layer_freq", "[0]*1+[1]*7"): "--moe-layer-freq [0]*1+[1]*7 is of 8 layers",
    ("experts", "moe_layer_freq", "[0]*4"): "--moe-layer-freq [0]*4 ",
    ("experts", "moe_layer_freq", "[0,1,1,1]"): "experts: moe_layer_freq is '[0,1,1,1]': ",
    ("experts", "moe_layer_freq", "0"): "experts: moe_layer_freq is '0': ",
    ("experts", "moe_layer_freq", "__import__('os')"): "experts: moe_layer_freq is ",
    ("experts", "num_moe_experts", 10**9): "experts: num_moe_experts is 1000000000: ",
    ("transformer", "num_layers", 0): "transformer: num_layers is 0: ",
    ("transformer", "num_layers", 10**9): "transformer: num_layers is 1000000000: ",
    ("transformer", "hidden_size", -64): "transformer: hidden_size is -64: ",
}


@pytest.mark.parametrize("change", CHANGED, ids=str)
def test_what_cannot_be_is_named(sections, change):
    section, name, value = change
    sections[section][name] = value
    with pytest.raises(ConfigurationError) as error:
        stored_config(sections, "settings.json")
    assert str(error.value).startswith("settings.json: ")
    assert CHANGED[change] in str(error.value)
