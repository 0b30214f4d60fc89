"""The table of model families: each complete, or an error where it is defined."""

from dataclasses import replace

import pytest

from megatron_rc.launch.weights.families import FAMILIES
from megatron_rc.launch.weights.family import Family


def test_every_family_stands_under_its_name():
    assert {family.name: family for family in FAMILIES.values()} == FAMILIES
    assert all(family.embedding and family.layer and family.head for family in FAMILIES.values())


def test_experts_without_their_names_are_an_error():
    for change in ({"expert_names": None}, {"expert": ()}):
        with pytest.raises(ValueError, match="family mixtral: expert and expert_names go together"):
            replace(FAMILIES["mixtral"], **change)


def test_a_family_that_cannot_be_read_is_an_error():
    with pytest.raises(TypeError, match="'read'"):
        Family(name="half")
