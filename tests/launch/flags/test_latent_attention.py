"""Flags of DeepSeek-V3's layers, and patterns of layers with experts."""

import pytest

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.run_config.layer_patterns import expert_layers
from megatron_rc.launch.run_config.megatron_configs import build_transformer_config
from megatron_rc.launch.weights import find_family
from tests.support.recorded_training import LLAMA, flags, run_config

SIZES = "--q-lora-rank=12 --kv-lora-rank=8 --qk-head-dim=6 --qk-pos-emb-head-dim=4 --v-head-dim=10"
LATENT = f"--multi-latent-attention {SIZES}"
YARN = (
    "--rotary-scaling-factor=40 --original-max-position-embeddings=512 --beta-fast=16 --mscale=0.5 --mscale-all-dim=2"
)
EXPERTS = "--num-experts=8 --moe-router-topk=4 --moe-ffn-hidden-size=24"
SIGMOID = f"{EXPERTS} --moe-router-score-function=sigmoid --moe-router-enable-expert-bias"
# All heads have keys of their own.
MODEL = [word for word in LLAMA if "group" not in word]


def config_of(tmp_path, words, engine=False, ranks=1):
    return configure(flags(tmp_path, *words.split(), model=MODEL), ranks, engine=engine)[0]


GIVEN = {
    LATENT: {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_head_dim": 6, "qk_pos_emb_head_dim": 4, "v_head_dim": 10},
    "--multi-latent-attention": {"q_lora_rank": None, "kv_lora_rank": 32, "rope_type": "yarn", "rotary_base": 10000},
    # The heads' own widths are even; what hidden-size / heads would give plays no part.
    f"{LATENT} --hidden-size=60 --num-attention-heads=4": {"hidden_size": 60, "qk_head_dim": 6},
    f"{LATENT} {YARN}": {"rotary_scaling_factor": 40.0, "beta_fast": 16.0, "mscale": 0.5, "mscale_all_dim": 2.0},
    f"{LATENT} --rotary-base=500 --rope-type=rope": {"rotary_base": 500, "rope_type": "rope"},
    f"{EXPERTS} --moe-layer-freq=([0]+[1]*3)": {"moe_layer_freq": [0, 1, 1, 1]},
    f"{EXPERTS} --moe-layer-freq=2": {"moe_layer_freq": 2},
    f"{SIGMOID} --moe-router-topk-scaling-factor=2.5": {
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_topk_scaling_factor": 2.5,
    },
    f"{EXPERTS} --moe-router-num-groups=4 --moe-router-group-topk=2": {"moe_router_num_groups": 4},
}


@pytest.mark.parametrize("words", GIVEN)
def test_a_flag_goes_into_megatrons_config(tmp_path, words):
    built = vars(build_transformer_config(config_of(tmp_path, words)))
    assert {name: built[name] for name in GIVEN[words]} == GIVEN[words]


LISTS = {"1": "1", "3": "3", "[1]*4": "1", "[1,1]": "1", "([0]*3+[1]*58)": "[0]*3+[1]*58", "[0,1]": "[0]*1+[1]*1"}
LISTS |= {"([0]*2+[1])*2": "[0]*2+[1]*1+[0]*2+[1]*1", **dict.fromkeys(["0", "-1", "[]", "[2]", "[0,3]"])}


@pytest.mark.parametrize("word", LISTS)
def test_a_list_of_layers_has_one_form_or_is_refused(word):
    if LISTS[word]:
        assert expert_layers(word) == expert_layers(LISTS[word]) == LISTS[word]
        return
    with pytest.raises(ValueError, match="number"):
        expert_layers(word)


def test_layers_with_experts(tmp_path):
    found = {word: config_of(tmp_path, f"{EXPERTS} --moe-layer-freq={word}") for word in ("1", "2", "[0]+[1]*3")}
    assert [config.layers_with_experts for config in found.values()] == [
        [True] * 4,
        [True, False, True, False],
        [False, True, True, True],
    ]
    assert config_of(tmp_path, "").layers_with_experts == [False] * 4


WHOLE = f"{LATENT} {SIGMOID} --qk-layernorm --moe-shared-expert-intermediate-size=48"
NOT_DEEPSEEK = {
    "--mscale=2": "mscale without mscale_all_dim",
    "--moe-layer-freq=2": "experts in every second layer",
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
    for words in (LATENT, f"{EXPERTS} --moe-layer-freq=2", f"{EXPERTS} --moe-router-topk-scaling-factor=2"):
        assert find_family(run_config(flags(tmp_path, *words.split(), model=MODEL), engine=False)) is None
