"""slime's settings: their translation, and those that are dropped with a note."""

from tests.support.tables import table
from tests.support.translated import reads

SLIME = {"rejection_denominator": "original"}


READ = """
use_tis: false | rollout_is: null
use_tis: false, use_rs: true, rs_veto_threshold: 0.0001 | rollout_is: null | use_rs=True dropped
    | rs_veto_threshold=0.0001 dropped
--use-tis: true, --tis-clip: 3.0 | rollout_is: token, rollout_is_threshold: 3.0
use-tis: true, tis-level: sequence, tis-upper-bound: 3, tis-lower-bound: 0.2
    | rollout_is: sequence, rollout_is_threshold: 3.0 | tis_lower_bound=0.2 dropped: truncation has no lower bound
use_tis: true, tis_mode: mask, tis_level: sequence, rs_upper_bound: 3.0
    | rollout_is: sequence, rollout_is_threshold: UNTRUNCATED, rollout_rs: seq_sum_k1, rollout_rs_threshold: 0.5_2.0
    | tis_mode='mask' keeps the weights | rs_upper_bound=3.0 dropped: use_rs is off
use_tis: true, use_rs: true, rs_veto_threshold: 0.0001, tis_lower_bound: 0.25
    | rollout_is: token, rollout_is_threshold: 2.0, rollout_rs: token_k1, rollout_rs_threshold: 0.25_2.0,
    rollout_token_veto_threshold: 0.0001
use_tis: true, use_rs: true, rs_upper_bound: 3.0, rs_lower_bound: 0
    | rollout_is: token, rollout_is_threshold: 2.0, rollout_rs: token_k1, rollout_rs_threshold: 1e-300_3.0
    | rs_lower_bound=0 is no bound: written as 1e-300
use_tis: true, tis_mode: mask, use_rs: true, rs_lower_bound: 0.7, rs_upper_bound: 9.0
    | rollout_is: token, rollout_is_threshold: UNTRUNCATED, rollout_rs: token_k1, rollout_rs_threshold: 0.7_2.0
    | tis_mode='mask'
use_tis: true, tis_mode: mask, use_rs: true, rs_level: sequence, rs_upper_bound: 9.0
    | rollout_is: token, rollout_is_threshold: UNTRUNCATED, rollout_rs: 'token_k1,seq_sum_k1', rollout_rs_threshold:
    '0.5_2.0,0.5_9.0'
    | tis_mode='mask'
use_tis: true, rs_veto_threshold: 0.0001, tis_batch_normalize: true
    | rollout_is: token, rollout_is_threshold: 2.0, rollout_is_batch_normalize: true
    | rs_veto_threshold=0.0001 dropped: use_rs is off | slime's mean is over the micro-batch
--use-opsm: true, --use-rollout-logprobs: true
    | rollout_is: null, bypass_mode: true, rollout_rs: opsm, rollout_rs_threshold: 0.0001
use_opsm: true, opsm_delta: 0.001, use_tis: true, use_rs: true
    | rollout_is: token, rollout_is_threshold: 2.0, rollout_rs: 'token_k1,opsm', rollout_rs_threshold: '0.5_2.0,0.001'
    | use_opsm:
opsm_delta: 0.001 | rollout_is: null | opsm_delta=0.001 dropped: use_opsm is off
use_mis: false, use_tis: false, mis_mode: mask | rollout_is: null | mis_mode='mask' dropped: slime does nothing
use_tis: true, mis_mode: mask, mis_level: geometric, mis_lower_bound: 0.9, mis_upper_bound: 1.1, mis_veto_threshold:
    0.0001
    | rollout_is: geometric, rollout_is_threshold: UNTRUNCATED, rollout_rs: seq_mean_k1, rollout_rs_threshold: 0.9_1.1,
    rollout_token_veto_threshold: 0.0001
    | mis_mode='mask' keeps the weights
"""


@table("{given} {expected} *notes", READ)
def test_slime(given, expected, notes):
    reads("slime", given, {**SLIME, **expected}, *notes)
