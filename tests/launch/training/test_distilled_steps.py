"""Whole steps with a divergence from a teacher in the loss, in float64: losses, metrics and gradients of the reference.

Megatron-Core cuts the work, over pipeline stages, vocabulary shards, context and data parallel ranks and micro-batches,
padded and packed. The teacher is a small function of a token and its position, so that each rank can compute what it
says about its own tokens; the launcher's teachers are models.
"""

import contextlib
import dataclasses
import functools
from dataclasses import dataclass
from unittest import mock

import pytest
import torch

from megatron_rc.parallel import TeacherStates, TeacherTopK
from megatron_rc.parallel.groups import group_rank, group_size
from tests.launch.training.test_matrix import assert_gradients, whole_gradients
from tests.launch.training.test_one_pass import in_float64
from tests.support import correction_oracle, training_cases, training_oracle
from tests.support.divergence_oracle import divergence, of_top_k
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags
from tests.support.training_cases import LENGTH, MINI_BATCHES
from tests.support.training_oracle import Objective

EXACT = 1e-6  # advantages and Megatron's rotations are float32, and gradients are rounded to it on their way here
TEACHER_HIDDEN = 10
FEW = 4  # tokens of a TeacherTopK
BETA = 0.3


@dataclass(frozen=True)
class Case:
    """A layout, how the work is cut, and what of the teacher is in the loss."""

    layout: Layout
    objective: Objective
    kind: str
    few: bool = False  # the teacher gives a few tokens alone, and the tail is sampled
    fused: bool = False  # no logits are stored
    packed: bool = False
    per_token_loss: bool = False
    size: int = 8

    def words(self, folder):
        own_words = list(self.objective.words)
        if self.fused:
            own_words.append("--fused-linear-log-probs")
        own = training_cases.cut_words(self, *own_words)
        arguments = flags(folder, *training_cases.BATCH, *own, model=LLAMA)
        return [word for word in arguments if word in own or not word.startswith(("--rollout-", "--grpo-clamp"))]

    def loss(self):
        """The fields of the objective's settings that the flags do not give."""
        fields = {"distillation_kind": self.kind, "distillation_beta": BETA if self.kind == "jsd" else None}
        if self.objective.algorithm == "distill":
            return fields | {"algorithm": "distill"}
        return fields | {"distillation_coef": self.objective.distillation}

    def __str__(self):
        name = f"{self.objective.algorithm}-{self.kind}" + "-bypass" * self.objective.bypass + "-few" * self.few
        return training_cases.label(self, name)


def objective(algorithm, level, words="", *, bypass=False, upper=1.4, **more):
    """An objective with weights of this level; in bypass mode the flags name REINFORCE, which weights multiply too."""
    chosen = [f"--rollout-is={level}", f"--rollout-is-threshold={upper}", "--grpo-kl-beta=0", *words.split()]
    if bypass:
        chosen += ["--bypass-mode", "--loss-type=reinforce"]
    elif algorithm == "ppo_clip":
        chosen += ["--grpo-clamp-eps-lower=0.1", "--grpo-clamp-eps-upper=0.15"]
        more |= {"low": 0.1, "high": 0.15}
    settings = correction_oracle.Settings(level=level, upper=upper, criteria=more.pop("criteria", ()))
    return Objective(tuple(chosen), settings, bypass=bypass, algorithm=algorithm, **more)


KPOP = {"criteria": (("token_kpop", -float("inf"), 0.05),)}
REJECT = "--rollout-rs=token_kpop --rollout-rs-threshold=0.05"
# Cases with one objective and one kind share the reference's update.
BY_SEQUENCE = objective("distill", "sequence")
BY_TOKEN = objective("distill", "token")
WITH_PPO = objective("ppo_clip", "token", distillation=0.7)
WITH_REINFORCE = objective("reinforce", "geometric", bypass=True, distillation=0.5)
CASES = [
    Case(Layout(cp=2, dp=2), BY_SEQUENCE, "reverse_kl", fused=True, packed=True, size=4),
    Case(Layout(pp=2, cp=2), objective("distill", "token", bypass=True), "jsd", per_token_loss=True),
    Case(Layout(cp=2), objective("distill", "prefix", REJECT, **KPOP), "forward_kl"),
    Case(Layout(tp=2, sp=True, pp=2), WITH_PPO, "forward_kl", packed=True),
    Case(Layout(pp=2, vpp=True), WITH_REINFORCE, "reverse_kl", size=4),
    Case(Layout(tp=2, sp=True), BY_TOKEN, "reverse_kl", few=True, fused=True, packed=True),
]


@functools.cache
def teacher_weights():
    """(vectors of tokens, vectors of positions, output layer [padded vocabulary, h_T]), float64."""
    generator = torch.Generator().manual_seed(11)
    sizes = (training_oracle.VOCABULARY, LENGTH, training_oracle.PADDED_VOCABULARY)
    return [torch.randn(size, TEACHER_HIDDEN, generator=generator, dtype=torch.float64) / 2 for size in sizes]


def teacher_hidden(tokens, positions):
    """[..., h_T]."""
    of_tokens, of_positions, _ = teacher_weights()
    return of_tokens[tokens] + of_positions[positions]


def teacher_logits(tokens, positions):
    """[..., vocabulary]."""
    return teacher_hidden(tokens, positions) @ teacher_weights()[2][: training_oracle.VOCABULARY].t()


@functools.cache
def expected(objective, kind, few):
    """The reference's update."""
    data = training_cases.make_data()
    positions = torch.arange(LENGTH)

    def divergence_of(weights):
        students = training_oracle.logits(weights, data.tokens)
        teachers = teacher_logits(data.tokens, positions)
        if not few:
            return divergence(kind, students, teachers, beta=BETA)
        rows = []
        for row, (tokens, student, teacher) in enumerate(zip(data.tokens, students, teachers, strict=True)):
            values = [torch.zeros((), dtype=torch.float64)] * LENGTH
            for t in data.mask[row].nonzero().flatten().tolist():
                ids = teacher[t].topk(FEW).indices.tolist()
                label = int(tokens[t + 1])
                values[t] = of_top_k("sampled", kind, student[t], teacher[t], ids, beta=BETA, label=label)
            rows.append(torch.stack(values))
        return torch.stack(rows)

    return training_oracle.update(objective, data, *training_cases.weights(), divergence_of)


# On the ranks


def teacher_of(case, local, groups, positions):
    """What the teacher says about a micro-batch on this rank."""
    tokens, labels = local.tokens, local.labels
    if tokens.dim() == 1:  # packed tokens are one row of the model
        tokens, labels, positions = (values.unsqueeze(0) for values in (tokens, labels, positions))
    beta = BETA if case.kind == "jsd" else None
    if case.few:
        log_probs = teacher_logits(tokens, positions).log_softmax(-1)
        known = log_probs.topk(FEW)
        return TeacherTopK(
            ids=known.indices.flatten(),
            offsets=FEW * torch.arange(labels.numel() + 1),
            log_probs=known.values.flatten(),
            label_log_probs=log_probs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1),
            tail="sampled",
            kind=case.kind,
            beta=beta,
        )
    hidden = teacher_hidden(tokens, positions).transpose(0, 1)
    if case.layout.sp:
        hidden = hidden.chunk(group_size(groups.tp))[group_rank(groups.tp)]
    weight = teacher_weights()[2].chunk(group_size(groups.tp))[group_rank(groups.tp)]
    return TeacherStates(hidden_states=hidden, weight=weight, kind=case.kind, beta=beta)


@contextlib.contextmanager
def distilling(case, positions_of):
    """Trainers that are made inside have the teacher's divergence in their loss."""
    from megatron_rc import RolloutCorrection
    from megatron_rc.launch.training import trainer
    from megatron_rc.launch.training.models import passes

    processor_of = passes.ModelPasses._processor

    def correction(config, groups):
        fields = {"loss_type": "distill"} if case.objective.bypass and case.objective.algorithm == "distill" else {}
        loss = dataclasses.replace(config.loss, **case.loss())
        return RolloutCorrection(dataclasses.replace(config.correction, **fields), groups, loss=loss)

    def processor(self, scoring, local, teacher):
        if torch.is_grad_enabled():
            teacher = teacher_of(case, local, self.groups, positions_of(local))
        return processor_of(self, scoring, local, teacher)

    with (
        mock.patch.object(trainer, "_correction", correction),
        mock.patch.object(passes.ModelPasses, "_processor", processor),
    ):
        yield


def positions_in_sequence(local):
    return local.positions


def positions_on_rank(local):
    """Wrong: as if this rank's slice were the whole sequence."""
    return torch.arange(LENGTH // 2).expand_as(local.positions)


def run_distilled(case, positions_of, *arguments):
    with in_float64(), distilling(case, positions_of):
        return training_cases.run_case(*arguments)


def run(ranks, case, folder, positions_of=positions_in_sequence):
    data = training_cases.make_data()
    return ranks.run(
        run_distilled, case.layout, case, positions_of, case.words(folder), data, *training_cases.weights()
    )


def assert_reference(everywhere, case):
    want = expected(case.objective, case.kind, case.few)
    for index in range(MINI_BATCHES):
        assert_gradients(whole_gradients(everywhere, index), want.gradients[index], EXACT)
        got = everywhere[0].metrics[index]
        assert all(rank.metrics[index] == got for rank in everywhere)
        assert got["loss/total"] == pytest.approx(want.loss[index], abs=EXACT * want.size[index])
        assert got["policy/divergence"] == pytest.approx(want.policy[index]["divergence"], rel=1e-6)
        assert got["policy/divergence"] > 0.1
    # The weights are not all 1.
    weights = torch.tensor(want.weights)[torch.tensor(want.mask)]
    assert weights.std() > 0.05


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_the_reference(ranks, tmp_path, case):
    assert_reference(run(ranks, case, tmp_path), case)


def test_a_teacher_that_scores_other_tokens_is_noticed(ranks, tmp_path):
    case = dataclasses.replace(CASES[0], layout=Layout(cp=2), packed=False, size=16)
    with pytest.raises(AssertionError, match="gradient of"):
        assert_reference(run(ranks, case, tmp_path, positions_on_rank), case)
