"""Settings of the task, of rollout batches, and of the engine that samples them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import Section, option
from megatron_rc.records.sampling import SamplingParams

JSON = "JSON"  # metavar of a flag whose value is a JSON object; a launch file may write it as a nested entry


def json_object(word: str) -> str:
    """Return a JSON object as it was typed, or raise ValueError."""
    try:
        value = json.loads(word)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{word} is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f'{word} is no JSON object such as {{"enable_thinking": false}}')
    return word


@dataclass(frozen=True, kw_only=True)
class TaskSection(Section):
    """Problems and their tokenizer; ``task`` is None with the prompts of ``--prompt-data``."""

    task: str | None = option(
        "task to learn: count_up, reasoning_gym:<data set> or python:pkg.module:Class; default: count_up, or "
        "--prompt-data"
    )
    tokenizer_type: str = option(
        "kind of tokenizer; default: HuggingFaceTokenizer with --load-hf or --tokenizer-model, else "
        "CharacterTokenizer, one token a character (--from-scratch)"
    )
    tokenizer_model: str | None = option("directory of a Hugging Face tokenizer; default: --load-hf", metavar="DIR")
    apply_chat_template: bool = option("present problems as turns of a conversation, by the tokenizer's chat template")
    chat_template_kwargs: str | None = option(
        'further variables of the chat template, as a JSON object: {"enable_thinking": false}',
        metavar=JSON,
        read=json_object,
    )


@dataclass(frozen=True, kw_only=True)
class RolloutSection(Section):
    """Size, ends and source of rollouts.

    ``end_token_ids``: all end tokens, of the tokenizer, the model's files and the flags; None in checkpoints of earlier
    versions. ``knows_versions``: policy versions count optimizer steps of this run.
    """

    max_response_length: int = option("most tokens of a response; default: the length that the task needs")
    max_turns: int = option(
        "most turns of a response; above 1 the task may reply to a turn with an observation, up to --seq-length tokens "
        "in all, and --max-response-length is the most tokens of a turn",
        default=1,
    )
    rollout_stop_token_ids: tuple[int, ...] | None = option(
        "further end tokens of a response, beside those of the tokenizer and of config.json and generation_config.json",
        not_negative=True,
        metavar="ID",
    )
    rollout_no_stop_token_ids: tuple[int, ...] | None = option(
        "end tokens of the tokenizer or of the model's files that end no response of this run",
        not_negative=True,
        metavar="ID",
    )
    rollout_stop: tuple[str, ...] | None = option(
        "strings that end a response as soon as its text has one of them; its tokens and its text keep the string",
        metavar="STRING",
    )
    rollout_skip_special_tokens: bool = option(
        "leave all special tokens out of the texts that rewards and replies read; default: only end tokens and padding "
        "at the end of a response"
    )
    grpo_prompts_per_step: int = option("prompts of a rollout batch", default=32)
    grpo_group_size: int = option("responses sampled for each prompt", default=2)
    grpo_iterations: int = option("passes over each rollout batch", default=2)
    dynamic_sampling: int = option(
        "replace a prompt whose responses all have the same reward, up to N times", default=0, not_negative=True
    )
    rl_default_temperature: float = option("temperature of sampling and scoring", default=1.0)
    rollout_top_p: float = option(
        "sample from the likeliest tokens that have this probability together; the trainer's log-probs are over the "
        "same tokens",
        default=1.0,
        most=1,
    )
    rollout_top_k: int = option(
        "sample from this many of the likeliest tokens, as --rollout-top-p; default: 0, from all",
        default=0,
        not_negative=True,
    )
    rollout_min_p: float = option(
        "sample from tokens with at least this share of the likeliest token's probability, as --rollout-top-p; "
        "default: 0, from all",
        default=0.0,
        not_negative=True,
        below=1,
    )
    entropy_over_support: bool = option(
        "entropy over the kept tokens only, with --rollout-top-p and the like; default: over the whole vocabulary"
    )
    always_score: bool = option(
        "score every rollout batch in a forward-only pass; default: only if the update needs log π_old before"
    )
    save_rollouts: str | None = option("folder that every rollout batch is written to; default: none", metavar="DIR")
    save_log_probs: bool = option("add the trainer's log-probs to --save-rollouts after the last step on a batch")
    load_rollouts: str | None = option(
        "train on the rollouts in this folder, without an engine; default: an engine samples", metavar="DIR"
    )
    rollout_staleness: int | None = option(
        "largest age of rollouts in optimizer steps, a multiple of the steps of a rollout batch: engines in other "
        "processes sample ahead, older rollouts of --load-rollouts are an error; default: 0, no limit with "
        "--load-rollouts",
        not_negative=True,
    )
    allow_truncated_sampling: bool = option(
        "accept truncated rollouts whose kept tokens are not known, so that their log-probs are not the policy's"
    )
    knows_versions: bool
    end_token_ids: tuple[int, ...] | None

    def __post_init__(self) -> None:
        """Check that responses differ."""
        super().__post_init__()
        if self.rollout_top_k == 1:
            self.refuse(
                "rollout_top_k",
                because="samples the likeliest token alone, from which nothing is learned: give 0, or 2 and more",
            )

    @property
    def sequences(self) -> int:
        """Number of sequences of a rollout batch, over all ranks."""
        return self.grpo_prompts_per_step * self.grpo_group_size

    @property
    def sampling(self) -> SamplingParams:
        """The sampling parameters of rollouts."""
        return SamplingParams(
            self.rl_default_temperature, self.rollout_top_p, self.rollout_top_k, min_p=self.rollout_min_p
        )

    @property
    def replays_sampling(self) -> bool:
        """Whether the trainer's log-probs are over the tokens that the engine kept, which records must have."""
        return self.sampling.is_truncated and not self.allow_truncated_sampling


@dataclass(frozen=True, kw_only=True)
class EngineSection(Section):
    """Engine that samples responses."""

    rollout_engine: str = option("engine that samples responses", default="transformers")
    rollout_url: str | None = option("addresses of the servers, comma-separated, one for each data-parallel replica")
    rollout_model: str | None = option("name of the served model, if a vLLM server has several")
    rollout_weights_dir: str | None = option(
        "folder in which servers find new weights; vllm's default: a folder in memory", metavar="DIR"
    )
    rollout_weight_transfer: Literal["files", "gloo", "nccl", "ipc"] = option(
        "way of new weights to a server: files in --rollout-weights-dir; gloo (CPUs) or nccl (GPUs): process groups of "
        "each rank that sends and the server's processes; ipc: memory of the machine on which all of them run (vLLM)",
        default="files",
    )
    rl_partial_rollouts: bool = option(
        "sync weights at every rollout batch, while responses are under way: these go on under the new weights; needs "
        "--rollout-engine vllm-server"
    )
    rollout_max_versions: int | None = option(
        "most versions of the weights within one response; a weight sync that would exceed it waits for the responses "
        "under way; default: the limit that follows from --rollout-staleness"
    )
    rollout_concurrency: int = option("requests for rollouts that a server gets at once", default=64)
    rollout_timeout: float = option(
        "seconds to wait for an answer, for the start of a server, and for a lost server", default=600.0
    )
    rollout_attempts: int = option(
        "tries of a request that a server answers with status 500 before the run ends", default=6
    )
    rollout_tensor_parallel_size: int = option(
        "processes that vLLM spreads the model over; on GPUs those of the first rank of each replica and of the next "
        "ranks",
        default=1,
    )
    rollout_engine_args: str | None = option(
        "YAML file of further arguments of vllm.LLM, such as gpu_memory_utilization: 0.5", metavar="FILE"
    )
    rollout_colocate: bool = option("give vLLM's GPU memory to the trainer between two rollouts, by vLLM's sleep mode")
    rollout_dtype: str = option(
        "number format of the engine's weights at every sync; servers keep the format of their start", default="bf16"
    )
    rollout_check_tolerance: float | None = option(
        "mean |log-prob difference| of engine and trainer, in nats, that ends the run or fails check_engine; default: "
        "by --rollout-dtype and --bf16",
        metavar="NATS",
    )
    sync_probe_interval: int | None = option(
        "compare the log-probs of engine and trainer on a few prompts after every N-th weight sync; default: after "
        "the first, after a restart of an engine, and if no rollout batch of these weights is trained on"
    )
