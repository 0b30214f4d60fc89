"""What is learnt, what a rollout batch is, and which engine samples it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rc.launch.run_config.options import option


@dataclass(frozen=True, kw_only=True)
class TaskSection:
    """Problems, and their tokens.

    ``task``: None: the prompts of ``--prompt-data``.
    """

    task: str | None = option(
        "what is learnt: count_up, reasoning_gym:<data set> or python:pkg.module:Class; default: count_up, "
        "or --prompt-data"
    )
    tokenizer_type: str = option(
        "default: HuggingFaceTokenizer with --load-hf or --tokenizer-model, else one token a character"
    )
    tokenizer_model: str | None = option("holds the tokenizer; default: --load-hf", metavar="DIR")
    apply_chat_template: bool = option(
        "show problems as turns of a conversation, by the tokenizer's template", default=False
    )


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    """A rollout batch, and where it comes from.

    ``knows_versions``: the versions of the rollouts are optimizer steps of this run.
    """

    max_response_length: int = option("longest response; default: what the task needs", positive=True)
    grpo_prompts_per_step: int = option("prompts of a rollout batch", default=32, positive=True)
    grpo_group_size: int = option("responses sampled for each prompt", default=2, positive=True)
    grpo_iterations: int = option("passes over each rollout batch", default=2, positive=True)
    dynamic_sampling: int = option(
        "replace a prompt by another one, up to N times, where all responses to it have the same reward",
        default=0,
        metavar="N",
        not_negative=True,
    )
    rl_default_temperature: float = option("of sampling and of log-probs", default=1.0, positive=True)
    save_rollouts: str | None = option("write every rollout batch here", metavar="DIR")
    save_log_probs: bool = option(
        "with --save-rollouts: write the trainer's log-probs too, when the last optimizer step on a batch is made",
        default=False,
    )
    load_rollouts: str | None = option("train on the rollouts of this folder, without an engine", metavar="DIR")
    rollout_staleness: int | None = option(
        "train on rollouts of weights up to K optimizer steps old (a multiple of the steps that a rollout batch makes),"
        " sampled while training goes on where the engine is another process; with --load-rollouts: older ones are an"
        " error; default: 0, with --load-rollouts no limit",
        metavar="K",
        not_negative=True,
        most=10_000,
    )
    allow_truncated_sampling: bool = option(
        "take rollouts of top_p < 1 or top_k > 0, which are not the policy's", default=False
    )
    knows_versions: bool

    @property
    def sequences(self) -> int:
        """Number of sequences of a rollout batch, over all ranks."""
        return self.grpo_prompts_per_step * self.grpo_group_size


@dataclass(frozen=True, kw_only=True)
class EngineSection:
    """What samples responses, and how it is reached."""

    rollout_engine: str = option("what samples responses", default="transformers")
    rollout_url: str | None = option("of the servers, comma-separated: one a data-parallel replica")
    rollout_model: str | None = option("name of the served model, where a vLLM server has several")
    rollout_weights_dir: str | None = option(
        "where servers find new weights; vllm's default: a folder in memory", metavar="DIR"
    )
    rollout_concurrency: int = option("requests that a server gets at once", default=64, positive=True)
    rollout_timeout: float = option(
        "seconds for one answer, for a server to start, and for one that is gone to come back",
        default=600.0,
        positive=True,
    )
    rollout_attempts: int = option(
        "tries of a request that a server fails on (status 500) before the run ends", default=6, positive=True
    )
    rollout_dtype: str = option(
        "the rollout engine's weights are rounded to this at every sync (servers: as they were started)",
        default="bf16",
    )
    rollout_check_tolerance: float | None = option(
        "mean |difference| of the log-probs of engine and trainer, in nats, that ends the run or fails check_engine; "
        "default: by --rollout-dtype and --bf16",
        metavar="NATS",
        positive=True,
    )
    sync_probe_interval: int | None = option(
        "have the engine answer a few prompts and the trainer score them after every N-th weight sync; default: after "
        "the first one, after a restart of an engine, and if no rollout batch of these weights is trained on",
        metavar="N",
        positive=True,
    )
