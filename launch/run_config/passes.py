"""The optimizer steps of a rollout batch in words, and the choice of the forward-only pass for log π_old."""

from __future__ import annotations

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.settings.objective import denominator_is_unknown


def passes_in_words(config: RunConfig) -> str:
    """Line for the dry run and for the start of a run."""
    steps, last, interval = config.updates_per_rollout, config.training.train_iters, config.checkpoints.save_interval
    saved = f"; --save-interval {interval}: after every {interval // steps} of them" if interval else ""
    return (
        f"--grpo-iterations {config.rollouts.grpo_iterations} makes {steps} optimizer steps of each rollout batch; "
        f"--train-iters {last}: {-(-last // steps)} rollout batches{saved}"
    )


def is_one_pass(config: RunConfig) -> bool:
    """Whether the update's own log π_θ is log π_old, so that decoupled mode needs no forward-only pass."""
    return not config.correction.corrects_in_loss and why_scored(config) is None


def scoring_in_words(config: RunConfig) -> str:
    """One line on the source of log π_old, for the dry run and for the beginning of a run."""
    correction = config.correction
    if correction.corrects_in_loss:
        mode = "--bypass-mode" if correction.bypass_mode else "--proximal-interpolation"
        return f"no forward-only pass: {mode} needs none"
    reason = why_scored(config)
    if reason is None:
        return "no forward-only pass: each rollout batch makes one optimizer step, whose own log π_θ is log π_old"
    return f"a forward-only pass scores each rollout batch: {reason}"


def why_scored(config: RunConfig) -> str | None:
    """The reason for a forward-only pass in decoupled mode; None if none is needed."""
    correction, loss, wanted = config.correction, config.loss, config.advantages
    steps, rollouts = config.updates_per_rollout, config.rollouts
    corrects, alone = "none", 0
    if config.critic is not None:
        corrects, alone = config.critic.correct_values, config.critic.num_critic_only_steps
    of_prompts = ", ".join(criterion.name for criterion in correction.criteria if criterion.unit == "prompt")
    penalty = "--grpo-kl-beta" if loss.kl_coef else "--grpo-entropy-term-weight"
    counts = config.has_auxiliary_losses and denominator_is_unknown(correction, loss, one_pass=True)
    rounding = [value for name in ("fp8", "fp4") if (value := config.megatron.given.get(name))]
    reasons = {
        "--always-score": rollouts.always_score,
        f"it makes {steps} optimizer steps, and π_θ is π_old in the first alone": steps > 1,
        f"--kl-in-reward {wanted.kl_in_reward} needs log π_old before the update": wanted.kl_in_reward,
        "--advantage-scope accepted needs the rejected responses before the update": (
            wanted.advantage_scope == "accepted"
        ),
        f"--advantage-estimator {wanted.advantage_estimator} needs π_old before the update": wanted.needs_squares,
        "--advantage-baseline weighted needs log π_old before the update": wanted.advantage_baseline == "weighted",
        f"--correct-values {corrects} corrects the critic before the update": corrects != "none",
        f"--num-critic-only-steps {alone} makes steps without an update of the policy": alone,
        "--save-log-probs writes log π_old": rollouts.save_log_probs,
        "--moe-routing-replay-source old replays its experts": config.routing and not config.replays_rollouts,
        f"--rollout-rs {of_prompts} needs all responses of a prompt before the update": correction.needs_prompts,
        f"--rollout-is-batch-normalize with {penalty} needs the mean weight before the update": (
            correction.rollout_is_batch_normalize and (loss.entropy_coef or loss.kl_coef)
        ),
        "the auxiliary losses of the experts need the number of accepted tokens before the update": counts,
        f"layers in {''.join(rounding[:1])} round each pass by the passes before it": rounding,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)
