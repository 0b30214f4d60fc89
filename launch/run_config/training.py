"""Settings of the launcher's own: processes, model, batches, schedule, checkpoints and logs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import PurePath
from typing import Literal

import torch

from megatron_rc.launch.errors import ConfigurationError
from megatron_rc.launch.run_config.options import Section, option

# PyTorch's generators take 64 bits; the seeds of ranks and steps are a little larger than the run's.
_LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class LaunchSection(Section):
    """Name, folder and processes of the run; ``on_cpu``: gloo on the CPU, ``world_size``: number of processes."""

    cpu: bool = option("train on the CPU with gloo even if there is a GPU")
    run_name: str = option("name of the run's folder; default: name of the launch file, or 'ppo'")
    runs_dir: str = option("folder that holds the runs' folders", default="runs", metavar="DIR")
    distributed_timeout_minutes: int = option("minutes that one collective may take", default=10)
    rollout_wait_minutes: float = option(
        "minutes that all answers to a rollout batch, a check or an evaluation may take", default=240.0
    )
    on_cpu: bool
    world_size: int

    def __post_init__(self) -> None:
        """Check that the run's folder is inside the folder of runs."""
        super().__post_init__()
        name = PurePath(self.run_name)
        if name.is_absolute() or ".." in name.parts:
            self.refuse("run_name", because="must stay inside --runs-dir: give the folder as --runs-dir")

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, kw_only=True)
class ModelSection(Section):
    """Positions, vocabulary and implementation of the model."""

    max_position_embeddings: int = option(
        "tokens of the longest sequence that the model accepts; default: --seq-length"
    )
    position_embedding_type: Literal["learned_absolute", "rope", "yarn"] = option(
        "kind of position embedding; yarn: rotary, with frequencies that YaRN stretches", default="learned_absolute"
    )
    rotary_base: int = option("base of the rotary frequencies", default=10000)
    rotary_percent: float = option("share of a head's width that is rotated, at most 1", default=1.0, most=1)
    rope_scaling: bool = option("lower the low rotary frequencies as Llama 3.1 does", flag="use_rope_scaling")
    rope_scaling_factor: float = option("divisor of the low rotary frequencies", default=8.0)
    rotary_seq_len_interpolation_factor: float | None = option(
        "divisor of all rotary positions (linear scaling); default: none"
    )
    rope_dynamic_factor: float | None = option(
        "factor of the published model's dynamic NTK scaling beyond --max-position-embeddings; default: none"
    )
    sliding_window: int | None = option(
        "attention window of the published model in tokens; --seq-length must not exceed it; default: no window"
    )
    attention_output_bias: bool = option("give the output projection of the attention a bias")
    layer_norms: Literal["before", "after", "around"] = option(
        "place of the norms in a layer: before attention and MLP, after both, or before and after",
        default="before",
    )
    qk_norm_over: Literal["head", "all_heads"] = option(
        "numbers that --qk-layernorm normalises together: of each head, or of all heads", default="head"
    )
    openai_gelu: bool = option("compute GELU by its tanh approximation, as the published GPT-2 does")
    quick_geglu: bool = option("use a gated MLP with x · sigmoid(1.702 x) as its activation; sets --swiglu")
    untie_embeddings_and_output_weights: bool = option(
        "give the output layer weights of its own instead of the embedding's"
    )
    vocab_size: int = option("tokens of the vocabulary; default: the tokenizer's")
    make_vocab_size_divisible_by: int = option(
        "the padded vocabulary is a multiple of this number times the TP size", default=128
    )
    padded_vocab_size: int = option(
        "rows of the embedding; default: --vocab-size padded by --make-vocab-size-divisible-by"
    )
    hf_model_type: str | None = option(
        "Hugging Face model_type of the exported model; default: the one of --load-hf, or the first that fits"
    )
    transformer_impl: Literal["local", "transformer_engine"] = option(
        "implementation of the layers; default: transformer_engine if it is installed and there is a GPU, else local"
    )
    kind: Literal["gpt", "hybrid"] = option(
        "class of the model: gpt, Megatron-Core's GPTModel, or hybrid, its successor HybridModel with the same layers, "
        "weights and checkpoints",
        flag="model",
        default="gpt",
    )

    def __post_init__(self) -> None:
        """Check that the embedding has a row for each token."""
        super().__post_init__()
        if self.padded_vocab_size < self.vocab_size:
            self.refuse("padded_vocab_size", because=f"is less than the {self.vocab_size} tokens")

    @property
    def is_rotary(self) -> bool:
        """Whether queries and keys are rotated by their positions."""
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is Megatron-Core's HybridModel."""
        return self.kind == "hybrid"


@dataclass(frozen=True, kw_only=True)
class TrainingSection(Section):
    """Batches, optimizer steps and checks of a step."""

    seq_length: int = option("tokens of a sequence: prompt, response and padding", required=True)
    micro_batch_size: int = option("sequences of one forward-backward pass", default=1)
    optimizer_offload: bool = option("keep the policy's optimizer state in host memory between optimizer steps")
    global_batch_size: int = option("sequences of one optimizer step, over all ranks", required=True)
    train_iters: int = option("optimizer steps of the run, including those before a loaded checkpoint", required=True)
    fused_linear_log_probs: bool = option("compute log-probs from hidden states in chunks, without storing logits")
    rl_use_sequence_packing: bool = option("pack sequences of a micro-batch one after another, without padding")
    rl_sequence_packing_bin_size: int = option(
        "most tokens of a packed micro-batch; default: --micro-batch-size · --seq-length"
    )
    check_for_nan_in_loss_and_grad: bool = option(
        "treat a step with a loss or gradient norm that is not finite as a bad step", default=True
    )
    check_for_spiky_loss: bool = option(
        "treat a step whose loss is ten times the largest of the first 100 steps as a bad step"
    )
    check_for_large_grads: bool = option(
        "treat a step whose gradient norm is ten times the largest of the first 100 steps as a bad step"
    )
    train_samples: int | None = option("sequences of the run, instead of --train-iters")
    seed: int = option("seed of weights, prompts and sampling", default=1234, not_negative=True, most=_LARGEST_SEED)


@dataclass(frozen=True, kw_only=True)
class ScheduleSection(Section):
    """Learning rate and weight decay over the optimizer steps; steps that were given as sequences may be fractions."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "decay of the learning rate from --lr to --min-lr", default="linear"
    )
    lr_decay_iters: int = option("optimizer steps of the learning rate's decay; default: --train-iters")
    lr_decay_samples: int | None = option("sequences of the learning rate's decay; default: --train-samples")
    lr_warmup_iters: int = option("optimizer steps of linear warm-up", default=0, not_negative=True)
    lr_warmup_samples: int = option("sequences of linear warm-up", default=0, not_negative=True)
    lr_warmup_fraction: float | None = option(
        "linear warm-up as a share of --lr-decay-iters, below 1", not_negative=True, below=1
    )
    lr_warmup_init: float = option("learning rate at the start of the warm-up", default=0.0, not_negative=True)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "shape of the final decay of a WSD schedule", default="exponential"
    )
    lr_wsd_decay_iters: int | None = option("optimizer steps of the final decay of a WSD schedule")
    lr_wsd_decay_samples: int | None = option("sequences of the final decay of a WSD schedule")
    lr_ess_scaling: Literal["sqrt", "linear"] | None = option(
        "multiply each step's learning rate by the effective sample size of its responses, as a share of them, divided "
        "by --lr-ess-base and at most 1, or by its root (sqrt, for Adam); default: no"
    )
    lr_ess_base: float = option(
        "effective sample size, as a share of the responses, from which on the learning rate is not reduced",
        default=1.0,
        most=1,
    )
    start_weight_decay: float | None = option("weight decay of the first step", not_negative=True)
    end_weight_decay: float | None = option("weight decay of the last step", not_negative=True)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "change of the weight decay; linear and cosine need --start-weight-decay and --end-weight-decay",
        default="constant",
    )

    def __post_init__(self) -> None:
        """Check that warm-up and decay go together, and that each style has the numbers that it needs."""
        super().__post_init__()
        if self.lr_warmup_iters and self.lr_warmup_fraction is not None:
            self.refuse("lr_warmup_iters", "lr_warmup_fraction", because="are two lengths of the warm-up: drop one")
        if self.lr_warmup_iters >= self.lr_decay_iters:
            self.refuse("lr_warmup_iters", because=f"must be below {self.typed('lr_decay_iters')}")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_iters is None:
            self.refuse("lr_decay_style", because="needs --lr-wsd-decay-iters")
        has_both_ends = self.start_weight_decay is not None and self.end_weight_decay is not None
        if self.weight_decay_incr_style != "constant" and not has_both_ends:
            self.refuse("weight_decay_incr_style", because="needs --start-weight-decay and --end-weight-decay")

    @property
    def warmup_steps(self) -> float:
        """Optimizer steps of the warm-up; may be a fraction."""
        share = self.lr_warmup_fraction
        return self.lr_warmup_iters if share is None else share * self.lr_decay_iters

    def ess_factor(self, eff_sample_size: float) -> float:
        """Return the factor of ``--lr-ess-scaling``, in [0, 1].

            sqrt(min(1, ESS / base)) or min(1, ESS / base)

        Huang et al. 2026, "Stable Asynchrony: Variance-Controlled Off-Policy RL for LLMs", arXiv 2602.17616.

        Args:
            eff_sample_size: effective sample size of a step's responses, as a share of them.
        """
        # A share below 0 can come from rounding alone. It must not turn the step around.
        share = min(1.0, max(0.0, eff_sample_size / self.lr_ess_base))
        return math.sqrt(share) if self.lr_ess_scaling == "sqrt" else share


@dataclass(frozen=True, kw_only=True)
class CheckpointSection(Section):
    """Checkpoints and Hugging Face directories that are read and written."""

    save: str | None = option("folder that checkpoints are written to; default: none is written", metavar="DIR")
    save_interval: int | None = option("optimizer steps between checkpoints; default: one at the end")
    ckpt_format: Literal["torch_dist"] = option("format of checkpoints", default="torch_dist")
    async_save: bool = option("write checkpoints in the background while training goes on")
    keep_last: int | None = option("newest checkpoints to keep; older ones are removed; default: all")
    save_retain_interval: int | None = option(
        "keep checkpoints at multiples of this many steps and the newest --keep-last (1 if not given); remove others"
    )
    continue_after_failed_save: bool = option("go on if a checkpoint before the end cannot be written")
    save_hf: str | None = option(
        "write the model as a Hugging Face directory, DIR/step-N, at the end of the run; default: no", metavar="DIR"
    )
    save_hf_interval: int | None = option("also write --save-hf every N optimizer steps; default: at the end only")
    load: str | None = option(
        "go on from the newest checkpoint in this folder, or from --ckpt-step; an empty folder must be --save, and the "
        "run starts at step 0; default: start at step 0",
        metavar="DIR",
    )
    load_hf: str | None = option(
        "start from this Hugging Face directory: its weights, shape and tokenizer", metavar="DIR"
    )
    from_scratch: bool = option(
        "start from random weights and, without --tokenizer-model, with one token a character; a checkpoint of --load "
        "is resumed all the same"
    )
    weights_bridge: Literal["mbridge", "megatron-bridge", "none"] = option(
        "converter of weights to and from Hugging Face's names; none: the tables of this program; default: mbridge on "
        "a GPU if it is installed and knows the model, megatron-bridge for a --load-hf that no table has, else none"
    )
    ckpt_step: int | None = option("step of the checkpoint of --load; default: the newest")
    finetune: bool = option("take only the weights of --load, and start at step 0")
    no_save_optim: bool = option("leave the optimizer out of checkpoints")
    no_load_optim: bool = option("do not load the optimizer of --load")
    verify_integrity: bool = option("compare every file of --load with its checksum before it is read", default=True)
    override_opt_param_scheduler: bool = option(
        "use the learning rate, schedule, weight decay and optimizer of the flags, not the checkpoint's"
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        "use the learning rate, schedule, weight decay and optimizer of the checkpoint, not the flags'"
    )

    def __post_init__(self) -> None:
        """Check that checkpoints are written and read as the flags promise."""
        super().__post_init__()
        if self.save_interval is not None and not self.save:
            self.refuse("save_interval", because="needs --save DIR: give both, or neither")
        if self.save_interval and self.save_retain_interval and self.save_retain_interval % self.save_interval:
            self.refuse("save_retain_interval", because=f"must be a multiple of {self.typed('save_interval')}")
        if self.ckpt_step is not None and not self.load:
            self.refuse("ckpt_step", because="needs --load DIR: give both, or neither")
        if self.from_scratch and self.load_hf:
            self.refuse("from_scratch", because=f"contradicts {self.typed('load_hf')}: drop one of them")
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            self.refuse(
                "override_opt_param_scheduler",
                because="contradicts --use-checkpoint-opt-param-scheduler: drop one of them",
            )

    def is_save(self, folder: str | None) -> bool:
        """Whether a folder is ``--save``, whichever path names it."""
        return bool(folder and self.save) and os.path.realpath(str(folder)) == os.path.realpath(str(self.save))


@dataclass(frozen=True, kw_only=True)
class LoggingSection(Section):
    """TensorBoard, Weights & Biases, timers and profiles."""

    log_interval: int = option("optimizer steps between two TensorBoard and Weights & Biases entries", default=1)
    tensorboard_dir: str | None = option(
        "folder of TensorBoard's files; default: tensorboard/ in the run's folder", metavar="DIR"
    )
    wandb_project: str | None = option("also log to this Weights & Biases project; default: no")
    wandb_exp_name: str | None = option("name of the run in Weights & Biases; default: --run-name")
    wandb_entity: str | None = option("user or team in Weights & Biases; default: the API key's")
    wandb_save_dir: str | None = option("folder of Weights & Biases' files; default: the run's folder", metavar="DIR")
    device_peak_tflops: float | None = option(
        "peak speed of a device in TFLOP/s, for perf/utilization; default: known for some GPUs in bf16"
    )
    log_timers_to_tensorboard: bool = option("log Megatron's timers of each optimizer step")
    timing_log_level: int | None = option(
        "timers to log: 0 the step, 1 also its parts and collectives, 2 also each micro-batch; default: 0",
        not_negative=True,
        most=2,
    )
    profile: bool = option("record some optimizer steps with PyTorch's profiler; see docs/launching.md")
    profile_step_start: int | None = option(
        "optimizer steps before the profiler records; default: 10", not_negative=True
    )
    profile_step_end: int | None = option("optimizer step after which the profiler stops; default: 12")
    profile_ranks: tuple[int, ...] | None = option("ranks that the profiler records; default: 0", any_sign=True)
    record_memory_history: bool = option("record allocations on each GPU, for PyTorch's memory viewer")
    attribution_interval: int | None = option(
        "optimizer steps between attributions of the mismatch to the model's parameters, each of which costs a forward "
        "and a backward pass over the rollout batch; default: none; see docs/attribution.md"
    )
    attribution_nodes: int = option(
        "forward and backward passes of an attribution: more if attribution/completeness is far from 1", default=1
    )
    attribution_check: bool = option(
        "measure attribution/completeness by one more forward-only pass, with the engine's weights"
    )

    def __post_init__(self) -> None:
        """Check that the profiled steps have an order."""
        super().__post_init__()
        start, end = self.profiled_steps
        if start >= end:
            raise ConfigurationError(f"--profile-step-start {start} must be below --profile-step-end {end}")

    @property
    def profiled_steps(self) -> tuple[int, int]:
        """Number of steps before the profiler's recording, and at its end; defaults as in Megatron-LM."""
        start = self.profile_step_start
        end = self.profile_step_end
        return 10 if start is None else start, 12 if end is None else end
