"""Teachers that cannot be compared with the policy are refused before the ranks start; others have their own shape."""

import dataclasses
import json
import shutil

import pytest
import torch
import transformers

from megatron_rc.launch.flags.checks.distillation import _check_tokenizer
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.rollouts.recorded import file_name, write_rollouts
from megatron_rc.launch.rollouts.teacher_scores import Header, TeacherScores, write_scores
from megatron_rc.launch.tasks.text import CharacterText
from tests.support.published_models import GATED, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import SEQUENCES, flags, recorded_batch
from tests.support.refusals import refused

QWEN3 = transformers.Qwen3Config(**GATED, head_dim=16, tie_word_embeddings=False)
SMALL = GATED | {"hidden_size": 24, "num_hidden_layers": 6}
DISTILL = "--policy-loss=distill"


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    """Directories without weights: the policy's, and a smaller one of another family."""
    folders = []
    for name, config in (("policy", QWEN3), ("teacher", transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))):
        folders.append(tmp_path_factory.mktemp(name))
        config.save_pretrained(folders[-1])
    return folders


def settings(words, ranks=1):
    return configure(words, ranks, engine=False)[0]


def with_teacher(configs, *more, layout=None):
    return [*words_of(configs[0], layout or Layout()), f"--teacher-load-hf={configs[1]}", *more]


def test_a_teacher_has_its_own_shape_and_the_runs_layout(configs):
    config = settings(with_teacher(configs, DISTILL, layout=Layout(tp=2, pp=2)), 4)
    (teacher,) = config.teachers
    assert (teacher.config.transformer.num_layers, teacher.config.transformer.hidden_size) == (6, 24)
    assert not teacher.config.model.untie_embeddings_and_output_weights
    assert not teacher.config.transformer.qk_layernorm
    assert config.transformer.qk_layernorm
    assert teacher.config.parallel == config.parallel
    assert teacher.config.model.padded_vocab_size == config.model.padded_vocab_size
    assert teacher.config.training == config.training


YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}


def test_a_teacher_has_its_own_rotary_frequencies(configs, tmp_path):
    """The policy's are stretched by 8, one teacher's by 32, and the other teacher's are plain."""
    policy = transformers.LlamaConfig(**GATED | {"rope_parameters": YARN})
    stretched = transformers.LlamaConfig(**SMALL | {"rope_parameters": YARN | {"factor": 32.0}})
    for name, config in (("policy", policy), ("stretched", stretched)):
        config.save_pretrained(tmp_path / name)
    arguments = [*words_of(tmp_path / "policy", Layout()), "--advantage-estimator=distillation"]
    config = settings([*arguments, "--teacher-load-hf", str(tmp_path / "stretched"), str(configs[1])])
    assert config.yarn.yarn_rotary_scaling_factor == 8
    first, second = config.teachers
    assert first.config.yarn.yarn_rotary_scaling_factor == 32
    assert second.config.yarn is None


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ([], "--teacher-load-hf | does nothing | --distillation-coef"),
        ([DISTILL, "--teacher-url=http://a:1"], "--teacher-load-hf | --teacher-url http://a:1 are two kinds"),
        ([DISTILL, "--teacher-weights=1"], ""),
        (["--advantage-estimator=distillation", "--distillation-kind=forward_kl"], ""),
        (
            ["--advantage-estimator=distillation", "--teacher-weights", "1", "2"],
            "--teacher-weights 1.0 2.0 | each of 1",
        ),
        ([DISTILL, "--teacher-temperature=0"], "--teacher-temperature 0.0 must be positive"),
        ([DISTILL, "--teacher-prompt=python:tests.support.nothing:hint"], "--teacher-prompt | no module tests.support"),
        (
            [DISTILL, "--teacher-prompt=python:tests.support.ranks:COLLECTIVE_SECONDS"],
            "--teacher-prompt | name a function",
        ),
    ],
    ids=str,
)
def test_words_that_a_teacher_refuses(configs, more, parts):
    arguments = with_teacher(configs, *more)
    if parts:
        with refused(parts):
            settings(arguments)
    else:
        assert len(settings(arguments).unused) == 1


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ([DISTILL], "--policy-loss distill needs a teacher | --teacher-load-hf"),
        (["--distillation-coef=0.5"], "--distillation-coef 0.5 needs a teacher"),
        (["--advantage-estimator=distillation"], "--advantage-estimator distillation needs a teacher"),
        ([DISTILL, "--teacher-load=/nowhere"], "--teacher-load /nowhere | holds no checkpoint"),
        ([DISTILL, "--teacher-load-hf=/nowhere"], "--teacher-load-hf /nowhere: there is no such directory"),
        (
            [DISTILL, "--teacher-url=http://a:1", "--teacher-temperature=0.7"],
            "--teacher-temperature 0.7 | --teacher-url http://a:1 | temperature 1",
        ),
        (
            [DISTILL, "--teacher-url=http://a:1", "--rl-default-temperature=0.7"],
            "--teacher-temperature 0.7 | --teacher-url http://a:1 | temperature 1",
        ),
        ([DISTILL, "--teacher-url=http://a:1,http://b:1"], "names 2 servers for 1 data-parallel"),
        ([DISTILL, "--teacher-url=a:1"], "--teacher-url: | expected http://host:port"),
        ([DISTILL, "--teacher-url=http://a:1", "--rollout-top-p=0.9"], "--teacher-url http://a:1 | --rollout-top-p"),
        ([DISTILL, "--teacher-url=http://a:1", "--save-teacher=t"], "--save-teacher t needs --save-rollouts"),
        ([DISTILL, "--teacher-files=t"], "--teacher-files t needs --load-rollouts"),
    ],
    ids=str,
)
def test_sources_that_cannot_be_compared(tmp_path, words, parts):
    with refused(parts):
        configure(flags(tmp_path, *words), 1)


def test_two_teachers_have_no_divergence(configs):
    arguments = words_of(configs[0], Layout())
    with refused(f"names 2 teachers | {DISTILL.replace('=', ' ')} takes one | --advantage-estimator distillation"):
        settings([*arguments, DISTILL, "--teacher-load-hf", str(configs[1]), str(configs[1])])


@pytest.mark.parametrize(
    ("change", "layout", "parts"),
    [
        ({"vocab_size": 29}, Layout(), "the teacher has 29 tokens and the policy 30"),
        ({"num_hidden_layers": 3}, Layout(pp=2), "--num-layers 3 | --pipeline-model-parallel-size = 2"),
        ({"num_attention_heads": 3, "num_key_value_heads": 3}, Layout(tp=2), "--num-attention-heads 3 | = 2"),
        ({"max_position_embeddings": 8}, Layout(), "--seq-length 16 is longer than --max-position-embeddings 8"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(configs, tmp_path, change, layout, parts):
    written = json.loads((configs[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | change))
    arguments = [*words_of(configs[0], layout), f"--teacher-load-hf={tmp_path}", DISTILL]
    with refused(f"--teacher-load-hf {tmp_path} | {parts}"):
        settings(arguments, layout.world)


def test_another_tokenizer_is_refused(configs, tmp_path):
    shutil.copytree(configs[1], tmp_path / "teacher")
    CharacterText("9876543210").save(tmp_path / "teacher")
    arguments = [*words_of(configs[0], Layout()), f"--teacher-load-hf={tmp_path}/teacher", DISTILL]
    with refused(f"--teacher-load-hf {tmp_path}/teacher has another tokenizer | has the id"):
        settings(arguments)
    CharacterText("0123456789").save(tmp_path / "teacher")
    assert settings(arguments).teachers


def test_further_embedding_rows_need_a_tokenizer_without_tokens_there(configs, tmp_path):
    """Models of a series pad their embeddings differently."""
    written = json.loads((configs[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(written | {"vocab_size": 38}))
    arguments = [*words_of(configs[0], Layout()), f"--teacher-load-hf={tmp_path}", DISTILL]
    with refused(f"--teacher-load-hf {tmp_path} | has 38 embedding rows and the policy 30 | without a tokenizer"):
        settings(arguments)
    CharacterText("0123456789abcdefghijklmnopqrstuvwxyz").save(tmp_path)
    with refused(f"--teacher-load-hf {tmp_path} | has 38 embedding rows and the policy 30 | its token 'z' has the id"):
        settings(arguments)
    CharacterText("0123456789").save(tmp_path)
    config, task = configure(arguments, 1, engine=False)
    (teacher,) = config.teachers
    assert (teacher.embedding_rows, teacher.config.model.vocab_size) == (38, 30)
    of_checkpoint = dataclasses.replace(teacher, flag="--teacher-load", tokenizer="gone")
    with refused(f"--teacher-load {tmp_path} | without a tokenizer | its run's --tokenizer-model"):
        _check_tokenizer(config, task, of_checkpoint)


@pytest.fixture
def recorded(tmp_path):
    """Flags of a run on recorded rollouts with recorded log-probs, and a function that writes these anew."""
    batch = recorded_batch(0)
    write_rollouts(batch, tmp_path / "rollouts", 0, 0)
    counts = batch.response_mask.int()
    scores = TeacherScores(
        tokens=batch.tokens,
        log_probs=torch.zeros(batch.tokens.shape),
        top_ids=batch.tokens[batch.response_mask].int(),
        top_counts=counts,
        top_log_probs=torch.zeros(int(counts.sum())),
    )

    def write(header, **change):
        write_scores(dataclasses.replace(scores, **change), header, tmp_path / "teacher", file_name(0, 0))

    arguments = flags(tmp_path, DISTILL, f"--load-rollouts={tmp_path}/rollouts", f"--teacher-files={tmp_path}/teacher")
    return [*arguments, "--train-iters=2", f"--global-batch-size={SEQUENCES}"], write


def test_recorded_log_probs_have_a_temperature_and_a_vocabulary(recorded):
    arguments, write = recorded
    with refused("--teacher-files | is missing"):
        configure(arguments, 1)
    write(Header(temperature=1.0, vocab_size=13))
    assert configure(arguments, 1)[0].has_teacher_scores
    write(Header(temperature=0.5, vocab_size=13))
    with refused("--teacher-files | at temperature 0.5, --teacher-temperature is 1"):
        configure(arguments, 1)
    write(Header(temperature=1.0, vocab_size=14))
    with refused("--teacher-files | over 14 tokens, the policy has 13"):
        configure(arguments, 1)
