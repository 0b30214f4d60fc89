"""Check that rollout engine and trainer agree on tokens and log-probs; print findings with evidence.

    python -m megatron_rc.launch.check_engine --nproc-per-node N <flags of the run>

The engine gets the trainer's weights and answers one batch of the task's prompts; the trainer scores the answers. Ends
with 0 if everything agrees, with 1 if something does not, and with 2 for flags that cannot work.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rc.launch.errors import RunError
from megatron_rc.launch.rewards.rewarder import ERRORS_FILE
from megatron_rc.launch.rollouts.agreement import LAGS, Finding, judge, lag_distances, tolerance
from megatron_rc.launch.run_config import RunConfig
from megatron_rc.parallel.collectives import all_reduce_sum, broadcast
from megatron_rc.parallel.groups import ParallelGroups, group_rank, group_size
from megatron_rc.records.rollout import FINISH_REASONS, RolloutBatch

if TYPE_CHECKING:
    from megatron_rc.launch.tasks import Task, Text
    from megatron_rc.launch.tasks.ends import ResponseEnds
    from megatron_rc.launch.training.trainer import Trainer

TEMPERATURES = (0.5, 0.7, 1.0, 1.4, 2.0)


def main(argv: Sequence[str] | None = None) -> None:
    """Become torchrun, and in its processes check the engine."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if "RANK" in os.environ:
        from megatron_rc.launch.train_ppo import main as run_on_rank

        run_on_rank(arguments, run=run_check)
    else:
        from megatron_rc.launch.__main__ import main as launch

        launch(arguments, module="megatron_rc.launch.check_engine")


def run_check(config: RunConfig, task: Task) -> bool:
    """Run the check on this rank and print the findings on rank 0; return True: no step can be lost (``Run``).

    Raises:
        RunError: on every rank: a finding does not agree; the message names it.
    """
    findings = check_engine(config, task)
    if torch.distributed.get_rank() == 0:
        for finding in findings:
            sys.stdout.write(f"{'ok ' if finding.agrees else 'BAD'}  {finding.about:<30}{finding.words}\n")
        sys.stdout.flush()
    wrong = [finding.about for finding in findings if not finding.agrees]
    if wrong:
        raise RunError(f"the check finds fault with {', '.join(wrong)}: see the findings above")
    return True


def check_engine(config: RunConfig, task: Task) -> list[Finding]:
    """Sample one rollout batch, score it at several temperatures, and compare; equal on all ranks.

    Collectives: a weight sync, a rollout, a forward-only pass for each temperature, one SUM over DP×CP, one broadcast
    over PP.
    """
    from megatron_rc.launch.rollouts.collector import RolloutCollector
    from megatron_rc.launch.training.batches.rollout_metrics import summarize_rollouts
    from megatron_rc.launch.training.trainer import Trainer

    groups = ParallelGroups.from_megatron()
    trainer = Trainer(config, groups)
    with closing(RolloutCollector(config, task, groups)) as collector:
        collector.sync_weights(trainer.chunks, trainer.iteration)
        collected = collector.collect(trainer.iteration)
        batch = collected.batch

    configured = config.rollouts.rl_default_temperature
    temperatures = sorted({configured, *TEMPERATURES})
    distances = torch.stack([score_distances(trainer, batch, temperature) for temperature in temperatures])
    counts = torch.cat([_tokens(batch, task.text), _endings(batch, task.text.ends)])
    if group_rank(groups.cp) > 0:
        counts = torch.zeros_like(counts)  # whole sequences are counted on the first CP rank alone
    local = torch.cat([distances.flatten(), counts])
    total = broadcast(all_reduce_sum(local, groups.dp_cp), group_size(groups.pp) - 1, groups.pp)
    all_distances = total[: distances.numel()].view_as(distances).tolist()
    foreign, responses, again, stopped, ended, inside = total[distances.numel() :].tolist()

    findings = judge(dict(zip(temperatures, all_distances, strict=True)), configured, tolerance(config))
    findings.append(judge_tokens(task.text.size, foreign, responses, again))
    findings += judge_endings(task.text.ends, stopped, ended, inside)
    rewards = summarize_rollouts(batch, groups).metrics | collected.reward_metrics
    return findings + judge_rewards(rewards, config.rollouts.sequences)


def score_distances(trainer: Trainer, batch: RolloutBatch, temperature: float) -> Tensor:
    """Return :func:`lag_distances` of this rank's tokens at a temperature, [4] float64; 0 on stages before the last."""
    from megatron_rc.launch.training.batches.micro_batches import cut_batch

    cut = cut_batch(batch, trainer.config, trainer.groups)
    train = trainer.score(cut, temperature)
    if train is None:
        return torch.zeros(len(LAGS) + 1, dtype=torch.float64, device=batch.tokens.device)
    local = cut.local
    return lag_distances(train, local.rollout_log_probs, local.response_mask, local.positions)


def _tokens(batch: RolloutBatch, text: Text) -> Tensor:
    """Return [3] float64: sampled tokens that the tokenizer lacks, responses, and responses that their text gives."""
    rows = [tokens[mask].tolist() for tokens, mask in zip(batch.tokens, batch.response_mask, strict=True)]
    foreign = sum(token >= text.size for row in rows for token in row)
    left_out = {*text.ends.token_ids, text.pad}
    plain_rows = [[token for token in row if token not in left_out] for row in rows]
    again = sum(not foreign and text.tokens_of(text.decode(row)) == row for row in plain_rows)
    return torch.tensor([foreign, len(rows), again], dtype=torch.float64, device=batch.tokens.device)


def judge_tokens(size: int, foreign: float, responses: float, again: float) -> Finding:
    """Judge whether the trainer's tokenizer knows all sampled tokens; add how many texts it splits alike."""
    if foreign:
        words = f"{foreign:.0f} sampled tokens are not among the tokenizer's {size}: has the engine another vocabulary?"
        return Finding("tokenizer", False, words)
    words = f"all sampled tokens are the tokenizer's; the text of {again:.0f} of {responses:.0f} responses gives their"
    why = "" if again == responses else ": the others spell the same text with other tokens, which is no fault"
    return Finding("tokenizer", True, f"{words} tokens again{why}")


def _endings(batch: RolloutBatch, ends: ResponseEnds) -> Tensor:
    """Return [3] float64: stopped responses, stopped ones whose last turn has its end, and ends inside of turns."""
    stopped = ended = inside = 0
    for row, reason in enumerate(batch.finish_reasons.tolist()):
        turns = _turns_of(batch.tokens[row].tolist(), batch.response_mask[row].tolist())
        lengths = [ends.length_of(turn) for turn in turns]
        if reason == FINISH_REASONS.index("stop"):
            stopped += 1
            ended += bool(turns) and lengths[-1] == len(turns[-1])
        inside += sum(length is not None and length < len(turn) for turn, length in zip(turns, lengths, strict=True))
    return torch.tensor([stopped, ended, inside], dtype=torch.float64, device=batch.tokens.device)


def _turns_of(tokens: Sequence[int], is_sampled: Sequence[bool]) -> list[list[int]]:
    """Return the runs of sampled tokens of a row."""
    turns: list[list[int]] = []
    for position, token in enumerate(tokens):
        if is_sampled[position]:
            if position == 0 or not is_sampled[position - 1]:
                turns.append([])
            turns[-1].append(token)
    return turns


def judge_endings(ends: ResponseEnds, stopped: float, ended: float, inside: float) -> list[Finding]:
    """Judge whether the end tokens and stop strings are sampled, scored and last."""
    words = f"{stopped:.0f} responses stopped, {ended:.0f} of them with a sampled end ({ends.words})"
    if inside:
        words += f"; {inside:.0f} turns have an end inside: sampling went on after it"
    elif ended < stopped:
        words += ": the token that ends a response must be in it, with its log-prob"
    return [Finding("end of text", not inside and ended >= stopped, words)]


def judge_rewards(metrics: Mapping[str, float], responses: int) -> list[Finding]:
    """Judge by the metrics of the rewards whether every response was scored, if this run scores responses."""
    errors = metrics.get("reward/errors")
    if errors is None:
        return []
    words = f"{metrics['reward/mean']:.3g} on average, from {metrics['reward/min']:.3g} to {metrics['reward/max']:.3g}"
    if errors:
        words += (
            f"; {errors:.0f} of {responses} responses could not be scored: {ERRORS_FILE} in the run's folder has them"
        )
    return [Finding("rewards", not errors, words)]


if __name__ == "__main__":
    main()
