"""Whole steps with trust regions inside the loss, and with weights and criteria on prefixes and turns, in float64.

Losses, metrics and gradients are the reference's.

The tests of ``tests/loss/test_objective_shards.py`` cut tensors; here Megatron-Core cuts the work, over pipeline
stages, context and data parallel ranks and micro-batches, padded and packed.
"""

import functools
import math
from dataclasses import dataclass

import pytest

from megatron_rc.loss.objectives import OBJECTIVES
from tests.launch.training.test_matrix import assert_gradients, whole_gradients
from tests.launch.training.test_one_pass import in_float64
from tests.support import correction_oracle, training_cases, training_oracle
from tests.support.ranks import Layout
from tests.support.recorded_training import LLAMA, flags
from tests.support.training_cases import LENGTH, MINI_BATCHES
from tests.support.training_oracle import Objective

EXACT = 1e-6  # advantages and Megatron's rotations are float32, and gradients are rounded to it on their way here


@dataclass(frozen=True)
class Case:
    """A layout, and how the work is cut."""

    layout: Layout
    objective: Objective
    packed: bool = False
    per_token_loss: bool = False
    size: int = 8

    def words(self, folder):
        own = training_cases.cut_words(self, *self.objective.words)
        arguments = flags(folder, *training_cases.BATCH, *own, model=LLAMA)
        return [word for word in arguments if word in own or not word.startswith(("--rollout-", "--grpo-clamp"))]

    def __str__(self):
        return training_cases.label(self, self.objective.algorithm + "-bypass" * self.objective.bypass)


def objective(algorithm, words, low=0.2, high=0.2, bypass=False, **more):
    """An objective with its bounds in the flags too; in bypass mode without weights, else with those of tokens."""
    chosen = ["--bypass-mode", f"--loss-type={algorithm}", "--rollout-is=none"] if bypass else []
    chosen = chosen or [f"--policy-loss={algorithm}", "--rollout-is=token", "--rollout-is-threshold=1.4"]
    if algorithm != "sapo":
        chosen += [f"--grpo-clamp-eps-lower={low}", f"--grpo-clamp-eps-upper={high}"]
    settings = {} if bypass else {"level": "token", "upper": 1.4}
    return Objective(
        (*chosen, "--grpo-kl-beta=0", *words.split()),
        correction_oracle.Settings(**settings),
        bypass=bypass,
        algorithm=algorithm,
        low=low,
        high=high,
        **more,
    )


def weighed(level, criteria, bypass=False, upper=1.4):
    """PPO-clip, in bypass mode REINFORCE, with weights of this level; criteria as (name, lower, upper, words)."""
    names, bounds = (",".join(one[index] for one in criteria) for index in (0, 3))
    arguments = [f"--rollout-is={level}", f"--rollout-is-threshold={upper}"]
    arguments += [f"--rollout-rs={names}", f"--rollout-rs-threshold={bounds}"]
    arguments += (
        ["--bypass-mode", "--loss-type=reinforce"]
        if bypass
        else ["--grpo-clamp-eps-lower=0.2", "--grpo-clamp-eps-upper=0.2"]
    )
    settings = correction_oracle.Settings(level=level, upper=upper, criteria=tuple(tuple(one[:3]) for one in criteria))
    return Objective(
        (*arguments, "--grpo-kl-beta=0"), settings, bypass=bypass, algorithm="reinforce" if bypass else "ppo_clip"
    )


KPOP = ("token_kpop", -math.inf, 0.05, "0.05")
TURNS = [("turn_mean_k3", -math.inf, 0.12, "0.12"), ("turn_sum_k1", math.log(0.2), math.log(5), "0.2_5")]
BY_SEQUENCE = "--loss-aggregation=seq-mean-token-mean"
WEIGHTED_KL = "--grpo-kl-beta=0.5 --kl-importance-weight"
TEMPERATURES = "--sapo-tau-pos=1.5 --sapo-tau-neg=2"
CASES = [
    Case(Layout(cp=2), objective("dppo_tv", "--ppo-dual-clip=1.3", 0.03, 0.02, bypass=True, dual=1.3)),
    Case(Layout(pp=2, cp=2), objective("cppo", "", 0.05, 0.04, bypass=True), per_token_loss=True),
    Case(Layout(pp=2), objective("sapo", TEMPERATURES, tau_pos=1.5, tau_neg=2.0), packed=True, size=4),
    Case(
        *(Layout(cp=2), objective("gmpo", BY_SEQUENCE, 0.05, 0.1, aggregation="seq-mean-token-mean")),
        packed=True,
    ),
    Case(Layout(cp=2), weighed("prefix", [KPOP]), size=4),
    Case(Layout(cp=2), weighed("min_prefix", [KPOP], bypass=True), packed=True),
    Case(Layout(cp=2), weighed("turn", TURNS), packed=True),
    Case(Layout(dp=2), weighed("turn_geometric", TURNS, bypass=True), per_token_loss=True, size=4),
    Case(Layout(dp=2), objective("ppo_clip", WEIGHTED_KL, kl=0.5, kl_is_weighted=True), packed=True),
    Case(Layout(cp=2), objective("ppo_clip", WEIGHTED_KL, bypass=True, kl=0.5, kl_is_weighted=True)),
]


@functools.cache
def expected(case_objective):
    return training_oracle.update(case_objective, training_cases.make_data(), *training_cases.weights())


def run_in_float64(*arguments):
    with in_float64():
        return training_cases.run_case(*arguments)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_steps_are_those_of_the_reference(ranks, tmp_path, case):
    data = training_cases.make_data()
    weights = training_cases.weights()
    want = expected(case.objective)
    everywhere = ranks.run(run_in_float64, case.layout, case.words(tmp_path), data, *weights)
    for index in range(MINI_BATCHES):
        assert_gradients(whole_gradients(everywhere, index), want.gradients[index], EXACT)
        got = everywhere[0].metrics[index]
        policy = want.policy[index]
        assert all(rank.metrics[index] == got for rank in everywhere)
        assert got["loss/total"] == pytest.approx(want.loss[index], abs=EXACT * want.size[index])
        if case.objective.kl:
            assert got["policy/reference_kl"] == pytest.approx(policy["kl"], rel=1e-6)
        for side in ("low", "high"):
            assert got[f"policy/clip_fraction_{side}"] == pytest.approx(policy[side], rel=1e-12)
        if case.objective.dual:
            assert got["policy/dual_clip_fraction"] == pytest.approx(policy["dual"], rel=1e-12)
        if OBJECTIVES[case.objective.algorithm].clips and case.objective.settings.criteria == ():
            assert min(policy["low"], policy["high"]) > 0.02
    if case.objective.algorithm == "cppo":  # in bypass mode the correction makes one sum over CP more
        for rank in everywhere:
            for calls, sequences in zip(rank.step_calls, rank.sequences, strict=True):
                own = [("SUM", 2, 2 * number * LENGTH) for number in sequences]
                on_last_stage = rank.places is not None
                assert calls[1 : 2 * len(sequences) : 2] == (own if on_last_stage else [])
