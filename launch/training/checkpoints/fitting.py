"""Comparison of a checkpoint with a run's flags and prompts; messages name the flags."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from megatron_rc.launch.checkpoint_folders import iteration_folder
from megatron_rc.launch.errors import flag
from megatron_rc.launch.flags.saved_settings import settings_beside
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.training.checkpoints.contents import Kept

_log = logging.getLogger("megatron_rc")

# Sections that shape the model, with the flag that makes an optional one.
_SHAPE = {
    "transformer": "",
    "latent": "--multi-latent-attention",
    "yarn": "--position-embedding-type yarn",
    "experts": "--num-experts",
    "model": "",
}
# Fields of these sections that the shapes of weights do not show, or not always.
FUNCTION = frozenset(
    "num_attention_heads num_query_groups normalization layernorm_epsilon layer_norms qk_norm_over "
    "window_size window_attn_skip_freq quick_geglu glu_linear_offset activation_func_clamp_value "
    "position_embedding_type rotary_base rotary_percent rotary_interleaved no_rope_freq rope_scaling "
    "rope_scaling_factor rotary_seq_len_interpolation_factor yarn_rotary_scaling_factor "
    "yarn_original_max_position_embeddings yarn_beta_fast yarn_beta_slow yarn_mscale yarn_mscale_all_dim "
    "yarn_attention_factor yarn_correction_range_round_to_int moe_router_topk moe_router_pre_softmax "
    "moe_router_score_function moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk rope_type "
    "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim qk_head_dim "
    "qk_pos_emb_head_dim v_head_dim vocab_size".split()
)
# Numbers that the optimizer takes from the checkpoint, and that its schedule does not compare.
_OPTIMIZER_NUMBERS = ("adam_beta1", "adam_beta2", "adam_eps", "sgd_momentum")


def misfit(folder: Path, names: Iterable[str], config: RunConfig, kept: Kept) -> str | None:
    """Return what a checkpoint lacks or has in another form, with the remedy; None: all parts fit.

    Args:
        folder: folder of the checkpoint.
        names: names of its entries.
        config: settings of this run.
        kept: parts of this run.

    Returns:
        The end of a sentence that begins with "checkpoint 40 was written".
    """
    settings = settings_beside(folder)
    first_words = {name.partition(".")[0] for name in names}
    if kept.reference is not None:
        if "reference" not in first_words:
            return (
                "without a reference policy: give --grpo-kl-beta 0, or --finetune, which takes its weights as the "
                "reference"
            )
        problem = _reference_misfit(config, settings)
        if problem is not None:
            return problem
    if kept.critic is not None and "critic" not in first_words:
        return (
            "without a critic: give another --advantage-estimator than gae, or --finetune, which starts one from its "
            "weights"
        )
    if config.checkpoints.no_load_optim:
        return None
    return _optimizer_misfit(config, settings)


def _reference_misfit(config: RunConfig, settings: dict[str, Any]) -> str | None:
    """Name a flag for the reference policy that would do nothing, since the checkpoint holds another one."""
    saved = settings.get("reference") or {}
    for name in ("ref_load", "ref_load_hf"):
        value = getattr(config.reference, name)
        saved_value = saved.get(name)
        if value is not None and value != saved_value:
            origin = f"{flag(name)} {saved_value}" if saved_value else "another reference policy"
            return (
                f"with {origin}, and has that policy still: {flag(name)} {value} would do nothing; drop it, or give "
                "--finetune"
            )
    return None


def _optimizer_misfit(config: RunConfig, settings: dict[str, Any]) -> str | None:
    """Compare the optimizer with that of the saved settings: its kind, the form of its state, and its numbers."""
    saved = settings.get("optimizer") or {}
    if (settings.get("checkpoints") or {}).get("no_save_optim"):
        return "without the optimizer's state (--no-save-optim): give --no-load-optim"
    if saved.get("optimizer", config.optimizer.optimizer) != config.optimizer.optimizer:
        return f"with --optimizer {saved['optimizer']}: give that, or --no-load-optim"
    is_distributed = config.optimizer.use_distributed_optimizer
    if saved.get("use_distributed_optimizer", is_distributed) != is_distributed:
        how = "without" if is_distributed else "with"
        remedy = "drop it" if is_distributed else "give it"
        return (
            f"{how} --use-distributed-optimizer, which keeps the optimizer's state in another form: {remedy}, or give "
            "--no-load-optim"
        )
    problem = _expert_optimizer_misfit(config, settings)
    if problem is not None:
        return problem
    files = config.checkpoints
    if files.override_opt_param_scheduler or files.use_checkpoint_opt_param_scheduler:
        return None
    for name in _OPTIMIZER_NUMBERS:
        value = getattr(config.optimizer, name)
        if saved.get(name, value) != value:
            return (
                f"with {flag(name)} {saved[name]}, this run has {value}: give the same, or "
                "--override-opt-param-scheduler to go on with this run's, or --use-checkpoint-opt-param-scheduler to "
                "keep the checkpoint's"
            )
    return None


def _expert_optimizer_misfit(config: RunConfig, settings: dict[str, Any]) -> str | None:
    """Name the sizes of the layout if experts have an optimizer of their own only in the checkpoint or only here.

    They have one if they are spread over ranks, or if --expert-tensor-parallel-size is not the TP size.
    """
    saved_parallel = settings.get("parallel")
    if config.experts is None or not saved_parallel:
        return None
    ep_size = config.parallel.expert_model_parallel_size
    tp_size = config.parallel.tensor_model_parallel_size
    etp_size = config.expert_tensor_parallel_size
    saved_ep_size = saved_parallel.get("expert_model_parallel_size", ep_size)
    saved_tp_size = saved_parallel.get("tensor_model_parallel_size", tp_size)
    saved_given = (settings.get("megatron") or {}).get("given") or {}
    saved_etp_size = saved_given.get("expert_tensor_parallel_size") or saved_tp_size
    was_apart = saved_ep_size != 1 or saved_etp_size != saved_tp_size
    is_apart = ep_size != 1 or etp_size != tp_size
    if was_apart == is_apart:
        return None
    if was_apart:
        remedy = (
            "an --expert-model-parallel-size above 1 or an --expert-tensor-parallel-size other than the "
            "--tensor-model-parallel-size"
        )
    else:
        remedy = f"--expert-model-parallel-size 1 and --expert-tensor-parallel-size {tp_size}"
    return (
        f"with --expert-model-parallel-size {saved_ep_size} and --expert-tensor-parallel-size {saved_etp_size} at "
        f"--tensor-model-parallel-size {saved_tp_size}, whose optimizer's state does not fit "
        f"--expert-model-parallel-size {ep_size} and --expert-tensor-parallel-size {etp_size} at "
        f"--tensor-model-parallel-size {tp_size}: give {remedy}, or --no-load-optim"
    )


def differences(config: RunConfig, folder: Path, among: Collection[str] | None = None) -> str:
    """Return the first difference between this model's settings and the saved ones; empty: none is known.

    ``among``: fields to compare; None: all fields that shape the model.
    """
    settings = settings_beside(folder)
    if not settings:
        return ""
    for section_name, kind, _ in sections_of(RunConfig):
        section = getattr(config, section_name)
        saved = settings.get(section_name)
        if section_name not in _SHAPE or (section is None and saved is None):
            continue
        if section is None or not isinstance(saved, dict):
            return f"it was written {'without' if saved is None else 'with'} {_SHAPE[section_name]}"
        for option in options_of(kind):
            value = getattr(section, option.field)
            is_compared = among is None or option.field in among
            if is_compared and option.field in saved and saved[option.field] != value:
                return f"{flag(option.flag)} {_typed(value)}; it was written with {_typed(saved[option.field])}"
    return ""


def _typed(value: Any) -> str:
    """Return a value as a launch file has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def warn_of_other_data(config: RunConfig, iteration: int) -> None:
    """Warn if the seed or the prompt files differ from those of the run that wrote the checkpoint of this step."""
    load = config.checkpoints.load
    if not load or not iteration:
        return
    settings = settings_beside(iteration_folder(load, iteration))
    seed = (settings.get("training") or {}).get("seed")
    if seed not in (None, config.training.seed):
        _log.warning(
            "--seed %d differs from the seed of checkpoint %d, which is %d: prompts and samples will differ from an "
            "uninterrupted run",
            config.training.seed,
            iteration,
            seed,
        )
    rows_digest = (settings.get("data") or {}).get("rows_digest")
    if config.data.rows_digest is not None and rows_digest not in (None, config.data.rows_digest):
        _log.warning(
            "the rows of --prompt-data or --eval-data are not those of checkpoint %d: prompts may differ from an "
            "uninterrupted run",
            iteration,
        )
