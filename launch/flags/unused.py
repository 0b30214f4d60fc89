"""Flags that do nothing in a run, because of its other flags: a table, and the values without them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.run_config import RunConfig, flag_options, sections_of
from megatron_rc.launch.run_config.options import as_typed, options_of
from megatron_rc.loss.objectives import OBJECTIVES
from megatron_rc.settings.flags import LOSS_FLAGS

# Estimators without a baseline over the responses to a prompt, or with one that importance weights do not change.
_WITHOUT_BASELINE = (*("remax", "gae", "reinforce-pp", "optimal-token-baseline", "grpo-passk-no-std", "distillation"),)


@dataclass(frozen=True)
class Rule:
    """Condition under which some flags are used."""

    needs: str  # the condition in words
    is_met: Callable[[Any], bool]  # of the values of all flags
    flags: str  # names with underscores

    def __post_init__(self) -> None:
        """Refuse a misspelt name, whose rule would do nothing."""
        for name in self.flags.split():
            if name.replace("_", "-") not in flag_options() and name not in LOSS_FLAGS.values():
                raise ValueError(f"{name} is no flag of a run and none of the loss: correct the rule's names")


# Sections of the configuration that are absent unless a condition is met; the switch itself may be a field of them.
OPTIONAL_SECTIONS = {
    "latent": Rule("--multi-latent-attention", lambda run: run.multi_latent_attention, "multi_latent_attention"),
    "yarn": Rule("--position-embedding-type yarn", lambda run: run.position_embedding_type == "yarn", ""),
    "experts": Rule("--num-experts", lambda run: run.num_experts, "num_experts"),
    "routing": Rule(
        "--num-experts with --moe-enable-routing-replay",
        lambda run: run.num_experts and run.moe_enable_routing_replay,
        "moe_enable_routing_replay",
    ),
    "critic": Rule("--advantage-estimator gae", lambda run: run.advantage_estimator == "gae", ""),
    "distillation": Rule(
        "a teacher",
        lambda run: run.teacher_load_hf or run.teacher_load or run.teacher_url or run.teacher_files,
        "",
    ),
}
# In this order: a flag of one rule may be a condition of a later one.
_TABLE = (
    Rule(
        "an engine, not --load-rollouts",
        lambda run: not run.load_rollouts,
        "eval_interval reward reply reward_workers reward_timeout reward_errors reward_on_error bad_samples "
        "bad_sample_attempts max_turns rollout_stop_token_ids rollout_no_stop_token_ids rollout_stop "
        "rollout_skip_special_tokens dynamic_sampling save_rollouts rollout_engine rollout_url rl_partial_rollouts "
        "attribution_interval teacher_prompt",
    ),
    # Layers.
    Rule("tensor parallel ranks", lambda run: run.tensor_model_parallel_size > 1, "sequence_parallel"),
    Rule("pipeline stages", lambda run: run.pipeline_model_parallel_size > 1, "num_layers_per_virtual_pipeline_stage"),
    Rule(
        "stages without --pipeline-model-parallel-layout",
        lambda run: run.get("pipeline_model_parallel_layout") is None,
        "num_layers_per_virtual_pipeline_stage",
    ),
    Rule("--num-experts", lambda run: run.num_experts, "expert_model_parallel_size moe_enable_routing_replay"),
    Rule(
        "plain rotary positions",
        lambda run: run.position_embedding_type == "rope" and not run.multi_latent_attention,
        "rotary_percent use_rope_scaling rotary_seq_len_interpolation_factor rope_dynamic_factor",
    ),
    Rule(
        "rotary positions",
        lambda run: run.position_embedding_type in ("rope", "yarn") and not run.multi_latent_attention,
        "rotary_interleaved no_rope_freq",
    ),
    Rule("--use-rope-scaling", lambda run: run.use_rope_scaling, "rope_scaling_factor"),
    Rule("layers without --swiglu and --quick-geglu", lambda run: not (run.swiglu or run.quick_geglu), "openai_gelu"),
    Rule(
        "plain attention",
        lambda run: not run.multi_latent_attention,
        "kv_channels add_qkv_bias attention_output_bias group_query_attention num_query_groups",
    ),
    Rule("--qk-layernorm", lambda run: run.qk_layernorm, "qk_norm_over"),
    Rule("--window-size", lambda run: run.window_size, "window_attn_skip_freq"),
    Rule(
        "--swiglu or --quick-geglu",
        lambda run: run.swiglu or run.quick_geglu,
        "glu_linear_offset activation_func_clamp_value",
    ),
    Rule("--group-query-attention", lambda run: run.group_query_attention, "num_query_groups"),
    Rule("--disable-bias-linear", lambda run: run.disable_bias_linear, "add_qkv_bias attention_output_bias"),
    Rule(
        "--rope-type yarn",
        lambda run: run.rope_type == "yarn",
        "rotary_scaling_factor original_max_position_embeddings beta_fast beta_slow mscale mscale_all_dim",
    ),
    Rule(
        "--moe-shared-expert-intermediate-size",
        lambda run: run.moe_shared_expert_intermediate_size,
        "moe_shared_expert_gate",
    ),
    Rule("softmax scores", lambda run: run.moe_router_score_function == "softmax", "moe_router_pre_softmax"),
    Rule("sigmoid scores", lambda run: run.moe_router_score_function == "sigmoid", "moe_router_enable_expert_bias"),
    Rule("a balancing loss", lambda run: run.moe_router_load_balancing_type != "none", "moe_aux_loss_coeff"),
    Rule(
        "--moe-routing-replay-source rollout",
        lambda run: run.moe_routing_replay_source == "rollout",
        "moe_routing_replay_check_interval",
    ),
    Rule(
        "--recompute-granularity full",
        lambda run: run.recompute_granularity == "full",
        "recompute_method recompute_num_layers",
    ),
    Rule("--rl-use-sequence-packing", lambda run: run.rl_use_sequence_packing, "rl_sequence_packing_bin_size"),
    # Prompts and evaluations.
    Rule("--prompt-data", lambda run: run.prompt_data, "eval_data input_key label_key tools_key overlong_prompts"),
    Rule("--apply-chat-template", lambda run: run.apply_chat_template, "chat_template_kwargs tools_key"),
    Rule(
        "--eval-interval",
        lambda run: run.eval_interval,
        "eval_data eval_problems eval_samples eval_temperature eval_answers",
    ),
    Rule("--eval-data", lambda run: run.eval_data, "eval_input_key eval_label_key"),
    # Rewards and advantages.
    Rule("--max-turns above 1", lambda run: run.max_turns > 1, "reply"),
    Rule("--bad-samples resample", lambda run: run.bad_samples == "resample", "bad_sample_attempts"),
    Rule("--reward-errors continue", lambda run: run.reward_errors == "continue", "reward_on_error"),
    Rule("--overlong penalise", lambda run: run.overlong == "penalise", "overlong_buffer overlong_penalty_factor"),
    Rule("--grpo-group-size above 1", lambda run: run.grpo_group_size > 1, "dynamic_sampling advantage_baseline"),
    Rule("an estimator with a discount", lambda run: run.advantage_estimator in ("reinforce-pp", "gae"), "gamma"),
    Rule("--advantage-estimator gae", lambda run: run.advantage_estimator == "gae", "gae_lambda"),
    Rule("--advantage-estimator gpg", lambda run: run.advantage_estimator == "gpg", "gpg_f_norm"),
    Rule(
        "an estimator other than remax and distillation",
        lambda run: run.advantage_estimator not in ("remax", "distillation"),
        "advantage_scope",
    ),
    Rule("an estimator of rewards", lambda run: run.advantage_estimator != "distillation", "kl_in_reward"),
    Rule(
        "--advantage-estimator distillation", lambda run: run.advantage_estimator == "distillation", "teacher_weights"
    ),
    Rule("--teacher-url", lambda run: run.teacher_url, "teacher_server teacher_top_k save_teacher"),
    Rule("--teacher-server vllm", lambda run: run.teacher_server == "vllm", "teacher_model"),
    Rule("--teacher-url or --teacher-files", lambda run: run.teacher_url or run.teacher_files, "teacher_tail"),
    Rule(
        "an estimator with a baseline of each prompt",
        lambda run: run.advantage_estimator not in _WITHOUT_BASELINE,
        "advantage_baseline",
    ),
    Rule(
        "--advantage-baseline weighted",
        lambda run: run.advantage_baseline == "weighted",
        "advantage_baseline_weights advantage_baseline_bound",
    ),
    Rule(
        "--advantage-baseline-weights ratio",
        lambda run: run.advantage_baseline_weights == "ratio",
        "advantage_baseline_bound",
    ),
    Rule("--kl-in-reward", lambda run: run.kl_in_reward, "kl_in_reward_estimator"),
    Rule("a critic's learning rate that falls", lambda run: run.critic_lr_decay_style != "constant", "critic_min_lr"),
    # Schedules.
    Rule("--train-samples", lambda run: run.train_samples, "lr_decay_samples lr_warmup_samples lr_wsd_decay_samples"),
    Rule(
        "--lr-decay-style WSD",
        lambda run: run.lr_decay_style == "WSD",
        "lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples",
    ),
    Rule("--lr-ess-scaling", lambda run: run.lr_ess_scaling, "lr_ess_base"),
    Rule(
        "--weight-decay-incr-style linear or cosine",
        lambda run: run.weight_decay_incr_style != "constant",
        "start_weight_decay end_weight_decay",
    ),
    # Checkpoints and logs.
    Rule(
        "--save with --save-interval",
        lambda run: run.save and run.save_interval,
        "async_save keep_last save_retain_interval continue_after_failed_save",
    ),
    Rule("--save", lambda run: run.save, "no_save_optim"),
    Rule("--save-hf", lambda run: run.save_hf, "save_hf_interval"),
    Rule("--load", lambda run: run.load, "finetune no_load_optim verify_integrity"),
    Rule(
        "the optimizer of --load",
        lambda run: run.load and not run.finetune and not run.no_load_optim,
        "override_opt_param_scheduler use_checkpoint_opt_param_scheduler",
    ),
    Rule("--wandb-project", lambda run: run.wandb_project, "wandb_exp_name wandb_entity wandb_save_dir"),
    Rule("--log-timers-to-tensorboard", lambda run: run.log_timers_to_tensorboard, "timing_log_level"),
    Rule("--profile", lambda run: run.profile, "profile_step_start profile_step_end profile_ranks"),
    # Rollouts and engines.
    Rule("--save-rollouts", lambda run: run.save_rollouts, "save_log_probs"),
    Rule(
        "--rollout-top-p, --rollout-top-k or --rollout-min-p",
        lambda run: run.rollout_top_p < 1 or run.rollout_top_k or run.rollout_min_p,
        "entropy_over_support",
    ),
    Rule("--rl-partial-rollouts", lambda run: run.rl_partial_rollouts, "rollout_max_versions"),
    Rule(
        "no --rollout-staleness",
        lambda run: not run.rollout_staleness,
        "sync_probe_interval attribution_interval",
    ),
    Rule("--attribution-interval", lambda run: run.attribution_interval, "attribution_nodes attribution_check"),
)


def _all_rules() -> Iterator[Rule]:
    """Yield the rules of whole sections, of single flags, and of settings that not every engine takes."""
    for name, section, is_optional in sections_of(RunConfig):
        if is_optional:
            rule = OPTIONAL_SECTIONS[name]
            flags = [option.flag for option in options_of(section) if option.flag != rule.flags]
            yield Rule(rule.needs, rule.is_met, " ".join(flags))
    yield from _TABLE
    for name, (_, option) in flag_options().items():
        engines = [engine for engine, kind in ENGINES.items() if option.field in kind.settings]
        if engines:
            yield Rule(f"--rollout-engine {' or '.join(engines)}", _is_engine_of(engines), name.replace("-", "_"))


def _is_engine_of(engines: list[str]) -> Callable[[Any], bool]:
    return lambda run: run.rollout_engine in engines


# Rules of flags alone.
RULES = tuple(_all_rules())
# Rules that need the correction, the objective, the device, and defaults that follow from other flags.
LATER_RULES = (
    Rule("--grpo-kl-beta above 0", lambda run: run.loss.kl_coef, "kl_estimator kl_importance_weight"),
    Rule(
        "--distillation-coef or --policy-loss distill",
        lambda run: run.loss.distils,
        "distillation_kind distillation_beta",
    ),
    Rule(
        "an objective with bounds",
        lambda run: run.loss.algorithm is None or OBJECTIVES[run.loss.algorithm].clips,
        "grpo_clamp_eps_lower grpo_clamp_eps_upper",
    ),
    Rule(
        "--grpo-kl-beta or --kl-in-reward",
        lambda run: run.loss.kl_coef or run.kl_in_reward,
        "ref_load ref_load_hf ref_update_interval",
    ),
    Rule("a correction before the loss", lambda run: not run.correction.corrects_in_loss, "always_score"),
    Rule(
        "--train-iters of a whole rollout batch",
        lambda run: (
            run.train_iters * run.global_batch_size
            >= run.grpo_prompts_per_step * run.grpo_group_size * run.grpo_iterations
        ),
        "save_log_probs",
    ),
    Rule("a GPU", lambda run: not run.on_cpu, "record_memory_history rollout_colocate"),
    Rule("as many --train-iters", lambda run: run.train_iters >= (run.doctor_interval or 0), "doctor_interval"),
    Rule("as many --train-iters", lambda run: run.train_iters >= (run.save_hf_interval or 0), "save_hf_interval"),
    Rule(
        "more --train-iters",
        lambda run: run.train_iters > (10 if run.profile_step_start is None else run.profile_step_start),
        "profile",
    ),
)


def make_sections(values: Mapping[str, Any], names: Collection[str] | None = None) -> dict[str, Any]:
    """Make sections of the values of all flags; None for a section that this run does not have.

    Args:
        values: values of all flags, as ``Values``.
        names: names of the sections; None: of all.
    """
    sections: dict[str, Any] = {}
    for name, section, is_optional in sections_of(RunConfig):
        if names is not None and name not in names:
            continue
        if is_optional and not OPTIONAL_SECTIONS[name].is_met(values):
            sections[name] = None
            continue
        options = {option.field: option for option in options_of(section)}
        fields = {}
        for field in dataclasses.fields(section):
            option = options.get(field.name)
            value = values[option.flag if option else field.name]
            fields[field.name] = not value if option and option.inverted else value
        sections[name] = section(**fields)
    return sections


def without_unused(values: Any, given: Mapping[str, Any], rules: Iterable[Rule] = RULES) -> tuple[Any, tuple[str, ...]]:
    """Return the values with unused flags at their defaults, and the given ones among these flags, in words.

    Args:
        values: values of all flags, as ``Values``.
        given: values of the flags that the user gave.
        rules: :data:`RULES`, or :data:`LATER_RULES`.
    """
    unused: list[str] = []
    for rule in rules:
        if rule.is_met(values):
            continue
        for name in rule.flags.split():
            _, option = flag_options().get(name.replace("_", "-"), ("", None))
            default = option.default if option else None
            if name in given and values[name] != default:
                unused.append(f"{as_typed(name, given[name])} (needs {rule.needs})")
            # Flags of the loss keep their values.
            if option:
                values = values.also({name: default})
    return values, tuple(unused)


def needs_in_words(name: str) -> str:
    """Return the end of a flag's help text: the conditions under which it is used."""
    needs = [rule.needs for rule in RULES if name in rule.flags.split()]
    return f"; needs {' and '.join(needs)}" if needs else ""
