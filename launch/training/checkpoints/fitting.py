"""Comparison of a checkpoint with a run's flags and prompts; messages name the flags."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_rc.launch.checkpoint_folders import iteration_folder
from megatron_rc.launch.errors import flag
from megatron_rc.launch.run_config import RunConfig, sections_of
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.training.checkpoints.contents import Kept
from megatron_rc.launch.training.checkpoints.reader import CheckpointReader
from megatron_rc.launch.training.checkpoints.saved_settings import settings_beside

_log = logging.getLogger("megatron_rc")

# Sections that shape the model.
_SHAPE = {"transformer": "", "latent": "--multi-latent-attention", "experts": "--num-experts", "model": ""}
# Fields of these sections that the shapes of weights do not show, or not always.
FUNCTION = frozenset(
    "num_attention_heads num_query_groups normalization layernorm_epsilon rotary_base rotary_percent rope_scaling "
    "rope_scaling_factor moe_router_topk moe_router_pre_softmax moe_router_score_function "
    "moe_router_topk_scaling_factor moe_router_num_groups moe_router_group_topk rope_type rotary_scaling_factor "
    "original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim qk_head_dim qk_pos_emb_head_dim "
    "v_head_dim vocab_size".split()
)


def misfit(where: str, reader: CheckpointReader, config: RunConfig, kept: Kept) -> str | None:
    """Return a sentence about a part of the checkpoint that is missing or has another form; None: all parts fit.

    ``where`` names folder and checkpoint in the sentence.
    """
    names, folder = list(reader.index.state_dict_metadata), reader.folder
    problem = _reference_misfit(where, folder, names, config) if kept.reference is not None else None
    if problem is None and kept.critic is not None and not _has(names, "critic."):
        problem = (
            f"{where} was written without a critic: give another --advantage-estimator than gae, or --finetune, which "
            "starts one from its weights"
        )
    if problem is not None or config.checkpoints.no_load_optim:
        return problem
    if "opt_param_scheduler" not in reader.common():
        return f"{where} was written without the optimizer's state (--no-save-optim): give --no-load-optim"
    return _optimizer_misfit(where, names, config) or _experts_misfit(where, folder, config)


def _has(names: Iterable[str], prefix: str) -> bool:
    return any(name.startswith(prefix) for name in names)


def _reference_misfit(where: str, folder: Path, names: Iterable[str], config: RunConfig) -> str | None:
    if not _has(names, "reference."):
        return (
            f"{where} was written without a reference policy: give --grpo-kl-beta 0, or --finetune, which takes its "
            "weights as the reference"
        )
    before = settings_beside(folder).get("reference") or {}
    for name in ("ref_load", "ref_load_hf"):
        now, its = getattr(config.reference, name), before.get(name)
        if now != its and now is not None:
            began = f"{flag(name)} {its}" if its else "another reference policy"
            return (
                f"{where} was written with {began}, and has that policy still: {flag(name)} {now} would do nothing; "
                "drop it, or give --finetune"
            )
    return None


def _optimizer_misfit(where: str, names: Iterable[str], config: RunConfig) -> str | None:
    wants = config.optimizer
    is_adam = _has(names, "optimizer.state.exp_avg.")
    if is_adam != (wants.optimizer == "adam"):
        written = "adam" if is_adam else "sgd"
        return f"{where} was written with --optimizer {written}: give that, or --no-load-optim"
    is_distributed = _has(names, "optimizer.state.param.")
    if is_distributed != wants.use_distributed_optimizer:
        written, now = ("with", "give it") if is_distributed else ("without", "drop it")
        return (
            f"{where} was written {written} --use-distributed-optimizer, which keeps the optimizer's state in another "
            f"form: {now}, or give --no-load-optim"
        )
    return None


def _experts_misfit(where: str, folder: Path, config: RunConfig) -> str | None:
    """Refuse a change between spread and unspread experts: Megatron gives spread experts another optimizer."""
    before = (settings_beside(folder).get("parallel") or {}).get("expert_model_parallel_size")
    now = config.parallel.expert_model_parallel_size
    if config.experts is None or before is None or (before == 1) == (now == 1):
        return None
    other = "--expert-model-parallel-size 1" if before == 1 else "an --expert-model-parallel-size above 1"
    return (
        f"{where} was written with --expert-model-parallel-size {before}, whose optimizer's state does not fit "
        f"{now}: give {other}, or --no-load-optim"
    )


def differences(config: RunConfig, folder: Path, among: Collection[str] | None = None) -> str:
    """Return the first difference between this model's settings and the saved ones; empty: none is known.

    ``among``: fields to compare; None: all fields that shape the model.
    """
    kept = settings_beside(folder)
    if not kept:
        return ""
    for name, kind, _ in sections_of(RunConfig):
        section, before = getattr(config, name), kept.get(name)
        if name not in _SHAPE or (section is None and before is None):
            continue
        if section is None or not isinstance(before, dict):
            return f"it was written {'without' if before is None else 'with'} {_SHAPE[name]}"
        for option in options_of(kind):
            mine, its = getattr(section, option.field), before.get(option.field)
            if option.field in before and mine != its and (among is None or option.field in among):
                shown = [str(one).lower() if isinstance(one, bool) else str(one) for one in (mine, its)]
                return f"{flag(option.flag)} {shown[0]}; it was written with {shown[1]}"
    return ""


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
