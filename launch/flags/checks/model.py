"""The model without its experts, how it computes, and its optimizer."""

from __future__ import annotations

from megatron_rc.launch.errors import ConfigurationError, flag, require, require_multiple
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.launch.run_config.megatron import LatentSection, OptimizerSection
from megatron_rc.launch.run_config.options import options_of
from megatron_rc.launch.run_config.training import ScheduleSection


def check_model(config: RunConfig) -> None:
    """The shape of the layers, the vocabulary, recomputation, and what the layers are made of."""
    _check_layers(config)
    _check_vocabulary(config)
    _check_recomputation(config)
    if config.model.transformer_impl == "transformer_engine":
        if config.launch.on_cpu:
            raise ConfigurationError("--transformer-impl transformer_engine needs a CUDA device: use local on the CPU")
        require("transformer_engine", "--transformer-impl transformer_engine", "gpu")


def _check_layers(config: RunConfig) -> None:
    layers, model, length = config.transformer, config.model, config.training.seq_length
    heads, groups = layers.num_attention_heads, layers.num_query_groups
    tp = ("tensor_model_parallel_size", config.parallel.tensor_model_parallel_size)
    require_multiple("num_attention_heads", heads, *tp)
    require_multiple("num_query_groups", groups, *tp)
    require_multiple("num_attention_heads", heads, "num_query_groups", groups)
    require_multiple("ffn_hidden_size", layers.ffn_hidden_size, *tp)
    _check_latents(config)
    _check_positions_and_activation(config)
    if length > model.max_position_embeddings:
        raise ConfigurationError(
            f"--seq-length {length} is longer than --max-position-embeddings {model.max_position_embeddings}"
        )
    if layers.add_qkv_bias and layers.add_bias_linear:
        raise ConfigurationError("--add-qkv-bias does nothing without --disable-bias-linear: all layers have a bias")
    for name, rate in (("attention_dropout", layers.attention_dropout), ("hidden_dropout", layers.hidden_dropout)):
        if rate != 0:
            raise ConfigurationError(f"{flag(name)} {rate} must be 0: π_old and π_θ would differ by noise")


def _check_latents(config: RunConfig) -> None:
    """Multi-latent attention, whose heads have widths of their own."""
    latent, layers, parallel = config.latent, config.transformer, config.parallel
    if latent is None:
        return
    if not config.launch.on_cpu:
        require("transformer_engine", "--multi-latent-attention on a GPU", "gpu")
    if latent.qk_pos_emb_head_dim % 2:
        raise ConfigurationError(f"--qk-pos-emb-head-dim {latent.qk_pos_emb_head_dim} must be even: it is rotated")
    for name, is_wrong, remedy in (
        ("--group-query-attention", layers.num_query_groups != layers.num_attention_heads, "drop it"),
        ("--add-qkv-bias", layers.add_qkv_bias, "drop it"),
        ("--qk-l2-norm", config.megatron.given.get("qk_l2_norm"), "drop it"),
        ("--no-rope-freq", config.megatron.given.get("no_rope_freq"), "drop it"),
        ("--use-rope-scaling", config.model.rope_scaling, "use --rope-type yarn"),
        (f"--rotary-percent {config.model.rotary_percent}", config.model.rotary_percent != 1, "drop it"),
        (
            f"--position-embedding-type {config.model.position_embedding_type}",
            config.model.position_embedding_type != "rope",
            "use rope",
        ),
    ):
        if is_wrong:
            raise ConfigurationError(f"{name} does not go with --multi-latent-attention: {remedy}")
    if parallel.tensor_model_parallel_size > 1 and not parallel.sequence_parallel:
        raise ConfigurationError(
            f"--multi-latent-attention with --tensor-model-parallel-size {parallel.tensor_model_parallel_size} needs "
            "--sequence-parallel: without it Megatron leaves out other ranks' heads in the gradient of the rotated keys"
        )
    stretched = ("rotary_scaling_factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale")
    for option in options_of(LatentSection) if latent.rope_type == "rope" else ():
        value = getattr(latent, option.field)
        if option.field in (*stretched, "mscale_all_dim") and value != option.default:
            raise ConfigurationError(f"{flag(option.flag)} {value} does nothing with --rope-type rope: use yarn")


def _check_positions_and_activation(config: RunConfig) -> None:
    layers, model, length = config.transformer, config.model, config.training.seq_length
    if model.position_embedding_type == "rope":
        _check_rotated(config)
    for name, is_given in (("use_rope_scaling", model.rope_scaling), ("rotary_percent", model.rotary_percent != 1)):
        if is_given and model.position_embedding_type != "rope":
            raise ConfigurationError(
                f"{flag(name)} does nothing with --position-embedding-type {model.position_embedding_type}: use rope"
            )
    if model.openai_gelu and layers.gated_linear_unit:
        raise ConfigurationError("--openai-gelu does nothing with --swiglu, which has no GELU: drop one of them")
    if model.sliding_window is not None and length > model.sliding_window:
        raise ConfigurationError(
            f"--seq-length {length} is longer than --sliding-window {model.sliding_window}, beyond which the published "
            "model does not look back and this one would: use shorter sequences"
        )


def _check_rotated(config: RunConfig) -> None:
    """Dimensions are rotated in pairs; those of latent attention have a check of their own."""
    width, percent = config.transformer.kv_channels, config.model.rotary_percent
    if percent > 1:
        raise ConfigurationError(f"--rotary-percent {percent} must be at most 1: it is a share of a head's width")
    rotated = int(width * percent)
    if config.latent is None and (rotated < 2 or rotated % 2):
        raise ConfigurationError(
            f"rotary embeddings need an even number of dimensions, got {rotated}: --kv-channels {width}, "
            f"--rotary-percent {percent}"
        )


def _check_vocabulary(config: RunConfig) -> None:
    padded, tp = config.model.padded_vocab_size, config.parallel.tensor_model_parallel_size
    if padded % tp:
        raise ConfigurationError(
            f"--padded-vocab-size {padded} must be a multiple of --tensor-model-parallel-size {tp}"
        )
    if padded < config.model.vocab_size:
        raise ConfigurationError(
            f"--padded-vocab-size {padded} is smaller than the vocabulary of {config.model.vocab_size}"
        )


def _check_recomputation(config: RunConfig) -> None:
    compute = config.compute
    is_full = compute.recompute_granularity == "full"
    if is_full and not (compute.recompute_method and compute.recompute_num_layers):
        raise ConfigurationError("--recompute-granularity full needs --recompute-method and --recompute-num-layers")
    if not is_full and (compute.recompute_method or compute.recompute_num_layers):
        raise ConfigurationError(
            "--recompute-method and --recompute-num-layers do nothing without --recompute-granularity full"
        )


def check_optimizer(config: RunConfig) -> None:
    """The optimizer's numbers and the schedule of its learning rate."""
    optimizer, schedule = config.optimizer, config.schedule
    for name, beta in (("adam_beta1", optimizer.adam_beta1), ("adam_beta2", optimizer.adam_beta2)):
        if not 0 <= beta < 1:
            raise ConfigurationError(f"{flag(name)} {beta} must lie in [0, 1)")
    if optimizer.min_lr > optimizer.lr:
        raise ConfigurationError(f"--min-lr {optimizer.min_lr} is above --lr {optimizer.lr}")
    _check_schedule(optimizer, schedule)


def _check_schedule(optimizer: OptimizerSection, schedule: ScheduleSection) -> None:
    share = schedule.lr_warmup_fraction
    if share is not None and (schedule.lr_warmup_iters or share >= 1):
        raise ConfigurationError(
            f"--lr-warmup-fraction {share} must be below 1, and stand without --lr-warmup-iters "
            f"{schedule.lr_warmup_iters}"
        )
    if schedule.warmup_steps >= schedule.lr_decay_iters:
        raise ConfigurationError(
            f"--lr-warmup-iters {schedule.lr_warmup_iters} must be below --lr-decay-iters {schedule.lr_decay_iters}"
        )
    if schedule.lr_warmup_init > optimizer.lr:
        raise ConfigurationError(f"--lr-warmup-init {schedule.lr_warmup_init} is above --lr {optimizer.lr}")
    end, is_wsd = schedule.lr_wsd_decay_iters, schedule.lr_decay_style == "WSD"
    if is_wsd != (end is not None):
        raise ConfigurationError(
            f"--lr-decay-style {schedule.lr_decay_style} with --lr-wsd-decay-iters {end}: WSD needs both, or neither"
        )
    decay = (schedule.start_weight_decay, schedule.end_weight_decay)
    if (schedule.weight_decay_incr_style == "constant") != (decay == (None, None)) or (None in decay and any(decay)):
        raise ConfigurationError(
            f"--weight-decay-incr-style {schedule.weight_decay_incr_style} with --start-weight-decay {decay[0]} and "
            f"--end-weight-decay {decay[1]}: a constant one is --weight-decay, linear and cosine need both"
        )
