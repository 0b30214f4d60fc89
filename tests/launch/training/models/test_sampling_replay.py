"""Log-probs over the tokens that an engine kept, on real Megatron-Core, equal the float64 reference in every layout."""

from dataclasses import dataclass, replace

import pytest

from tests.launch.training.models.test_moe import EXPERTS, compared
from tests.launch.training.test_matrix import TO_REFERENCE, assert_gradients
from tests.support import training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.training_cases import Case

FUSED = ("--fused-linear-log-probs",)


@dataclass(frozen=True)
class Kept(Case):
    """A run on truncated rollouts; ``kept``: see ``training_cases.make_data``."""

    kept: str = "some"
    more: tuple[str, ...] = ()

    def words(self, folder):
        over = ["--entropy-over-support"] * (self.kept == "entropy")
        return [*super().words(folder), "--rollout-top-p=0.9", *over, *self.more]

    def __str__(self):
        return "-".join([super().__str__(), self.kept, *(word.strip("-") for word in self.more)])


CASES = [
    Kept(Layout(), "decoupled", kept="entropy", more=FUSED),
    Kept(Layout(tp=2), "bypass ppo_clip", kept="entropy"),
    Kept(Layout(tp=2, sp=True), "decoupled", packed=True, more=FUSED),
    Kept(Layout(tp=2, pp=2), "decoupled", packed=True, per_token_loss=True),
    Kept(Layout(cp=2, dp=2), "bypass reinforce", size=4),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_layout_is_the_reference(ranks, tmp_path, case):
    compared(ranks, tmp_path, case, 0, "", case.kept)


def test_the_reference_without_kept_tokens_is_another():
    objective = CASES[0].objective
    data = training_cases.make_data(kept="some")
    whole = training_oracle.update(objective, replace(data, kept=None), *training_cases.weights())
    with pytest.raises(AssertionError, match="gradient of"):
        assert_gradients(whole.gradients[0], training_cases.expected(objective, kept="some").gradients[0], TO_REFERENCE)


def test_with_experts_both_are_replayed(ranks, tmp_path):
    """Experts and kept tokens in one batch."""
    from tests.launch.training.models.test_routing_replay import Replayed

    case = Replayed(Layout(tp=2, sp=True), "decoupled", more=("--rollout-top-k=6",), size=8)
    compared(ranks, tmp_path, case, EXPERTS, case.replayed, "some")
