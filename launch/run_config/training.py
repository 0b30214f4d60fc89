"""What the launcher itself needs to train: where, the model beside its layers, batches, schedule, files, logs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

import torch

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class LaunchSection:
    """The run and its processes.

    ``on_cpu``: with gloo, without a GPU. ``world_size``: number of processes.
    """

    run_name: str = option("name of the folder in runs/; default: the launch file's name, else 'ppo'")
    runs_dir: str = option("where run folders are written", default="runs", metavar="DIR")
    distributed_timeout_minutes: int = option("limit for one collective", default=10, positive=True)
    rollout_wait_minutes: float = option(
        "limit for all answers to one rollout batch, check or evaluation", default=240.0, positive=True
    )
    on_cpu: bool
    world_size: int

    @property
    def device(self) -> torch.device:
        """The device that this rank trains on."""
        return torch.device("cpu") if self.on_cpu else torch.device("cuda", torch.cuda.current_device())


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    """Megatron's GPTModel beside its layers."""

    max_position_embeddings: int = option("longest sequence that the model can take", positive=True, most=2**31)
    position_embedding_type: Literal["learned_absolute", "rope"] = option("positions", default="learned_absolute")
    rotary_base: int = option("base of the rotary frequencies", default=10000, positive=True)
    rotary_percent: float = option("share of a head's width that is rotated", default=1.0, positive=True)
    rope_scaling: bool = option(
        "stretch the low rotary frequencies as Llama 3.1 does", flag="use_rope_scaling", default=False
    )
    rope_scaling_factor: float = option("by this much", default=8.0, positive=True)
    sliding_window: int | None = option(
        "tokens that each one attends to in the published model: no sequence may be longer; default: all", positive=True
    )
    openai_gelu: bool = option("GELU by its tanh approximation, as GPT-2 was published", default=False)
    untie_embeddings_and_output_weights: bool = option("an output layer with weights of its own", default=False)
    vocab_size: int = option("tokens of the model; default: the tokenizer's", positive=True, most=2**31)
    make_vocab_size_divisible_by: int = option("pads the vocabulary, times TP", default=128, positive=True, most=2**20)
    padded_vocab_size: int = option("rows of the embedding; default: the padded vocabulary", positive=True, most=2**31)
    hf_model_type: str | None = option(
        "model_type of Hugging Face's that the model is to other programs; default: that of --load-hf, else what its "
        "shape is"
    )
    transformer_impl: Literal["local", "transformer_engine"] = option(
        "layers; default: transformer_engine on a GPU where it is installed, else local"
    )


@dataclass(frozen=True, kw_only=True)
class TrainingSection:
    """Steps and batches."""

    seq_length: int = option(
        "tokens of a sequence: prompt, response and padding", required=True, positive=True, most=2**31
    )
    micro_batch_size: int = option("sequences of one forward-backward", default=1, positive=True, most=2**21)
    optimizer_offload: bool = option(
        "keep the policy's moments and float32 weights in host memory between optimizer steps", default=False
    )
    global_batch_size: int = option("sequences of one optimizer step, over all ranks", required=True, positive=True)
    train_iters: int = option(
        "optimizer steps in all, those before a checkpoint included", required=True, positive=True
    )
    fused_linear_log_probs: bool = option(
        "log-probs from hidden states chunk by chunk, without any logits", default=False
    )
    rl_use_sequence_packing: bool = option(
        "train on sequences one after the other, without the padding behind", default=False
    )
    rl_sequence_packing_bin_size: int = option(
        "most tokens of a packed micro-batch; default: micro-batch-size · seq-length", positive=True
    )
    check_for_nan_in_loss_and_grad: bool = option(
        "stop before a step whose loss or gradient norm is not finite", default=True
    )
    check_for_spiky_loss: bool = option(
        "stop before a step whose loss is ten times the largest of the first 100 steps", default=False
    )
    check_for_large_grads: bool = option("the same for the norm of the gradient", default=False)
    train_samples: int | None = option("sequences in all, in the place of --train-iters", positive=True)
    seed: int = option("of weights, prompts and sampling", default=1234, not_negative=True)


@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """The learning rate over the optimizer steps, up to ``--lr`` and down to ``--min-lr``.

    Numbers of steps that were given in sequences need not be whole.
    """

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"] = option(
        "schedule", default="linear"
    )
    lr_decay_iters: int = option("steps of the decay; default: --train-iters", positive=True)
    lr_decay_samples: int | None = option("the same in sequences, with --train-samples", positive=True)
    lr_warmup_iters: int = option("steps of linear warm-up", default=0, not_negative=True)
    lr_warmup_samples: int = option("the same in sequences, with --train-samples", default=0, not_negative=True)
    lr_warmup_fraction: float | None = option("the same as a share of --lr-decay-iters", not_negative=True)
    lr_warmup_init: float = option("learning rate that the warm-up starts from", default=0.0, not_negative=True)
    lr_wsd_decay_style: Literal["exponential", "linear", "cosine", "minus_sqrt"] = option(
        "how the rate falls at the end of --lr-decay-style WSD", default="exponential"
    )
    lr_wsd_decay_iters: int | None = option("over how many steps", positive=True)
    lr_wsd_decay_samples: int | None = option("the same in sequences, with --train-samples", positive=True)
    start_weight_decay: float | None = option("weight decay of the first step", not_negative=True)
    end_weight_decay: float | None = option("weight decay of the last step", not_negative=True)
    weight_decay_incr_style: Literal["constant", "linear", "cosine"] = option(
        "how it goes from one to the other", default="constant"
    )

    @property
    def warmup_steps(self) -> float:
        """Steps of the warm-up, which need not be whole."""
        return (
            self.lr_warmup_iters if self.lr_warmup_fraction is None else self.lr_warmup_fraction * self.lr_decay_iters
        )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    """What is read at the start and written on the way."""

    save: str | None = option("write checkpoints here", metavar="DIR")
    save_interval: int | None = option("optimizer steps between checkpoints; default: at the end", positive=True)
    ckpt_format: Literal["torch_dist"] = option("how checkpoints are written", default="torch_dist")
    async_save: bool = option("write checkpoints in a process of their own while training goes on", default=False)
    keep_last: int | None = option("remove all but the newest N checkpoints; default: all stay", positive=True)
    save_retain_interval: int | None = option(
        "of older checkpoints those at multiples of this many steps stay; without --keep-last only the newest beside "
        "them",
        positive=True,
    )
    continue_after_failed_save: bool = option(
        "go on where a checkpoint on the way cannot be written; at the end it is an error still", default=False
    )
    save_hf: str | None = option(
        "write the model as a Hugging Face directory, DIR/step-N, at the end of the run", metavar="DIR"
    )
    save_hf_interval: int | None = option("and every N optimizer steps", metavar="N", positive=True)
    load: str | None = option("go on from the newest checkpoint here, if there is one", metavar="DIR")
    load_hf: str | None = option("start from this Hugging Face directory, which describes the model too", metavar="DIR")
    weights_bridge: Literal["mbridge", "none"] = option(
        "what converts weights to and from Hugging Face's names; default: mbridge on a GPU, where it is installed and "
        "knows the model, else none: this program's own tables"
    )
    finetune: bool = option("take the weights of --load alone and start at step 0", default=False)
    no_save_optim: bool = option("leave the optimizer out of checkpoints", default=False)
    no_load_optim: bool = option("leave the optimizer of --load alone", default=False)
    verify_integrity: bool = option("compare all of --load with its checksums before it is read", default=True)
    load_last_valid: bool = option(
        "where the newest checkpoint of --load is damaged, go on from the last one that is whole", default=False
    )
    override_opt_param_scheduler: bool = option(
        "go on with this run's learning rate, schedule, weight decay and optimizer, not with the checkpoint's",
        default=False,
    )
    use_checkpoint_opt_param_scheduler: bool = option(
        "go on with the checkpoint's learning rate, schedule, weight decay and optimizer, whatever the flags say",
        default=False,
    )

    def is_save(self, folder: str | None) -> bool:
        """Whether a folder is that of ``--save``, however it is spelled, through a link too."""
        return bool(folder and self.save) and os.path.realpath(str(folder)) == os.path.realpath(str(self.save))


@dataclass(frozen=True, kw_only=True)
class LoggingSection:
    """Where metrics go besides the run's folder, and how often."""

    log_interval: int = option("steps between two TensorBoard and W&B entries", default=1, positive=True)
    tensorboard_dir: str | None = option("default: tensorboard/ in the run's folder", metavar="DIR")
    wandb_project: str | None = option("also log to this Weights & Biases project")
    wandb_exp_name: str | None = option("the run's name there; default: --run-name")
    wandb_entity: str | None = option("the user or the team there; default: the one of the API key")
    wandb_save_dir: str | None = option("where its files lie here; default: the run's folder", metavar="DIR")
    device_peak_tflops: float | None = option(
        "what a device can do at best, in 10^12 operations a second, for perf/utilization; default: known of some GPUs "
        "in bf16",
        positive=True,
    )
    log_timers_to_tensorboard: bool = option("write Megatron's timers of each optimizer step", default=False)
    timing_log_level: int | None = option(
        "which: 0 the step, 1 its passes, collectives and the optimizer's parts, 2 each micro-batch's too; default: 0",
        not_negative=True,
    )
    profile: bool = option("record some optimizer steps with PyTorch's profiler; docs/runs.md", default=False)
    profile_step_start: int | None = option("record after this many steps; default: 10", not_negative=True)
    profile_step_end: int | None = option("until this many steps are made; default: 12", positive=True)
    profile_ranks: tuple[int, ...] | None = option("ranks that record; default: 0")
    record_memory_history: bool = option("record what takes memory on each GPU, for PyTorch's viewer", default=False)

    @property
    def profiled_steps(self) -> tuple[int, int]:
        """(steps before the recording, steps at its end), as Megatron-LM has them."""
        start, end = self.profile_step_start, self.profile_step_end
        return 10 if start is None else start, 12 if end is None else end
