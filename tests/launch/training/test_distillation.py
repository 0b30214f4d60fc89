"""A student learns from a teacher of another size: one step in every layout equals a float64 reference.

The reference has transformers' models and plain expressions over the whole logits; it shares no code with the trainer.
Steps of SGD show the gradient of every parameter, under Hugging Face's names.
"""

import pytest
import torch
import transformers

from megatron_rc.launch.rollouts.teacher_prompts import TeacherRows
from megatron_rc.launch.rollouts.teacher_scores import TeacherScores, rows_of
from megatron_rc.launch.tasks.text import CharacterText
from tests.support.distillation_oracle import divergences, sampled_log_probs, top_k_divergence
from tests.support.published_models import GATED, MODELS, words_of
from tests.support.ranks import Layout
from tests.support.recorded_training import SEQUENCES, flags, make_trainer, recorded_batch, save_initial, share
from tests.support.rollout_servers import CONFIG, running
from tests.support.runs import read
from tests.support.teacher_servers import TeacherAnswers
from tests.support.training_runs import agreed, run_training

STUDENT = transformers.Qwen3Config(**GATED, head_dim=16, tie_word_embeddings=False)
# Another family, width and number of layers, with tied embeddings.
NARROW = GATED | {"hidden_size": 24, "intermediate_size": 32}
TEACHER = transformers.LlamaConfig(**NARROW | {"num_hidden_layers": 2}, tie_word_embeddings=True)
# Enough layers for virtual pipeline stages.
DEEP_TEACHER = transformers.LlamaConfig(**NARROW | {"num_hidden_layers": 8}, tie_word_embeddings=True)
# A step so large that the change of a weight has all digits of its gradient.
RATE = 64
SGD = ["--optimizer=sgd", "--sgd-momentum=0", "--clip-grad=0", f"--lr={RATE}", "--train-iters=2", "--grpo-iterations=1"]
# Token weights up to 1.5, and no rejection.
WEIGHTS = ["--rollout-is=token", "--rollout-is-threshold=1.5", "--rollout-rs=none", "--grpo-kl-beta=0"]
BOUND = 1.5


def random_model(config, folder, seed):
    """A model whose distributions differ much between tokens."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.15 * torch.randn_like(weight))
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Directories of the student and of two teachers."""
    places = [tmp_path_factory.mktemp(name) for name in ("student", "teacher", "other")]
    for seed, (place, config) in enumerate(zip(places, (STUDENT, TEACHER, DEEP_TEACHER), strict=True)):
        random_model(config, place, seed)
    return places


def read_model(folder):
    # The faster products of experts have no float64.
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )


def flags_of(folders, layout, *more):
    """Flags of a run on recorded rollouts, without a threshold of a rejection."""
    common = [word for word in words_of(folders[0], layout) if not word.startswith("--rollout-")]
    return [*common, *SGD, *WEIGHTS, f"--teacher-load-hf={folders[1]}", *more]


def one_step(words, hinted=None, served=None):
    """(metrics of one step on the first recorded batch, gradients by Hugging Face's names).

    ``hinted``: tokens and shifts of rows with the teacher's own prompts. ``served``: a teacher's log-probs of all rows.
    """
    from megatron_rc.launch.weights.converter import export_model

    trainer = make_trainer(words)

    def weights():
        return {name: tensor.clone() for name, tensor in export_model(trainer.chunks, trainer.config, trainer.groups)}

    before = weights()
    rollouts = share(trainer, 0)
    rows = slice(int(rollouts.sample_ids[0]), int(rollouts.sample_ids[-1]) + 1)
    teacher_input = None
    if hinted is not None:
        teacher_input = TeacherRows(*(values[rows] for values in hinted))
    if served is not None:
        teacher_input = rows_of(served, rows)
    prepared = trainer.prepare(rollouts, None, teacher_input)
    metrics = trainer.update(prepared, 0).metrics
    after = weights()
    return metrics, {name: (before[name].double() - after[name].double()) / RATE for name in before}


def reference(folders, batch, loss_of_tokens):
    """(loss, gradients by name) of the mean of token losses; ``loss_of_tokens`` gets logits, and returns [n, s - 1]."""
    student = read_model(folders[0])
    logits = student(input_ids=batch.tokens).logits[:, :-1]
    mask = batch.response_mask[:, 1:]
    losses = loss_of_tokens(logits)
    loss = torch.where(mask, losses, 0).sum() / mask.sum()
    loss.backward()
    return float(loss.detach()), {name: weight.grad for name, weight in student.named_parameters()}


def token_weights(logits, batch):
    """π_old/π_rollout of the sampled tokens, at most the bound, and 0 elsewhere; π_old is the student's."""
    old = sampled_log_probs(logits.detach(), batch.tokens)
    ratio = (old - batch.rollout_log_probs[:, 1:].double()).exp()
    return torch.where(batch.response_mask[:, 1:], ratio.clamp(max=BOUND), 0)


def assert_step(results, expected, tolerance=2e-5):
    """Every rank has the loss; the first rank has the gradients."""
    loss, gradients = expected
    for metrics, _ in results:
        assert metrics["loss/total"] == pytest.approx(loss, rel=tolerance)
    got = results[0][1]
    assert got.keys() == gradients.keys()
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    for name, want in gradients.items():
        distance = float((got[name] - want).norm())
        assert distance <= tolerance * float(want.norm()) + 0.1 * tolerance * largest, name


@pytest.mark.parametrize(
    ("layout", "kind", "more"),
    [
        (Layout(pp=2, vpp=True), "jsd", ["--distillation-beta=0.3"]),
        (Layout(cp=2, dp=2), "reverse_kl", ["--teacher-temperature=1.7", "--rl-use-sequence-packing"]),
        (Layout(tp=2, sp=True), "forward_kl", ["--rl-use-sequence-packing", "--fused-linear-log-probs"]),
    ],
    ids=str,
)
def test_a_step_on_the_divergence_equals_the_reference(ranks, folders, layout, kind, more):
    batch = recorded_batch(0)
    temperature = 1.7 if more[0].startswith("--teacher-temperature") else 1.0
    beta = 0.3 if kind == "jsd" and "--distillation-beta=0.3" in more else 0.5
    teacher = folders[2] if layout.vpp else folders[1]
    teacher_logits = read_model(teacher)(input_ids=batch.tokens).logits[:, :-1].detach()

    def loss_of_tokens(logits):
        return token_weights(logits, batch) * divergences(logits, teacher_logits / temperature, kind, beta)

    more = ["--policy-loss=distill", f"--distillation-kind={kind}", *more]
    run_flags = flags_of([folders[0], teacher], layout, *more)
    results = ranks.run(one_step, layout, run_flags)
    assert_step(results, reference(folders, batch, loss_of_tokens))


def hinted_rows(batch):
    """(tokens, shifts) of rows with a hint of 1 or 2 tokens in front, and without one in every third row."""
    generator = torch.Generator().manual_seed(3)
    shifts = torch.arange(len(batch.tokens)) % 3
    tokens = torch.zeros_like(batch.tokens)
    for row, shift in enumerate(shifts.tolist()):
        hint = torch.randint(3, 13, (shift,), generator=generator)
        tokens[row] = torch.cat([hint, batch.tokens[row]])[: tokens.shape[1]]
    return tokens, shifts


def without_hints(logits, shifts, length):
    """[n, s - 1, v] of the policy's positions, from a teacher's [n, s, v] at its own; 0 behind the end."""
    moved = torch.zeros_like(logits)
    for row, shift in enumerate(shifts.tolist()):
        moved[row, : length - shift] = logits[row, shift:]
    return moved[:, :-1]


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        (Layout(tp=2, sp=True), []),
        (Layout(tp=2, cp=2, sp=True), ["--rl-use-sequence-packing", "--fused-linear-log-probs"]),
    ],
    ids=str,
)
def test_a_teacher_with_a_hint_is_aligned_by_response_token(ranks, folders, layout, more):
    batch = recorded_batch(0)
    tokens, shifts = hinted_rows(batch)
    teacher_logits = read_model(folders[1])(input_ids=tokens).logits.detach()
    teacher_logits = without_hints(teacher_logits, shifts, tokens.shape[1])

    def loss_of_tokens(logits):
        return token_weights(logits, batch) * divergences(logits, teacher_logits, "reverse_kl", 0.5)

    results = ranks.run(one_step, layout, flags_of(folders, layout, "--policy-loss=distill", *more), (tokens, shifts))
    assert_step(results, reference(folders, batch, loss_of_tokens))


def test_a_hint_changes_the_teachers_advantages_alike(ranks, folders):
    batch = recorded_batch(0)
    tokens, shifts = hinted_rows(batch)
    teacher_logits = read_model(folders[1])(input_ids=tokens).logits.detach()
    teacher = sampled_log_probs(without_hints(teacher_logits, shifts, tokens.shape[1]), batch.tokens)

    def loss_of_tokens(logits):
        log_probs = sampled_log_probs(logits, batch.tokens)
        return -token_weights(logits, batch) * (teacher - log_probs.detach()) * log_probs

    more = ["--policy-loss=reinforce", "--advantage-estimator=distillation", "--rl-use-sequence-packing"]
    layout = Layout(cp=2)
    results = ranks.run(one_step, layout, flags_of(folders, layout, *more), (tokens, shifts))
    assert_step(results, reference(folders, batch, loss_of_tokens))


def served_scores(folder, batch, top_k):
    """A teacher's log-probs as a server gives them, and as [n, s - 1, k] at label positions."""
    log_probs = read_model(folder)(input_ids=batch.tokens).logits[:, :-1].detach().log_softmax(-1)
    top = log_probs.topk(top_k, dim=-1)
    mask = batch.response_mask
    of_labels = log_probs.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    counts = torch.where(mask, top_k, 0).int()
    scores = TeacherScores(
        tokens=batch.tokens,
        log_probs=torch.where(mask, torch.nn.functional.pad(of_labels, (1, 0)), 0).float(),
        top_ids=top.indices[mask[:, 1:]].flatten().int(),
        top_counts=counts,
        top_log_probs=top.values[mask[:, 1:]].flatten().float(),
    )
    return scores, top.indices, top.values, of_labels


@pytest.mark.parametrize(
    ("layout", "tail", "more"),
    [
        (Layout(tp=2, sp=True), "none", ["--fused-linear-log-probs"]),
        (Layout(cp=2, dp=2), "rest", ["--rl-use-sequence-packing"]),
        (Layout(pp=2), "sampled", []),
    ],
    ids=str,
)
def test_a_teacher_that_gives_its_likeliest_tokens(ranks, folders, layout, tail, more):
    batch = recorded_batch(0)
    scores, top_ids, top_log_probs, label_log_probs = served_scores(folders[1], batch, top_k=5)

    def loss_of_tokens(logits):
        divergence = top_k_divergence(logits, top_ids, top_log_probs, batch.tokens[:, 1:], label_log_probs, tail)
        return token_weights(logits, batch) * divergence

    run_flags = [word for word in flags_of(folders, layout, *more) if not word.startswith("--teacher-load-hf")]
    urls = ",".join(["http://127.0.0.1:1"] * layout.dp)
    run_flags += ["--policy-loss=distill", f"--teacher-url={urls}", f"--teacher-tail={tail}"]
    results = ranks.run(one_step, layout, run_flags, None, scores)
    assert_step(results, reference(folders, batch, loss_of_tokens))


def test_the_divergence_joins_the_objective(ranks, folders):
    """Rewards and a teacher in one loss: -A log π and 0.3 times the KL, both times the weight."""
    batch = recorded_batch(0)
    rewards = batch.rewards.double().view(4, 4)
    advantages = (rewards - rewards.mean(1, keepdim=True)).view(-1, 1)
    teacher_logits = read_model(folders[1])(input_ids=batch.tokens).logits[:, :-1].detach()

    def loss_of_tokens(logits):
        policy = -advantages * sampled_log_probs(logits, batch.tokens)
        return token_weights(logits, batch) * (policy + 0.3 * divergences(logits, teacher_logits, "reverse_kl", 0.5))

    more = ["--policy-loss=reinforce", "--advantage-estimator=grpo-no-std", "--distillation-coef=0.3"]
    results = ranks.run(one_step, Layout(dp=2), flags_of(folders, Layout(dp=2), *more))
    assert_step(results, reference(folders, batch, loss_of_tokens))
    assert results[0][0]["distillation/reverse_kl"] > 0


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(tp=2, sp=True)], ids=str)
def test_advantages_are_the_teachers_log_probs_minus_the_policys(ranks, folders, layout):
    batch = recorded_batch(0)
    of_teachers = [
        sampled_log_probs(read_model(folder)(input_ids=batch.tokens).logits[:, :-1].detach(), batch.tokens)
        for folder in folders[1:]
    ]
    teacher = 0.25 * of_teachers[0] + 0.75 * of_teachers[1]

    def loss_of_tokens(logits):
        log_probs = sampled_log_probs(logits, batch.tokens)
        return -token_weights(logits, batch) * (teacher - log_probs.detach()) * log_probs

    more = ["--policy-loss=reinforce", "--advantage-estimator=distillation", "--teacher-weights", "0.25", "0.75"]
    run_flags = [word for word in flags_of(folders, layout, *more) if not word.startswith("--teacher-load-hf")]
    run_flags += ["--teacher-load-hf", str(folders[1]), str(folders[2])]
    results = ranks.run(one_step, layout, run_flags)
    assert_step(results, reference(folders, batch, loss_of_tokens))


def test_a_teacher_may_have_experts(ranks, folders, tmp_path):
    """The student is dense; the teacher's experts are spread over no ranks, and routed by its own routers."""
    folder = random_model(MODELS["qwen3_moe"], tmp_path, seed=5)
    batch = recorded_batch(0)
    teacher_logits = read_model(folder)(input_ids=batch.tokens).logits[:, :-1].detach()

    def loss_of_tokens(logits):
        return token_weights(logits, batch) * divergences(logits, teacher_logits, "reverse_kl", 0.5)

    layout = Layout(tp=2, sp=True)
    run_flags = flags_of([folders[0], folder], layout, "--policy-loss=distill")
    results = ranks.run(one_step, layout, run_flags)
    assert_step(results, reference(folders, batch, loss_of_tokens))


@pytest.mark.parametrize("of_checkpoint", [False, True], ids=["divergence", "advantages-of-checkpoint"])
def test_a_teacher_may_have_further_embedding_rows(ranks, folders, tmp_path, of_checkpoint):
    """Both distributions are over the policy's rows; TP cuts the teacher's embedding at other rows."""
    config = transformers.LlamaConfig(**TEACHER.to_dict() | {"vocab_size": STUDENT.vocab_size + 5})
    folder = random_model(config, tmp_path / "teacher", seed=7)
    CharacterText("0123456789").save(folder)
    batch = recorded_batch(0)
    teacher_logits = read_model(folder)(input_ids=batch.tokens).logits[:, :-1, : STUDENT.vocab_size].detach()

    def loss_of_tokens(logits):
        weights = token_weights(logits, batch)
        if not of_checkpoint:
            return weights * divergences(logits, teacher_logits, "forward_kl", 0.5)
        log_probs = sampled_log_probs(logits, batch.tokens)
        return -weights * (sampled_log_probs(teacher_logits, batch.tokens) - log_probs.detach()) * log_probs

    layout = Layout(tp=2, sp=True)
    more = ["--policy-loss=distill", "--distillation-kind=forward_kl"]
    if of_checkpoint:
        more = ["--policy-loss=reinforce", "--advantage-estimator=distillation"]
    run_flags = flags_of([folders[0], folder], layout, *more, "--make-vocab-size-divisible-by=1")
    if of_checkpoint:
        saved = [word for word in words_of(folder, Layout()) if not word.startswith("--tokenizer-type")]
        ranks.run(save_initial, Layout(), [*saved, "--tokenizer-type=HuggingFaceTokenizer", f"--save={tmp_path}/saved"])
        run_flags = [word for word in run_flags if not word.startswith("--teacher-load-hf")]
        run_flags.append(f"--teacher-load={tmp_path}/saved")
    results = ranks.run(one_step, layout, run_flags)
    assert_step(results, reference(folders, batch, loss_of_tokens))


def test_a_teacher_comes_from_checkpoints_of_another_layout(ranks, folders, tmp_path):
    """The same step as with the directory that the checkpoint was made of."""
    saved = Layout(tp=2)
    ranks.run(save_initial, saved, [*words_of(folders[1], saved), f"--save={tmp_path}/teacher"])
    run_flags = flags_of(folders, Layout(pp=2), "--policy-loss=distill")
    of_directory = ranks.run(one_step, Layout(pp=2), run_flags)[0]
    run_flags = [word for word in run_flags if not word.startswith("--teacher-load-hf")]
    of_checkpoint = ranks.run(one_step, Layout(pp=2), [*run_flags, f"--teacher-load={tmp_path}/teacher"])[0]
    assert of_checkpoint[0]["loss/total"] == of_directory[0]["loss/total"]
    for name, gradient in of_directory[1].items():
        assert torch.equal(of_checkpoint[1][name], gradient), name


def test_a_server_and_its_recorded_log_probs_teach_alike(ranks, tmp_path):
    """A run with a server, which reads prompts with a hint; then the same steps from files, without any server."""
    short = ["--num-layers=2", "--micro-batch-size=8", "--train-iters=2", "--grpo-iterations=1", "--lr=1e-3"]
    common = [*flags(tmp_path, *short, *WEIGHTS), "--policy-loss=distill", "--teacher-top-k=4", "--rollout-dtype=fp32"]
    common = [word for word in common if not word.startswith("--rollout-rs-threshold")]
    with running(kind=TeacherAnswers) as server:
        torch.manual_seed(0)
        server.model = transformers.AutoModelForCausalLM.from_config(CONFIG).double()
        urls = ",".join([server.url] * 2)
        more = [f"--teacher-url={urls}", "--teacher-prompt=python:tests.support.teacher_servers:with_hint"]
        more += [f"--save-rollouts={tmp_path}/rollouts", f"--save-teacher={tmp_path}/teacher", "--run-name=served"]
        assert agreed(ranks.run(run_training, Layout(dp=2), [*common, *more])) is None
        prompts = [body["prompt"] for path, body in server.seen if path == "/v1/completions"]
    assert len(prompts) == 2 * SEQUENCES
    more = [f"--load-rollouts={tmp_path}/rollouts", f"--teacher-files={tmp_path}/teacher", "--run-name=recorded"]
    assert agreed(ranks.run(run_training, Layout(), [*common, *more])) is None
    served, recorded = (read(tmp_path / name) for name in ("served", "recorded"))
    for first, second in zip(served, recorded, strict=True):
        assert first["distillation/reverse_kl"] > 0
        for name in ("distillation/reverse_kl", "loss/total", "grad_norm"):
            assert second[name] == pytest.approx(first[name], rel=1e-5), name


def test_a_run_with_prompts_of_the_teachers_own(ranks, tmp_path):
    """Sampled, scored and trained by two ranks of CP; another prompt gives another divergence."""
    torch.manual_seed(2)
    transformers.AutoModelForCausalLM.from_config(CONFIG).save_pretrained(tmp_path / "teacher")
    short = ["--num-layers=2", "--micro-batch-size=8", "--train-iters=1", "--grpo-iterations=1"]
    common = [*flags(tmp_path, *short, *WEIGHTS), "--policy-loss=distill", "--teacher-load-hf", f"{tmp_path}/teacher"]
    common = [word for word in common if not word.startswith("--rollout-rs-threshold")]
    layout = Layout(cp=2)
    hint = ["--teacher-prompt=python:tests.support.teacher_servers:with_hint"]
    measured = []
    for name, more in (("plain", []), ("hinted", hint)):
        assert agreed(ranks.run(run_training, layout, [*common, *layout.flags(), *more, f"--run-name={name}"])) is None
        (row,) = read(tmp_path / name)
        measured.append(row["distillation/reverse_kl"])
    assert min(measured) > 0
    assert measured[0] != pytest.approx(measured[1], rel=1e-6)


def bytes_of_teacher(words):
    """(bytes of the teacher's weights on the device outside of its passes, of its output layer, of its hidden states).

    And of all its weights, and of the teacher by a dry run's formulas.
    """
    from megatron_rc.launch.dry_run.memory import stage_memories

    trainer = make_trainer(words)
    (teacher,) = trainer.teachers.teachers
    all_weights = sum(weight.nbytes for weight in teacher.chunks[0].parameters())
    prepared = trainer.prepare(share(trainer, 0))
    storages = {weight.untyped_storage()._cdata: weight.untyped_storage() for weight in teacher.chunks[0].parameters()}
    outside = sum(storage.nbytes() for storage in storages.values())
    hidden = prepared.batch.local.teacher_hidden.nbytes
    return outside, teacher.output_weight.nbytes, hidden, all_weights, stage_memories(trainer.config)[0].teacher


def test_its_weights_wait_in_host_memory(ranks, folders):
    layout = Layout(tp=2, cp=2, sp=True)
    run_flags = flags_of(folders, layout, "--policy-loss=distill")
    outside, of_output_layer, hidden, all_weights, by_formula = ranks.run(bytes_of_teacher, layout, run_flags)[0]
    assert outside == of_output_layer
    assert by_formula == hidden + all_weights


def test_an_output_layer_with_further_rows_is_a_copy(ranks, folders, tmp_path):
    """Then the teacher's own output layer waits in host memory too."""
    config = transformers.LlamaConfig(**TEACHER.to_dict() | {"vocab_size": STUDENT.vocab_size + 5})
    folder = random_model(config, tmp_path, seed=7)
    CharacterText("0123456789").save(folder)
    more = ["--policy-loss=distill", "--make-vocab-size-divisible-by=1"]
    run_flags = flags_of([folders[0], folder], Layout(), *more)
    outside, of_output_layer, hidden, all_weights, by_formula = ranks.run(bytes_of_teacher, Layout(), run_flags)[0]
    assert outside == 0
    assert of_output_layer == STUDENT.vocab_size * TEACHER.hidden_size * 4
    assert by_formula == hidden + of_output_layer + all_weights
