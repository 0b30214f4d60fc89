"""Defaults and types of the parser that newer releases of Megatron-Core bring; ``make test-latest`` runs this."""

import argparse

import pytest

from megatron_rc.launch.flags.checks.megatron import REFUSED
from megatron_rc.launch.run_config import passed_through

arguments = pytest.importorskip("megatron.training.arguments", reason="this Megatron-Core brings no parser")

FUSION = "a fused kernel is used where it is asked for: local layers and the CPU have none"
OTHER_DEFAULTS = {
    "gradient_accumulation_fusion": "on where apex's extension is installed",
    "overlap_p2p_comm": "on with virtual stages, which is where it does something",
    "bias_activation_fusion": FUSION,
    "masked_softmax_fusion": FUSION,
    "bias_dropout_fusion": FUSION,
    "apply_rope_fusion": FUSION,
    "cp_comm_type": "the dataclass's None is p2p too",
    "grad_reduce_in_fp32": "gradients are summed in float32 unless --grad-reduce-in-bf16 is given",
    **dict.fromkeys(
        "attention_softmax_in_fp32 cuda_graph_modules align_param_gather data_parallel_sharding_strategy "
        "muon_momentum".split(),
        "no effect here",
    ),
}


def theirs():
    """Megatron-LM's actions by flag, without dashes."""
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return {text[2:]: action for action in parser._actions for text in action.option_strings}


def is_refused(name):
    return name in " ".join(REFUSED.values()).split()


@pytest.fixture(scope="module")
def pairs():
    """(field, Megatron-LM's action) of every field that both have a flag for; refused ones are theirs by name alone."""
    known = theirs()
    results = {
        name: [known[flag] for flag in (*field.on, *field.off) if flag in known] for name, field in FIELDS.items()
    }
    return {name: (FIELDS[name], actions[0]) for name, actions in results.items() if actions}


FIELDS = passed_through()


def test_defaults(pairs):
    """None, an empty list and an empty string are the same: nothing."""
    wrong = set()
    for name, (field, action) in pairs.items():
        default = getattr(action.default, "name", action.default)
        if not is_refused(name) and default != field.default and (default or field.default):
            wrong.add(name)
    assert wrong <= set(OTHER_DEFAULTS)


def test_types(pairs):
    for name, (field, action) in pairs.items():
        if is_refused(name) or name == "cuda_graph_modules":
            continue
        if action.nargs == 0:
            assert field.kind is bool, name
        elif field.choices:
            assert {getattr(one, "name", one) for one in action.choices} == set(field.choices), name
        else:
            # A function of Megatron-LM's reads patterns of layers.
            assert action.type is field.kind or field.kind.__name__ == "number_or_pattern", name
        assert (action.nargs == "+") == field.many, name
