"""Launch files: a nested correction, and one sentence for each wrong file."""

import pytest

from megatron_rc.launch.flags.configure import configure
from tests.support.recorded_training import flags
from tests.support.refusals import refused

FLAT = """rollout-is: token
rollout-is-threshold: 3
rollout-rs: none
rollout-token-veto-threshold: 1e-4
rollout-is-batch-normalize: true
"""
NESTED = """rollout_correction:
  rollout_is: token
  rollout_is_threshold: 3
  rollout_rs: null
  rollout-token-veto-threshold: 1e-4
  rollout_is_batch_normalize: true
"""


def correction(tmp_path, text, *more):
    (tmp_path / "a.yaml").write_text(text)
    arguments = [word for word in flags(tmp_path / "runs") if not word.startswith(("--rollout-is", "--rollout-rs"))]
    return configure([*arguments, f"--config={tmp_path}/a.yaml", *more], 1)[0].correction


def test_a_nested_correction_is_that_of_the_flat_keys(tmp_path):
    nested = correction(tmp_path, NESTED)
    assert nested == correction(tmp_path, FLAT)
    assert (nested.rollout_is, nested.rollout_is_threshold, nested.rollout_token_veto_threshold) == ("token", 3, 1e-4)
    typed = correction(tmp_path, NESTED, "--rollout-is-threshold=5", "--no-rollout-is-batch-normalize")
    assert nested.rollout_is_batch_normalize
    second_name = correction(tmp_path, NESTED.replace("rollout_is_batch", "no_rollout_is_batch"))
    assert not second_name.rollout_is_batch_normalize
    assert (typed.rollout_is_threshold, typed.rollout_is_batch_normalize) == (5, False)


WRONG = """
num_layers: 2 :: 'num_layers' | num-layers
lr: fast :: --lr | 'fast'
lr: [1, 2] :: lr: ['1', '2']
swiglu: 1 :: swiglu: '1'
lr: 1\\nlr: 2 :: 'lr'
- lr :: list
lr: { :: YAML
config: other :: 'config'
 :: empty
eps-clip: 0.2 :: 'eps-clip' | grpo-clamp-eps-lower
algorithm: {adv_estimator: grpo} :: 'algorithm' | rollout_correction
rollout_correction: token :: rollout_correction: 'token'
BELOW rollout_is_treshold: 2 :: below rollout_correction | 'rollout-is-treshold' | rollout
BELOW lr: 1 :: below rollout_correction: lr
BELOW rollout_is: token\\n  rollout-is: token :: below rollout_correction: rollout-is
BELOW rollout_is: token\\nrollout-is: token :: rollout-is | below rollout_correction
BELOW bypass_mode: true\\nno-bypass-mode: true :: bypass-mode is given twice
BELOW bypass_mode: null :: bypass-mode: 'null'
BELOW lr: {a: 1} :: lr is no field
chat-template-kwargs: {2020-01-01: x} :: chat-template-kwargs | date
BELOW rollout_is: none\\n  rollout_is_threshold: 2 :: rollout_is_threshold
"""


@pytest.mark.parametrize("row", WRONG.strip("\n").splitlines())
def test_a_wrong_launch_file_is_one_sentence(tmp_path, row):
    text, _, fragments = row.partition(" :: ")
    text = text.replace("BELOW ", "rollout_correction:\n  ").replace("\\n", "\n")
    with refused(fragments):
        correction(tmp_path, f"{text}\n")
