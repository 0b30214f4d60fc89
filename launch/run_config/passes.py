"""The optimizer steps of a rollout batch in words, and the choice of the forward-only pass for log π_old."""

from __future__ import annotations

from megatron_rc.launch.run_config import RunConfig
from megatron_rc.settings.objective import denominator_is_unknown


def passes_in_words(config: RunConfig) -> str:
    """Return a line for the dry run and for the start of a run."""
    steps = config.updates_per_rollout
    last = config.training.train_iters
    interval = config.checkpoints.save_interval
    saved = f"; --save-interval {interval}: after every {interval // steps} of them" if interval else ""
    return (
        f"--grpo-iterations {config.rollouts.grpo_iterations} makes {steps} optimizer steps of each rollout batch; "
        f"--train-iters {last}: {-(-last // steps)} rollout batches{saved}"
    )


def is_one_pass(config: RunConfig) -> bool:
    """Return whether the update's own log π_θ is log π_old, so that decoupled mode needs no forward-only pass."""
    return not config.correction.corrects_in_loss and why_scored(config) is None


def scoring_in_words(config: RunConfig) -> str:
    """Return one line on the source of log π_old, for the dry run and for the beginning of a run."""
    correction = config.correction
    if correction.corrects_in_loss:
        mode = "--bypass-mode" if correction.bypass_mode else "--proximal-interpolation"
        return f"no forward-only pass: {mode} needs none"
    reason = why_scored(config)
    if reason is None:
        return "no forward-only pass: each rollout batch makes one optimizer step, whose own log π_θ is log π_old"
    return f"a forward-only pass scores each rollout batch: {reason}"


def why_scored(config: RunConfig) -> str | None:
    """Return the reason for a forward-only pass in decoupled mode; None if none is needed."""
    if config.rollouts.always_score:
        return "--always-score"
    steps = config.updates_per_rollout
    if steps > 1:
        return f"it makes {steps} optimizer steps, and π_θ is π_old in the first alone"
    return _why_advantages_wait(config) or _why_the_loss_waits(config)


def _why_advantages_wait(config: RunConfig) -> str | None:
    """Return the flag of an advantage, a value or a record that needs log π_old before the update."""
    advantages = config.advantages
    critic = config.critic
    if advantages.kl_in_reward:
        return f"--kl-in-reward {advantages.kl_in_reward} needs log π_old before the update"
    if advantages.advantage_scope == "accepted":
        return "--advantage-scope accepted needs the rejected responses before the update"
    if advantages.needs_squares:
        return f"--advantage-estimator {advantages.advantage_estimator} needs π_old before the update"
    if advantages.needs_teachers:
        return "--advantage-estimator distillation needs log π_old before the update"
    if advantages.advantage_baseline == "weighted":
        return "--advantage-baseline weighted needs log π_old before the update"
    if critic is not None and critic.correct_values != "none":
        return f"--correct-values {critic.correct_values} corrects the critic before the update"
    if critic is not None and critic.num_critic_only_steps:
        return f"--num-critic-only-steps {critic.num_critic_only_steps} makes steps without an update of the policy"
    if config.rollouts.save_log_probs:
        return "--save-log-probs writes log π_old"
    return None


def _why_the_loss_waits(config: RunConfig) -> str | None:
    """Return what of the model or of the correction is not known before the update is made."""
    correction = config.correction
    loss = config.loss
    fields = config.megatron.given
    if config.routing is not None and not config.replays_rollouts:
        return "--moe-routing-replay-source old replays its experts"
    if correction.needs_prompts:
        of_prompts = ", ".join(criterion.name for criterion in correction.criteria if criterion.unit == "prompt")
        return f"--rollout-rs {of_prompts} needs all responses of a prompt before the update"
    if correction.rollout_is_batch_normalize and (loss.entropy_coef or loss.kl_coef):
        penalty = "--grpo-kl-beta" if loss.kl_coef else "--grpo-entropy-term-weight"
        return f"--rollout-is-batch-normalize with {penalty} needs the mean weight before the update"
    if config.has_auxiliary_losses and denominator_is_unknown(correction, loss, one_pass=True):
        return "the auxiliary losses of the experts need the number of accepted tokens before the update"
    rounding = fields.get("fp8") or fields.get("fp4")
    if rounding:
        return f"layers in {rounding} round each pass by the passes before it"
    return None
