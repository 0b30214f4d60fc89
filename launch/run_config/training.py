"""Settings of the launcher's own: processes, model, batches, schedule, checkpoints and logs."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class LaunchSection:
    """Name, folder and processes of the run; ``on_cpu``: gloo on the CPU, ``world_size``: number of processes."""

    run_name: str = option("name of the run's folder; default: name of the launch file, or 'ppo'")
    runs_dir: str = option("folder that holds the runs' folders", default="runs", metavar="DIR")
    distributed_timeout_minutes: int = option("minutes that one collective may take", default=10)
    rollout_wait_minutes: float = option(
        "minutes that all answers to a rollout batch, a check or an evaluation may take", default=240.0
    )
    on_cpu: bool
    world_size: int

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Positions, vocabulary and implementation of the model."""

    max_position_embeddings: int = option(
        "tokens of the longest sequence that the model accepts; default: --seq-length"
    )
    position_embedding_type: Literal["learned_absolute", "rope"] = option(
        "kind of position embedding", default="learned_absolute"
    )
    rotary_base: int = option("base of the rotary frequencies", default=10000)
    rotary_percent: float = option(
        "share of a head's width that is rotated, at most 1",
        default=1.0,
        needs="position_embedding_type=rope !multi_latent_attention",
        most=1,
    )
    rope_scaling: bool = option(
        "lower the low rotary frequencies as Llama 3.1 does",
        flag="use_rope_scaling",
        needs="position_embedding_type=rope !multi_latent_attention",
    )
    rope_scaling_factor: float = option("divisor of the low rotary frequencies", default=8.0, needs="use_rope_scaling")
    sliding_window: int | None = option(
        "attention's reach in the published model, in tokens; a longer --seq-length is refused; default: all"
    )
    openai_gelu: bool = option("compute GELU by its tanh approximation, as the published GPT-2 does", needs="!swiglu")
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
    hybrid_layer_pattern: str | None = option(
        "two letters for each layer of --model hybrid: M (Mamba) or * (attention), then - (MLP) or E (experts); such "
        "as M-M-*-; default: attention in every layer"
    )

    @property
    def is_hybrid(self) -> bool:
        """Whether the model is Megatron-Core's HybridModel."""
        return self.kind == "hybrid"


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Batches, optimizer steps and checks of a step."""

    seq_length: int = option("tokens of a sequence: prompt, response and padding", required=True)
    micro_batch_size: int = option("sequences of one forward-backward pass", default=1)
    optimizer_offload: bool = option(
        "keep the policy's optimizer state in host memory between optimizer steps", needs="!optimizer_cpu_offload"
    )
    global_batch_size: int = option("sequences of one optimizer step, over all ranks", required=True)
    train_iters: int = option("optimizer steps of the run, including those before a loaded checkpoint", required=True)
    fused_linear_log_probs: bool = option("compute log-probs from hidden states in chunks, without storing logits")
    rl_use_sequence_packing: bool = option("pack sequences of a micro-batch one after another, without padding")
    rl_sequence_packing_bin_size: int = option(
        "most tokens of a packed micro-batch; default: --micro-batch-size · --seq-length",
        needs="rl_use_sequence_packing",
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
    seed: int = option("seed of weights, prompts and sampling", default=1234, not_negative=True)


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """Learning rate and weight decay over the optimizer steps; steps that were given as sequences may be fractions."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "decay of the learning rate from --lr to --min-lr", default="linear"
    )
    lr_decay_iters: int = option("optimizer steps of the learning rate's decay; default: --train-iters")
    lr_decay_samples: int | None = option(
        "sequences of the learning rate's decay; default: --train-samples", needs="train_samples"
    )
    lr_warmup_iters: int = option(
        "optimizer steps of linear warm-up", default=0, not_negative=True, below="lr_decay_iters"
    )
    lr_warmup_samples: int = option("sequences of linear warm-up", default=0, needs="train_samples", not_negative=True)
    lr_warmup_fraction: float | None = option(
        "linear warm-up as a share of --lr-decay-iters, below 1", needs="!lr_warmup_iters", not_negative=True, below=1
    )
    lr_warmup_init: float = option(
        "learning rate at the start of the warm-up", default=0.0, not_negative=True, most="lr"
    )
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "shape of the final decay of a WSD schedule", default="exponential", needs="lr_decay_style=WSD"
    )
    lr_wsd_decay_iters: int | None = option(
        "optimizer steps of the final decay of a WSD schedule", needs="lr_decay_style=WSD"
    )
    lr_wsd_decay_samples: int | None = option(
        "sequences of the final decay of a WSD schedule", needs="train_samples lr_decay_style=WSD"
    )
    lr_ess_scaling: Literal["sqrt", "linear"] | None = option(
        "multiply each step's learning rate by the effective sample size of its responses, as a share of them, divided "
        "by --lr-ess-base and at most 1, or by its root (sqrt, for Adam); default: no"
    )
    lr_ess_base: float = option(
        "effective sample size that leaves the learning rate as it is, as a share of the responses",
        default=1.0,
        needs="lr_ess_scaling",
        most=1,
    )
    start_weight_decay: float | None = option(
        "weight decay of the first step", needs="weight_decay_incr_style=linear|cosine", not_negative=True
    )
    end_weight_decay: float | None = option(
        "weight decay of the last step", needs="weight_decay_incr_style=linear|cosine", not_negative=True
    )
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "change of the weight decay; linear and cosine need --start-weight-decay and --end-weight-decay",
        default="constant",
    )

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
class CheckpointSection:
    """Checkpoints and Hugging Face directories that are read and written."""

    save: str | None = option("folder that checkpoints are written to; default: none is written", metavar="DIR")
    save_interval: int | None = option("optimizer steps between checkpoints; default: one at the end", needs="save")
    ckpt_format: Literal["torch_dist"] = option("format of checkpoints", default="torch_dist")
    async_save: bool = option(
        "write checkpoints in a process of their own while training goes on", needs="save save_interval"
    )
    keep_last: int | None = option(
        "newest checkpoints to keep; older ones are removed; default: all", needs="save save_interval"
    )
    save_retain_interval: int | None = option(
        "keep checkpoints at multiples of this many steps and the newest --keep-last (1 if not given); remove others",
        needs="save save_interval",
    )
    continue_after_failed_save: bool = option(
        "go on if a checkpoint before the end cannot be written", needs="save save_interval"
    )
    save_hf: str | None = option(
        "write the model as a Hugging Face directory, DIR/step-N, at the end of the run; default: no", metavar="DIR"
    )
    save_hf_interval: int | None = option(
        "also write --save-hf every N optimizer steps; default: at the end only", needs="save_hf", most="train_iters"
    )
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
        "is resumed all the same",
        needs="!load_hf",
    )
    weights_bridge: Literal["mbridge", "none"] = option(
        "converter of weights to and from Hugging Face's names; none: the tables of this program; default: mbridge on "
        "a GPU if it is installed and knows the model, else none"
    )
    ckpt_step: int | None = option("step of the checkpoint of --load; default: the newest", needs="load")
    finetune: bool = option("take only the weights of --load, and start at step 0", needs="load")
    no_save_optim: bool = option("leave the optimizer out of checkpoints", needs="save")
    no_load_optim: bool = option("do not load the optimizer of --load", needs="load")
    verify_integrity: bool = option(
        "compare every file of --load with its checksum before it is read", default=True, needs="load"
    )
    load_last_valid: bool = option(
        "if the newest checkpoint of --load is damaged, load the newest undamaged one", needs="load !ckpt_step"
    )
    override_opt_param_scheduler: bool = option(
        "use the learning rate, schedule, weight decay and optimizer of the flags, not the checkpoint's",
        needs="load !finetune !no_load_optim !use_checkpoint_opt_param_scheduler",
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        "use the learning rate, schedule, weight decay and optimizer of the checkpoint, not the flags'",
        needs="load !finetune !no_load_optim",
    )

    def is_save(self, folder: str | None) -> bool:
        """Whether a folder is ``--save``, whichever path names it."""
        return bool(folder and self.save) and os.path.realpath(str(folder)) == os.path.realpath(str(self.save))


@dataclass(frozen=True, kw_only=True)
class LoggingSection:
    """TensorBoard, Weights & Biases, timers and profiles."""

    log_interval: int = option("optimizer steps between two TensorBoard and Weights & Biases entries", default=1)
    tensorboard_dir: str | None = option(
        "folder of TensorBoard's files; default: tensorboard/ in the run's folder", metavar="DIR"
    )
    wandb_project: str | None = option("also log to this Weights & Biases project; default: no")
    wandb_exp_name: str | None = option(
        "name of the run in Weights & Biases; default: --run-name", needs="wandb_project"
    )
    wandb_entity: str | None = option("user or team in Weights & Biases; default: the API key's", needs="wandb_project")
    wandb_save_dir: str | None = option(
        "folder of Weights & Biases' files; default: the run's folder", needs="wandb_project", metavar="DIR"
    )
    device_peak_tflops: float | None = option(
        "peak speed of a device in TFLOP/s, for perf/utilization; default: known for some GPUs in bf16"
    )
    log_timers_to_tensorboard: bool = option("log Megatron's timers of each optimizer step")
    timing_log_level: int | None = option(
        "timers to log: 0 the step, 1 also its parts and collectives, 2 also each micro-batch; default: 0",
        needs="log_timers_to_tensorboard",
        not_negative=True,
        most=2,
    )
    profile: bool = option("record some optimizer steps with PyTorch's profiler; see docs/runs.md")
    profile_step_start: int | None = option(
        "optimizer steps before the profiler records; default: 10", needs="profile", not_negative=True
    )
    profile_step_end: int | None = option("optimizer step after which the profiler stops; default: 12", needs="profile")
    profile_ranks: tuple[int, ...] | None = option(
        "ranks that the profiler records; default: 0", needs="profile", any_sign=True
    )
    record_memory_history: bool = option("record allocations on each GPU, for PyTorch's memory viewer")
    attribution_interval: int | None = option(
        "optimizer steps between attributions of the mismatch to the model's parameters, each of which costs a forward "
        "and a backward pass over the rollout batch; default: none; see docs/attribution.md",
        needs="!load_rollouts !rollout_staleness",
    )
    attribution_nodes: int | None = option(
        "forward and backward passes of an attribution: more if attribution/completeness is far from 1; default: 1",
        needs="attribution_interval",
    )
    attribution_check: bool = option(
        "measure attribution/completeness by one more forward-only pass, with the engine's weights",
        needs="attribution_interval",
    )

    @property
    def profiled_steps(self) -> tuple[int, int]:
        """Number of steps before the profiler's recording, and at its end; defaults as in Megatron-LM."""
        start, end = self.profile_step_start, self.profile_step_end
        return 10 if start is None else start, 12 if end is None else end
