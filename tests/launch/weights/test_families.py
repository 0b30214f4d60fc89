"""The two tables of model families know the same ones."""

from megatron_rc.launch.weights.architecture import _READERS
from megatron_rc.launch.weights.families import FAMILIES


def test_every_family_is_read_from_its_directory():
    assert sorted(family.name for family in FAMILIES) == sorted(_READERS)
