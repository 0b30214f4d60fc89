"""Names of other programs: metrics that they write, fields of their records, and settings that advice names.

Names are taken from the programs' code: verl 1dda039 (``trainer/ppo/rollout_corr_helper.py``,
``trainer/ppo/v1/trainer_base.py``, ``utils/debug/metrics.py``), slime 624b824 (``backends/megatron_utils/loss.py``,
``examples/train_infer_mismatch_helper/mis.py``), NeMo-RL 7ea279a (``algorithms/loss/loss_functions.py``), TRL 1.16
(``trainer/grpo_trainer.py``) and prime-rl 559b447 (``trainer/rl/train.py``, ``trainer/rl/token_export.py``).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from megatron_rc.attribution.verdict import PREFIX as ATTRIBUTION

OWN = "megatron_rc"
STEP_NAMES = (
    "step",
    "_step",
    "Step",
    "global_step",
    "training/global_step",
    "trainer/global_step",
    "train/global_step",
    "train/step",
)

# For each program: the end of a metric's name, whatever stands before it (train/, actor/), and our name. Two shares of
# one row with the same name of ours are added up: those below and above two bounds.
NAMES_OF: Mapping[str, Mapping[str, str]] = {
    "verl": {
        "training/rollout_probs_diff_mean": "probs_diff_mean",
        "training/rollout_actor_probs_pearson_corr": "probs_correlation",
        # 0: the batch had no token to compare, and the two numbers above say nothing.
        "training/rollout_probs_diff_valid": "probs_diff_valid",
        "response_length/mean": "response_length",
        "training/off_policy/trajectory_staleness/mean": "staleness_mean",
        "critic/score/mean": "reward",
        "actor/grad_norm": "grad_norm",
    },
    OWN: {  # outside the correction
        "rollout/response_length": "response_length",
        "rollout/staleness_mean": "staleness_mean",
        "policy/entropy": "entropy",
        "reward/mean": "reward",
        "reward/nonzero_advantages": "nonzero_advantages",
        "selection/inclusion_shortest": "inclusion_shortest",
        "selection/inclusion_longest": "inclusion_longest",
        "selection/started": "started",
        "selection/bad": "bad",
        "selection/replaced": "replaced",
        "selection/overlong": "overlong",
        "selection/rejected": "rejected",
    },
    "slime": {
        "train_rollout_logprob_abs_diff": "abs_log_ratio",
        "rollout/response_len/mean": "response_length",
        "rollout/raw_reward": "reward",
        # The mean of ρ over tokens, before any bound.
        "train/tis": "ratio_mean",
        "train/tis_clipfrac": "rollout_is_oob_ratio",
        "mis_kl": "kl",
        "mis_k3_kl": "k3_kl",
        "mis_ppl_ratio": "ppl_ratio",
        "mis_chi2_token": "chi2_token",
        "mis_chi2_seq": "chi2_seq",
        # Weights of the level that tis_level names.
        "mis_tis_weight_before_bound": "rollout_is_raw_mean",
        "mis_is_ratio_mean_final": "rollout_is_mean",
        "mis_tis_truncate_fraction": "rollout_is_ratio_fraction_high",
        "mis_tis_clip_fraction_high": "rollout_is_ratio_fraction_high",
        "mis_tis_clip_fraction_low": "rollout_is_ratio_fraction_low",
        # Its mode ``mask`` and its use_rs may reject the same tokens, so these are not added to those of use_rs.
        "mis_tis_mask_fraction_low": "rollout_is_masked_fraction",
        "mis_tis_mask_fraction_high": "rollout_is_masked_fraction",
        "mis_rs_mask_fraction_low": "rollout_rs_masked_fraction",
        "mis_rs_mask_fraction_high": "rollout_rs_masked_fraction",
        "mis_rs_catastrophic_seq_fraction": "rollout_is_veto_fraction",
    },
    "trl": {
        "sampling/sampling_logp_difference/mean": "abs_log_ratio",
        # Weights as they multiply the loss, behind clip or mask; of tokens or sequences.
        "sampling/importance_sampling_ratio/mean": "rollout_is_mean",
        "completions/mean_length": "response_length",
    },
    "prime-rl": {
        "mismatch_kl/all/mean": "k3_kl",
        "is_masked/mean": "rollout_rs_masked_fraction",
        "optim/grad_norm": "grad_norm",
        "entropy/all/mean": "entropy",
    },
    "nemo-rl": {
        "token_mult_prob_error": "mult_prob_error",
        "gen_kl_error": "k3_kl",
        # Weights as they multiply the loss, behind all bounds; of sequences in a run of GSPO.
        "sampling_importance_ratio": "rollout_is_mean",
        "is_oob_ratio": "rollout_is_oob_ratio",
        "mean_gen_tokens_per_sample": "response_length",
        "avg_trajectory_age": "staleness_mean",
        "train/reward": "reward",
    },
}
_OF_VERL = ("actor/", "training/", "timing_s/")  # prefixes of verl's other metrics
# Metrics whose names begin so describe no training on the engine's samples: those of an evaluation, and those of
# prime-rl's distillation from a teacher.
_OTHER_BEGINNINGS = ("eval/", "test/", "validation/", "ref_kl/")
_WHOLE = {"grad_norm": "grad_norm", "train/grad_norm": "grad_norm", "reward": "reward"}  # not critic/grad_norm
# This project's and verl's names, and those of slime's page, which no release of its code writes any more.
_PREFIXED = re.compile(r"(?:^|/)(?:(?:rollout_corr|mismatch)/(?:mismatch_)?|mismatch_)([^/]+)$")


@functools.lru_cache(maxsize=4096)  # a long run repeats its names a million times
def own_name(name: str) -> str | None:
    """Our name of a metric, without a prefix; None for a metric that the rules do not use.

    W&B's exports put the run and `` - `` before a name.
    """
    name = without_run(name)
    if name.startswith(_OTHER_BEGINNINGS):
        return None
    if name.startswith(ATTRIBUTION):
        return name
    match = _PREFIXED.search(name)
    if match:
        return match[1]
    for names in NAMES_OF.values():
        for ending, fact in names.items():
            if _ends_with(name, ending):
                return fact
    return _WHOLE.get(name)


def program_of(names: Iterable[str]) -> str:
    """The program that writes metrics of these names; this project if they do not tell."""
    metrics = [without_run(name) for name in names]
    for program, names_of_program in NAMES_OF.items():
        if any(_ends_with(metric, ending) for metric in metrics for ending in names_of_program):
            return program
    if any(metric.startswith((*_OF_VERL, "mismatch/")) for metric in metrics):
        return "verl"
    if any("mismatch_" in metric for metric in metrics):
        return "slime"
    return OWN


def without_run(name: str) -> str:
    """A metric's name without the run that W&B's exports put before it."""
    return name.rpartition(" - ")[2].strip()


def _ends_with(name: str, ending: str) -> bool:
    return name == ending or name.endswith(f"/{ending}")


# Names of each field of a record in verl, NeMo-RL, slime and prime-rl; the first one that exists is read.
ROLLOUT = ("rollout_log_probs", "generation_logprobs", "rollout_logprobs", "inference_logprobs")
OLD = ("old_log_probs", "prev_logprobs", "log_probs", "policy_logprobs", "trainer_logprobs")
MASK = ("response_mask", "token_loss_mask", "token_mask", "loss_mask", "loss_masks")
SEQUENCE_MASK = ("sample_loss_mask", "sample_mask", "loss_multiplier")
REWARD = ("reward", "rewards", "score", "total_reward", "token_level_scores", "rm_scores")
GROUP = ("group_id", "group_ids", "uid", "group_index")
TOKENS = ("responses", "token_ids", "input_ids", "tokens")
VERSION = ("policy_version", "weight_version", "param_version_start", "policy_versions", "weight_versions")
_FIELDS_OF = {
    "nemo-rl": {"generation_logprobs", "prev_logprobs", "token_loss_mask", "sample_loss_mask"},
    "prime-rl": {"inference_logprobs", "trainer_logprobs"},
    "verl": {"responses", "response_mask", "token_level_scores", "rm_scores", "param_version_start"},
    "slime": {"loss_mask", "loss_masks", "rollout_logprobs", "weight_versions", "weight_version"},
}


def program_of_record(fields: Iterable[str]) -> str:
    """The program that writes records with these fields; this project if they do not tell."""
    present = set(fields)
    return next((program for program, names in _FIELDS_OF.items() if not names.isdisjoint(present)), OWN)


# Names that advice uses, for each program; ``signal`` and ``scale`` are the same without names of flags.
_SIGNAL = "more prompts a step, other prompts for those whose rewards are alike, a warm-up or a lower learning rate"
WORDS: Mapping[str, Mapping[str, str]] = {
    OWN: {
        "signal": "more prompts a step (--grpo-prompts-per-step), other prompts for those whose rewards are alike "
        "(--dynamic-sampling), a warm-up (--lr-warmup-iters) or a lower --lr",
        "temperature": "--rl-default-temperature",
        "staleness": "--rollout-staleness",
        "scale": ", or widen the bounds by staleness with --rollout-staleness-scale",
        "veto": "--rollout-token-veto-threshold",
        "record": "--save-rollouts DIR --save-log-probs",
    },
    "verl": {
        "signal": _SIGNAL,
        "temperature": "actor_rollout_ref.rollout.temperature",
        "staleness": "trainer.v1.sampler.max_off_policy_threshold, or async_training.staleness_threshold of the fully "
        "asynchronous trainer",
        "scale": "",
        "veto": "rollout_token_veto_threshold",
        "record": "old_log_probs beside rollout_log_probs",
    },
    "slime": {
        "signal": _SIGNAL,
        "temperature": "--rollout-temperature",
        "staleness": "--update-weights-interval",
        "scale": "",
        "veto": "rs_veto_threshold",
        "record": "log_probs beside rollout_log_probs",
    },
    "nemo-rl": {
        "signal": _SIGNAL,
        "temperature": "policy.generation.temperature",
        "staleness": "grpo.async_grpo.max_trajectory_age_steps",
        "scale": "",
        "veto": "seq_logprob_error_threshold",
        "record": "prev_logprobs beside generation_logprobs",
    },
    "trl": {
        "signal": _SIGNAL,
        "temperature": "temperature",
        "staleness": "steps_per_generation",
        "scale": "",
        "veto": "vllm_importance_sampling_clip_min",
        "record": "old_log_probs and rollout_log_probs of a batch",
    },
    "prime-rl": {
        "signal": _SIGNAL,
        "temperature": "the sampling temperature",
        "staleness": "max_async_level",
        "scale": "",
        "veto": "dppo_mask_low",
        "record": "enable_token_export",
    },
}

# The presets that advice proposes, in the settings of other programs; ``{upper}`` is the bound of the weights, and
# ``{lower_mean}``, ``{upper_mean}`` are bounds on the geometric mean. A comment says what the program does otherwise.
_VERL = ("algorithm:", "  rollout_correction:")
_SLIME_FILE = "# the file of --custom-config-path, beside --use-tis --custom-tis-function-path {module}"
_MIS = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
SETTINGS_OF: Mapping[str, Mapping[str, Sequence[str]]] = {
    "verl": {
        "disabled": (*_VERL, "    rollout_is: null"),
        "decoupled_token_is": (*_VERL, '    rollout_is: "token"', "    rollout_is_threshold: {upper}"),
        "decoupled_token_icepop": (*_VERL, '    rollout_is: "token"', '    rollout_is_threshold: "0.5_5.0"'),
        "decoupled_seq_is": (*_VERL, '    rollout_is: "sequence"', "    rollout_is_threshold: {upper}"),
        "decoupled_geo_rs_token_tis": (
            *_VERL,
            '    rollout_is: "token"',
            "    rollout_is_threshold: {upper}",
            '    rollout_rs: "seq_mean_k1"',
            # verl's code applies these bounds to 1/ρ.
            '    rollout_rs_threshold: "{inverse_lower_mean}_{inverse_upper_mean}"',
        ),
    },
    "slime": {
        "disabled": ("# no --use-tis",),
        "decoupled_token_is": ("--use-tis --tis-clip {upper}",),
        "decoupled_token_icepop": (
            "--use-tis --custom-tis-function-path slime.backends.megatron_utils.loss.icepop_function "
            "--tis-clip-low 0.5 --tis-clip 5.0",
        ),
        "decoupled_seq_is": (_SLIME_FILE.format(module=_MIS), 'tis_level: "sequence"', "tis_upper_bound: {upper}"),
        "decoupled_geo_rs_token_tis": (
            _SLIME_FILE.format(module=_MIS),
            'tis_level: "token"',
            "tis_upper_bound: {upper}",
            "use_rs: true",
            'rs_level: "geometric"',
            "rs_lower_bound: {lower_mean}",
            "rs_upper_bound: {upper_mean}",
            "# slime divides by the tokens before rejection",
        ),
    },
    "nemo-rl": {
        "disabled": ("loss_fn:", "  use_importance_sampling_correction: false"),
        "decoupled_token_is": (
            "loss_fn:",
            "  use_importance_sampling_correction: true",
            '  truncated_importance_sampling_type: "tis"',
            "  truncated_importance_sampling_ratio: {upper}",
        ),
        "decoupled_token_icepop": (
            "loss_fn:",
            "  use_importance_sampling_correction: true",
            '  truncated_importance_sampling_type: "icepop"',
            "  truncated_importance_sampling_ratio_min: 0.5",
            "  truncated_importance_sampling_ratio: 5.0",
        ),
        "decoupled_seq_is": (
            "loss_fn:",
            "  use_importance_sampling_correction: true",
            '  truncated_importance_sampling_type: "tis"',
            "  truncated_importance_sampling_ratio: {upper}",
            "  sequence_level_importance_ratios: true",
            "# NeMo-RL's sequence weights bring GSPO's ratio with them: also set token_level_loss: false",
        ),
        "decoupled_geo_rs_token_tis": (
            "loss_fn:",
            "  use_importance_sampling_correction: true",
            '  truncated_importance_sampling_type: "seq-mask-tis"',
            "  truncated_importance_sampling_ratio_min: {lower_mean}",
            "  truncated_importance_sampling_ratio: {upper_mean}",
            "# NeMo-RL does not truncate the weights of accepted sequences, and divides by the tokens before rejection",
        ),
    },
}
