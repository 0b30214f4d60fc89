"""Settings of distillation: the teachers, and where their distributions come from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_rc.launch.run_config.options import Section, option


@dataclass(frozen=True, kw_only=True)
class DistillationSection(Section):
    """Teachers of the policy; absent without a teacher. The loss has the kind and weight of the divergence."""

    teacher_load_hf: tuple[str, ...] | None = option(
        "Hugging Face directories of teachers, with the policy's tokenizer and any size; they have the policy's "
        "TP, PP and CP sizes",
        metavar="DIR",
    )
    teacher_load: tuple[str, ...] | None = option(
        "folders of checkpoints of teachers, of which the newest is read, as --teacher-load-hf", metavar="DIR"
    )
    teacher_url: str | None = option(
        "addresses of servers with the teacher, comma-separated, one for each data-parallel replica; they give the "
        "log-probs of the --teacher-top-k likeliest tokens"
    )
    teacher_files: str | None = option(
        "folder with the teacher's log-probs of recorded rollouts, which --save-teacher wrote", metavar="DIR"
    )
    save_teacher: str | None = option(
        "folder that the log-probs of --teacher-url are written to; default: none is written", metavar="DIR"
    )
    teacher_server: Literal["vllm", "sglang"] = option("kind of the servers of --teacher-url", default="vllm")
    teacher_model: str | None = option("name of the teacher, if the vLLM server of --teacher-url has several models")
    teacher_top_k: int = option(
        "likeliest tokens of which --teacher-url gives log-probs, at each sampled token", default=20
    )
    teacher_prompt: str | None = option(
        "function from a problem to the prompt that the teacher reads instead of the policy's, such as one with a "
        "hint: python:pkg.module:function; default: the policy's prompt",
        metavar="FUNCTION",
    )
    teacher_temperature: float = option("temperature of the teachers' distributions; default: --rl-default-temperature")
    teacher_weights: tuple[float, ...] | None = option(
        "weight of each teacher in --advantage-estimator distillation, those of --teacher-load-hf first; default: 1 "
        "divided by their number"
    )
    teacher_tail: Literal["sampled", "rest", "none"] = option(
        "tokens outside of the teacher's top k: sampled, the sampled token stands for all of them; rest, they are one "
        "event; none, they are left out and the top k has the probability 1",
        default="sampled",
    )

    def __post_init__(self) -> None:
        """Check that each teacher has a weight."""
        super().__post_init__()
        if self.teacher_weights is not None and len(self.teacher_weights) != self.num_teachers:
            self.refuse("teacher_weights", because=f"must be one number for each of {self.num_teachers} teachers")

    @property
    def num_models(self) -> int:
        """Number of teachers whose weights this run loads."""
        return len(self.teacher_load_hf or ()) + len(self.teacher_load or ())

    @property
    def num_teachers(self) -> int:
        """Number of all teachers."""
        return self.num_models + (self.num_models == 0)
