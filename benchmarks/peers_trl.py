"""TRL's ``GRPOTrainer`` on a file of sums, timed step by step; ``benchmarks/peers.py`` runs it in TRL's environment.

Called as ``peers_trl.py MODEL PROMPTS STEPS FOLDER``; writes ``FOLDER/trl.json``.
"""

import json
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from datasets import load_dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from examples.smollm2_sums import reward


class StepSeconds(TrainerCallback):
    """Wall seconds from the end of one optimizer step to the end of the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._before = 0.0

    def on_train_begin(self, *_: object, **__: object) -> None:
        """Start the clock of the first step."""
        self._before = time.monotonic()

    def on_step_end(self, *_: object, **__: object) -> None:
        """Note how long the step took."""
        now = time.monotonic()
        self.seconds.append(now - self._before)
        self._before = now


def right_sums(completions: list[list[dict[str, str]]], label: list[int], **_: object) -> list[float]:
    """1 for each response that ends with the right sum, else 0."""
    return [reward("", messages[0]["content"], sum_, {}) for messages, sum_ in zip(completions, label, strict=True)]


def main(model: str, prompts: str, steps: str, folder: str) -> None:
    """Train for some steps and write the seconds of each."""
    config = GRPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        max_steps=int(steps),
        per_device_train_batch_size=16,
        num_generations=4,
        max_completion_length=32,
        learning_rate=2e-5,
        lr_scheduler_type="constant",
        beta=0.0,
        temperature=1.0,
        gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"},
        report_to=[],
        save_strategy="no",
        logging_steps=1,
    )
    timer = StepSeconds()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=right_sums,
        args=config,
        train_dataset=load_dataset("json", data_files=prompts, split="train"),
        callbacks=[timer],
    )
    trainer.train()
    Path(folder, "trl.json").write_text(json.dumps(timer.seconds), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
