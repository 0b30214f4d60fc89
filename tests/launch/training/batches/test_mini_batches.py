"""One rollout batch in 1, 2 and 4 optimizer steps: in decoupled mode the same result, in coupled PPO another one.

``docs/mathematics.md`` shows what the benchmark measures over several learning rates and batches.
"""

from benchmarks import mini_batches
from tests.launch.training.test_critic_training import PPO
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, share
from tests.support.training_runs import equal

RATE = 0.005
SEED = 7


def measure(mode):
    return mini_batches.distances(mode, RATE, SEED)


def test_the_decoupled_update_does_not_depend_on_the_number_of_steps(ranks):
    decoupled, coupled = (ranks.run(measure, Layout(), mode)[0] for mode in mini_batches.MODES)
    assert decoupled.keys() == {2, 4}
    assert max(decoupled.values()) < 0.015, "the curvature of the loss alone"
    assert min(coupled.values()) > 0.05


def correction_of(words):
    """What corrects the policy and the critic on a whole rollout batch."""
    trainer = make_trainer(words)
    prepared = trainer.prepare(share(trainer, 0))
    policy = prepared.batch.local
    critic = prepared.values.batch.local
    return policy.weights, policy.mask, critic.weights, critic.mask, critic.returns


def test_what_corrects_does_not_depend_on_the_number_of_steps_at_all(ranks, tmp_path):
    arguments = flags(
        tmp_path, *PPO, "--micro-batch-size=4", "--rollout-is-batch-normalize", "--correct-values=weights"
    )
    whole, *others = (
        ranks.run(correction_of, Layout(), [*arguments, f"--global-batch-size={size}"])[0] for size in (16, 8, 4)
    )
    assert all(equal(whole, other) for other in others), "to the last bit"
    assert equal(whole[:2], whole[2:4])
