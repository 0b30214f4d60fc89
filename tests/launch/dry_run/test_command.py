"""The dry run says what the run would be, or what the run would say; it starts nothing and leaves nothing."""

import importlib.util
import json
import re

import pytest

from megatron_rc.launch.__main__ import main
from megatron_rc.launch.dry_run.places import places, places_in_words
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.flags.launch_file import CONFIGS
from tests.support.commands import code_of

# How the line begins that says that mbridge does not convert the weights.
TABLES = "this program's own tables convert the weights; --weights-bridge mbridge would be refused: it "


def dry_run(capsys, words, ranks=8, nodes=1):
    """(exit code, standard output, standard error without the line that says why mbridge does not convert weights)."""
    words = [*words.split(), "--dry-run", f"--nproc-per-node={ranks}", f"--nnodes={nodes}"]
    code = code_of(main, *words)
    output, errors = capsys.readouterr()
    assert errors.count(TABLES) <= 1
    lines = [line for line in errors.splitlines(keepends=True) if not line.startswith(TABLES)]
    return code, output, "".join(lines)


def test_words(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, output, errors = dry_run(capsys, "--config count_up --vocab-size 13 --micro-batch-size 128", ranks=8)
    assert (code, errors) == (0, "")
    assert "8 ranks = TP 2 × CP 1 × PP 2 × DP 2\n" in output
    assert "32 prompts × 8 responses = 256 sequences, 128 on each data-parallel rank" in output
    assert (
        "--grpo-iterations 2 makes 2 optimizer steps of each rollout batch; --train-iters 200: 100 rollout b" in output
    )
    assert "2 optimizer steps of 256 sequences: each 1 micro-batches a data-parallel rank, of 128 × 16 tokens" in output
    assert "13 tokens, padded to 16 rows, 8 on each tensor-parallel rank" in output
    assert "end tokens: 1 <eos> (tokenizer)" in output
    assert not list(tmp_path.iterdir())


def test_json(capsys):
    code, output, _ = dry_run(capsys, "--config count_up --json --micro-batch-size 8", ranks=8, nodes=2)
    findings = json.loads(output)
    assert code == 0
    assert findings["layout"] == {"tp": 2, "cp": 1, "pp": 2, "dp": 4, "ep": 1}
    assert findings["batch"]["sequences_of_a_replica"] == 64
    assert len(findings["ranks"]) == findings["world_size"] == 16
    assert findings["ends"] == "end tokens: 1 <eos> (tokenizer)"
    assert findings["notes"][-1].startswith("2 machines: "), "who can connect to them"


@pytest.mark.parametrize("mode", ["--dry-run", "--print-config"])
def test_the_warnings_of_a_run_are_written(capsys, tmp_path, mode):
    """Rank 0 of a run writes them; here no rank starts. With two numbers of machines each is written once."""
    named = tmp_path / "mine\x1b[2J.yaml"
    named.write_text((CONFIGS / "launch" / "count_up.yaml").read_text() + "apply-chat-template: true\n")
    save = f"--save={tmp_path}/save --load={tmp_path}/save --save-interval=4 --eval-samples=2"
    machines = "--nproc-per-node=4 --nnodes=1:2 --rdzv-backend=c10d --rdzv-endpoint=there:29500 --micro-batch-size=128"
    code = code_of(main, f"--config={named}", "--cpu", *save.split(), *machines.split(), mode)
    lines = capsys.readouterr().err.splitlines()
    assert (code, len(lines)) == (0, 2), lines
    assert "has no chat template: apply-chat-template of --config" in lines[0]
    assert "mine\\x1b[2J.yaml is dropped" in lines[0]
    assert lines[1] == "these flags do nothing in this run: --eval-samples 2 (needs --eval-interval)"


def test_a_launch_file_says_for_how_many_processes_it_is(capsys, tmp_path):
    """A number that is typed counts more."""
    named = tmp_path / "mine.yaml"
    named.write_text((CONFIGS / "launch" / "count_up.yaml").read_text().replace("world-size: 4", "world-size: 8"))
    for arguments, ranks in (
        (["--config=count_up"], 4),
        ([f"--config={named}"], 8),
        ([f"--config={named}", "--nnodes=4"], 4),
    ):
        assert code_of(main, *arguments, "--dry-run", "--pipeline-model-parallel-size=8") == 2
        assert f"needs a multiple of 16 processes, got {ranks}:" in capsys.readouterr().err
    named.write_text("world-size: many\n")
    assert code_of(main, f"--config={named}", "--dry-run") == 2
    assert "world-size: 'many'" in capsys.readouterr().err


# What a run refuses, a dry run refuses in the same words; each names the flag that mends it.
REFUSED = {
    "--config count_up --global-batch-size 96": "--global-batch-size 96",
    "--config count_up_ppo --rollout-engine vllm-server --rollout-weights-dir w --rollout-url a,b,c": "--rollout-url",
    "--config count_up --num-layer 3": "did you mean --num-layers?",
    "--config nowhere": "--config nowhere",
}


@pytest.mark.parametrize("words", REFUSED, ids=list(REFUSED.values()))
def test_what_would_not_run_ends_with_2_and_the_runs_own_sentence(capsys, words):
    code, output, errors = dry_run(capsys, words)
    assert (code, output) == (2, "")
    assert REFUSED[words] in errors
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert (code_of(main, *words.split(), "--nproc-per-node=8"), *capsys.readouterr()) == (2, "", errors)


@pytest.mark.parametrize("word", ["--device-memory-gib=0.001", "--lr=-1", "--nproc-per-node=many", "--load-hf=/no"])
def test_an_error_as_json(capsys, word):
    """Of the memory, a flag, the launcher's own flag, a file."""
    words = "--config=count_up --dry-run --json --nproc-per-node=4 --weights-bridge=none".split()
    assert code_of(main, *words, word) == 2
    output, errors = capsys.readouterr()
    assert f"error: {json.loads(output)['error']}\n" == errors
    assert word.split("=")[0] in errors


# Flags of scripts for clusters, which this machine has nothing for.
OF_CLUSTERS = {
    "bf16": """--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --tp-comm-overlap
    --attention-backend flash --fp8-format hybrid --fp8-recipe tensorwise --recompute-granularity selective
    --recompute-modules core_attn mlp --cross-entropy-loss-fusion --optimizer-cpu-offload
    --use-precision-aware-optimizer --ckpt-format torch_dist --lr-warmup-fraction 0.1 --te-rng-tracker
    --log-timers-to-tensorboard --profile --record-memory-history""",
    "fp16": "--fp16 --initial-loss-scale 65536",
    "experts": "--num-experts 4 --moe-router-dtype fp32 --moe-token-dispatcher-type alltoall --moe-permute-fusion",
}


@pytest.mark.parametrize("words", OF_CLUSTERS.values(), ids=OF_CLUSTERS)
def test_flags_that_only_gpus_know_are_no_hindrance(capsys, words):
    code, output, errors = dry_run(capsys, f"--config count_up {words} --json", ranks=4)
    assert (code, errors) == (0, "")
    assert json.loads(output)["memory"]
    assert ("--tp-comm-overlap" in output) == ("--tp-comm-overlap" in words), "a note names it"


def test_modules_that_transformer_engine_makes_anew_are_noted(capsys):
    arguments = "--config count_up --recompute-granularity selective --recompute-modules"
    code, output, errors = dry_run(capsys, f"{arguments} layernorm mlp --tp-comm-overlap --bf16 --json", ranks=4)
    assert (code, errors) == (0, "")
    findings = json.loads(output)
    assert any(note.endswith(" --tp-comm-overlap, --recompute-modules layernorm") for note in findings["notes"])
    alike = json.loads(dry_run(capsys, f"{arguments} mlp --bf16 --json", ranks=4)[1])
    assert findings["memory"] == alike["memory"]


@pytest.mark.parametrize(
    ("text", "more", "share"),
    [("max_num_seqs: 8", "", "92%"), ("gpu_memory_utilization: 0.5", "", "50%"), ("", "--rollout-colocate", "")],
)
def test_vllms_share_of_a_device_is_that_of_its_arguments(capsys, tmp_path, text, more, share):
    (tmp_path / "args.yaml").write_text(text or "max_num_seqs: 8")
    arguments = f"--config count_up --rollout-engine vllm --rollout-engine-args {tmp_path}/args.yaml {more}"
    shares = re.findall("vLLM takes (.*) of the device", dry_run(capsys, arguments, ranks=4)[1])
    assert shares == [share] * bool(share)


def test_packages_of_the_training_machines_are_noted(capsys):
    code, output, _ = dry_run(capsys, "--config count_up --rollout-engine vllm --json", ranks=4)
    assert code == 0
    notes = json.loads(output)["notes"]
    assert [note for note in notes if "vllm, which is not installed" in note]
    assert [note for note in notes if "transformer_engine, which is not installed" in note]
    assert json.loads(dry_run(capsys, "--config count_up --cpu --json", ranks=4)[1])["notes"] == []
    # Experts that DeepEP exchanges are looked at without it.
    arguments = (
        "--config count_up --num-experts 4 --moe-ffn-hidden-size 64 --qk-layernorm --moe-token-dispatcher-type flex"
    )
    arguments += " --moe-enable-deepep --moe-deepep-num-sms 24 --moe-router-dtype fp32"
    code, output, errors = dry_run(capsys, f"{arguments} --json", ranks=4)
    assert (code, errors) == (0, "")
    assert [note for note in json.loads(output)["notes"] if "flex needs deep_ep, which is not installed" in note]


def test_mbridge_is_needed_by_the_flag_that_names_it_alone(capsys, monkeypatch):
    """Without the flag a run on a machine that has no mbridge takes the tables; one line says it."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "mbridge" else find(name, *rest)
    )
    words = "--config=count_up --pipeline-model-parallel-size=1 --dry-run --json --nproc-per-node=4".split()
    words.append("--micro-batch-size=128")
    for typed, is_needed in (([], False), (["--weights-bridge=mbridge"], True)):
        assert code_of(main, *words, *typed) == 0
        output, lines = capsys.readouterr()
        notes = [note for note in json.loads(output)["notes"] if "mbridge" in note]
        assert len(notes) == is_needed
        assert lines.startswith(f"{TABLES}needs mbridge, which is not installed here: pip ") != is_needed


def made(words, world):
    return configure(
        ["--config=count_up", "--cpu", "--micro-batch-size=2", *words.split()], world, folders=False, elsewhere=True
    )[0]


def test_places_of_engines():
    results = places(made(LAYOUTS["cp-experts"], 16))
    assert [place.rank for place in results if place.engine == "transformers"] == [0, 4]
    # A long table is cut in the middle.
    rows = places_in_words(places(made("--grpo-prompts-per-step 128", 512)))
    assert rows[0].split() == ["ranks", "pp", "dp", "cp", "tp", "ep", "engine"]
    assert rows[9] == "… 240 more"
    assert rows[-1].split() == ["510-511", "1", "127", "0", "0-1", "0"]
    assert len(places_in_words(places(made("", 32)))) == 17


LAYOUTS = {
    "cp-pp": "--context-parallel-size 2",
    "pp-experts": "--num-experts 4 --expert-model-parallel-size 4 --moe-token-dispatcher-type alltoall",
    "cp-experts": "--context-parallel-size 2 --num-experts 4 --expert-model-parallel-size 4 "
    "--moe-token-dispatcher-type alltoall",
}


@pytest.mark.parametrize("words", LAYOUTS.values(), ids=LAYOUTS)
def test_places_are_those_of_megatrons_own_groups(words):
    from megatron.core import parallel_state

    from tests.support.fake_ranks import fake_groups

    config = made(words, 16)
    for place in places(config):
        with fake_groups(config, place.rank):
            own = {
                "tp": parallel_state.get_tensor_model_parallel_rank(),
                "cp": parallel_state.get_context_parallel_rank(),
                "dp": parallel_state.get_data_parallel_rank(),
                "pp": parallel_state.get_pipeline_model_parallel_rank(),
                "ep": parallel_state.get_expert_model_parallel_rank(),
            }
        assert {name: getattr(place, name) for name in own} == own, place.rank
