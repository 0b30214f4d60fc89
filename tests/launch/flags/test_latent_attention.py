"""Flags of DeepSeek-V3's layers, and patterns of layers with experts."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config.layer_patterns import expert_layers
from megatron_rc.launch.weights import find_family
from tests.support.recorded_training import LLAMA, flags, run_config

LATENT = "--multi-latent-attention --q-lora-rank=12 --kv-lora-rank=8 --qk-head-dim=6 --qk-pos-emb-head-dim=4 "
LATENT += "--v-head-dim=10"
EXPERTS = "--num-experts=8 --moe-router-topk=4 --moe-ffn-hidden-size=24"
SIGMOID = f"{EXPERTS} --moe-router-score-function=sigmoid --moe-router-enable-expert-bias"
# All heads have keys of their own.
HEADS = [word for word in LLAMA if "group" not in word]


def config_of(tmp_path, words, engine=False, ranks=1):
    return configure(flags(tmp_path, *words.split(), model=HEADS), ranks, engine=engine)[0]


LISTS = {"1": "1", "3": "3", "[1]*4": "1", "[1,1]": "1", "([0]*3+[1]*58)": "[0]*3+[1]*58", "[0,1]": "[0]*1+[1]*1"}
LISTS |= {"([0]*2+[1])*2": "[0]*2+[1]*1+[0]*2+[1]*1", **dict.fromkeys(["0", "-1", "[]", "[2]", "[0,3]"])}


@pytest.mark.parametrize("word", LISTS)
def test_a_list_of_layers_has_one_form_or_is_refused(word):
    if LISTS[word]:
        assert expert_layers(word) == expert_layers(LISTS[word]) == LISTS[word]
        return
    with pytest.raises(ValueError, match="number"):
        expert_layers(word)


def test_every_second_layer_has_experts(tmp_path):
    assert config_of(tmp_path, f"{EXPERTS} --moe-layer-freq=2").layers_with_experts == [True, False, True, False]


WHOLE = f"{LATENT} {SIGMOID} --qk-layernorm --moe-shared-expert-intermediate-size=48"
NOT_DEEPSEEK = {
    "--mscale=2": "mscale without mscale_all_dim",
    "--moe-shared-expert-intermediate-size=50": "two and a bit of the width of an expert",
    "--moe-router-num-groups=8 --moe-router-group-topk=4": "one expert of each group, where transformers sums two",
}


@pytest.mark.parametrize("words", NOT_DEEPSEEK)
def test_a_model_that_is_not_deepseeks_goes_to_no_engine(tmp_path, words):
    assert find_family(config_of(tmp_path, WHOLE)).name == "deepseek_v3"
    assert find_family(config_of(tmp_path, f"{WHOLE} {words}")) is None
    with pytest.raises(ConfigurationError, match=r"no Hugging Face architecture .*docs/models\.md"):
        config_of(tmp_path, f"{WHOLE} {words}", engine=True)


def test_latents_and_chosen_layers_are_of_no_other_family(tmp_path):
    for arguments in (LATENT, f"{EXPERTS} --moe-layer-freq=2", f"{EXPERTS} --moe-router-topk-scaling-factor=2"):
        assert find_family(run_config(flags(tmp_path, *arguments.split(), model=HEADS), engine=False)) is None
