"""The documents say what the code does: every metric is named in docs/metrics.md, and their examples run.

Links and commands are checked in test_site.py.
"""

import ast
import dataclasses
import functools
import importlib
import itertools
import pkgutil
import re
import textwrap
from functools import partial

import pytest
import torch
import yaml
from torch.nn.parallel import DistributedDataParallel

from megatron_rc import PlanInputs, RolloutCorrection, RolloutCorrectionConfig, correct_rollouts
from megatron_rc.loss.metrics import MAXIMA, SUMS, derive_loss_metrics
from megatron_rc.loss.policy import PolicyLossConfig
from megatron_rc.measures.histogram import QUANTILES
from megatron_rc.parallel import ParallelGroups, SequenceLayout
from megatron_rc.parallel.groups import group_rank, group_size
from megatron_rc.settings import bounds, criterion
from megatron_rc.settings.criteria import CRITERIA, K1
from tests.correction.test_added_criterion import SEQ_MIN
from tests.parallel import test_processor
from tests.support import training_oracle
from tests.support.correction_cases import CASES, clear_batch
from tests.support.correction_comparison import correct
from tests.support.documented import undocumented
from tests.support.paths import LINKED, ROOT
from tests.support.ranks import Layout
from tests.support.recorded_training import flags, make_trainer, recorded_batch
from tests.test_site import DOCUMENTS, NAMES, blocks, text_of

PREFIX = "rollout_corr/"
MEASURED = [name for name, criterion in CRITERIA.items() if criterion.is_measured]
# What stands for several names in docs/metrics.md: each of these, or any number.
WORDS = {
    "criterion": tuple(CRITERIA),
    "measured": MEASURED,
    "ratio": [name for name in MEASURED if name.endswith("_k1")],
    "percent": [f"{percent:02d}" for percent in QUANTILES],
    "quartile": ["25", "50", "75"],
    "sign": ["negative", "zero", "positive"],
}
NUMBERS = ("from", "to", "steps", "turn")
SECTIONS = r"^## `rollout_corr/.*?(?=^## (?!`rollout_corr/))"


def names_in(text):
    """Regular expressions from the first column of the tables whose first column is ``name``."""
    patterns = []
    for table in re.findall(r"^\| name \|.*?(?=\n\n|\Z)", text, flags=re.MULTILINE | re.DOTALL):
        for row in table.splitlines()[2:]:
            for name in re.findall(r"`([^`]+)`", row.split("|")[1]):
                patterns += expanded(name)
    return patterns


def expanded(name):
    """The name once for each of the words that stand in its place; ``\\d+`` for a number."""
    pieces = re.split(r"<(\w+)>", name)
    choices = [[r"\d+"] if word in NUMBERS else WORDS[word] for word in pieces[1::2]]
    for chosen in itertools.product(*choices):
        yield "".join(piece + word for piece, word in zip(pieces[::2], [*chosen, ""], strict=True))


@functools.cache
def documented():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    return "".join(re.findall(SECTIONS, text, flags=re.MULTILINE | re.DOTALL))


def bypass_metrics(**fields):
    """Those of one step in bypass mode, merged."""
    batch, _ = clear_batch("nothing")
    config = RolloutCorrectionConfig(rollout_is="token", bypass_mode=True, loss_type="reinforce", **fields)
    correction = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig())
    correction.plan(PlanInputs(None, batch.rollout, batch.mask))
    correction.in_loss(batch.train, batch.rollout, batch.mask)
    correction.finish_step()
    return correction.metrics()


@functools.cache
def emitted():
    """Every name that some configuration emits, without the prefix."""
    metrics = [correct(name, clear_batch(name)[0]).metrics() for name in CASES]
    mask = {"rollout_is_mode": "mask", "rollout_is_threshold": "0.5_2.0"}
    names = {
        name for metrics_of_case in [*metrics, bypass_metrics(), bypass_metrics(**mask)] for name in metrics_of_case
    }
    assert all(name.startswith(PREFIX) for name in names)
    return {name.removeprefix(PREFIX) for name in names}


def test_every_metric_is_documented_once():
    patterns = names_in(documented())
    matches = {name: [pattern for pattern in patterns if re.fullmatch(pattern, name)] for name in emitted()}
    assert len(matches) > 200
    assert not {name: documenting for name, documenting in matches.items() if len(documenting) != 1}
    assert not set(patterns) - {pattern for documenting in matches.values() for pattern in documenting}


def test_metrics_of_the_loss_are_documented():
    names = derive_loss_metrics(dict.fromkeys(SUMS, 0.0), dict.fromkeys(MAXIMA, 0.0))
    assert len(names) == 11
    assert not undocumented(names)


def test_the_oldest_names_are_those_of_the_first_table():
    first = names_in(documented().split("\n## ")[0])
    with_mark = {name for name in first if not name.startswith(("log_ratio_p", "bad_log_probs"))}
    for prefix in ("mismatch/", PREFIX):
        metrics = bypass_metrics(metric_prefix=prefix)
        marked = {name.removeprefix(prefix + "mismatch_") for name in metrics if name.startswith(prefix + "mismatch_")}
        assert marked == (with_mark if prefix == "mismatch/" else set())
    assert len(with_mark) == 15


FOLDERS = ("megatron_rc", *LINKED, "tests", "docs", "benchmarks", "examples")


@functools.cache
def sources():
    """Every path of the checkout's folders, and every name of a file in them."""
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*")}
    return {path.name for path in paths}


def missing_paths(document):
    """Paths between backticks that begin with a folder of ours or are the name of a module alone."""
    text = document.read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w./-]+)`", text)
    paths = [path for path in quoted if path.partition("/")[0] in FOLDERS and "/" in path]
    names = [path for path in quoted if re.fullmatch(r"\w+\.(py|md)", path)]
    yield from (path for path in paths if not (ROOT / path).exists())
    yield from (name for name in names if name not in sources() and not (ROOT / name).exists())


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_paths_tests_and_modules_named_in_the_documents_exist(document):
    assert not list(missing_paths(document))
    text = document.read_text(encoding="utf-8")
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert f"\ndef {name}(" in (ROOT / path).read_text(encoding="utf-8"), f"{path}::{name}"
    for name in re.findall(r"`(megatron_rc(?:\.\w+)+)", text):
        assert pkgutil.resolve_name(name), name


MAKE = re.compile(r"(?<![-\w])make ([a-z0-9-]+)")


def test_every_target_that_is_named_exists():
    """Of the Makefile, in documents, in the workflow and in what must pass before a change lands."""
    rules = re.findall(r"^([a-z0-9-]+(?: [a-z0-9-]+)*):", text_of(ROOT / "Makefile"), flags=re.MULTILINE)
    targets = {target for rule in rules for target in rule.split()}
    habits = [ROOT / ".github" / "workflows" / "ci.yml", ROOT / ".ci" / "run"]
    nightly = ROOT / ".github" / "workflows" / "nightly.yml"
    for path in (*DOCUMENTS, *habits, nightly):
        commands = re.findall(r"`[^`\n]+`|^[ -]*(?:run: )?make .*$", text_of(path), flags=re.MULTILINE)
        assert {name for line in commands for name in MAKE.findall(line)} <= targets, path
    for path in habits:
        assert {"test", "lint"} <= set(MAKE.findall(text_of(path)))
    for path in (habits[0], nightly, ROOT / ".pre-commit-config.yaml"):
        assert isinstance(yaml.safe_load(text_of(path)), dict)


def test_the_tree_lists_every_folder():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    tree = text.partition("\n### The tree\n\n```\n")[2].partition("\n```\n")[0]
    listed = set()
    above = []
    for indent, name in re.findall(r"^( *)([a-z_]+)/ +\S", tree, flags=re.MULTILINE):
        above = [*above[: len(indent) // 2], name]
        listed.add("/".join(above))
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("megatron_rc", *LINKED)
        for path in (ROOT / top).rglob("__init__.py")
        if path.relative_to(ROOT).parts[1] not in LINKED
    }
    assert packages <= listed
    assert all((ROOT / path).is_dir() for path in listed)


# What the objects are made of that a user adds, as CONTRIBUTING and docs/data.md say.
PARTS = ("launch.tasks", "loss.objectives", "settings.bounds", "settings.criteria", "settings.criterion")
# What other trainers call.
PARTS += ("adaptors.megatron_lm", "adaptors.nemo_rl", "adaptors.sequences", "adaptors.slime", "adaptors.verl")
PARTS += ("attribution",)
PARTS = tuple(f"megatron_rc.{name}" for name in PARTS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_examples_import_public_names_alone(document):
    for node in itertools.chain(*(ast.walk(ast.parse(block)) for block in blocks(document, "python"))):
        if isinstance(node, ast.Import):
            assert not [alias.name for alias in node.names if alias.name.startswith("megatron_rc")]
        elif isinstance(node, ast.ImportFrom) and node.module.startswith("megatron_rc"):
            module = importlib.import_module(node.module)
            assert node.module in ("megatron_rc", "megatron_rc.parallel", *PARTS)
            public = dir(module) if node.module in PARTS else module.__all__
            assert {alias.name for alias in node.names} <= set(public)


def run(document, index=0, **names):
    """What an example of a page leaves behind; it stands by itself, or begins with these names."""
    namespace = dict(names)
    torch.manual_seed(0)
    exec(compile(blocks(ROOT / document, "python")[index], f"{document}, example {index}", "exec"), namespace)
    return namespace


def test_readme_corrects_a_batch(monkeypatch, capsys):
    one_call = run("README.md", 2)
    assert f"{PREFIX}kl" in capsys.readouterr().out
    assert one_call["loss"].isfinite()
    assert 0 < int(one_call["result"].mask.sum()) < int(one_call["response_mask"].sum())

    # The lines for a Megatron loop are the same call: here in one process, with the batch of the example.
    monkeypatch.setattr(ParallelGroups, "from_megatron", classmethod(lambda cls: ParallelGroups()))
    in_a_loop = run("README.md", 1, ParallelGroups=ParallelGroups, **one_call)
    assert torch.equal(in_a_loop["loss"], one_call["loss"])


def test_the_library_page_corrects_on_shards(monkeypatch):
    monkeypatch.setattr(ParallelGroups, "from_megatron", classmethod(lambda cls: ParallelGroups()))
    logits = torch.randn(3, 8, 10)
    labels = torch.randint(10, (3, 8))
    mask = torch.ones(3, 8, dtype=torch.bool)
    rollout = torch.log_softmax(logits, -1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    config = RolloutCorrectionConfig.decoupled_token_is()
    result = run("docs/library.md")["correct"](logits, labels, rollout, mask, config)
    result.check()
    torch.testing.assert_close(result.weights, torch.ones(3, 8))


def steps_of_the_page(flags_of_run):
    """(metrics, the trainer's gradients, the page's) of two optimizer steps of one plan, on this rank."""
    trainer = make_trainer(flags_of_run)
    correction = trainer.correction
    is_last = trainer.groups.is_last_stage
    prepared = trainer.prepare(recorded_batch(0))
    cuts = prepared.batch.cuts
    gradients_of_trainer = [(trainer.accumulate(prepared, index), gradients(trainer))[1] for index in range(len(cuts))]
    pieces = [[prepared.batch.local.piece(cut) for cut in some] for some in cuts]
    page = run("docs/library.md", 1)
    flat = [piece for some in pieces for piece in some]
    page["set_up"](correction, trainer.chunks[0].config)
    ids = [torch.full((len(piece.advantages),), index) for index, some in enumerate(pieces) for piece in some]
    names = ("rollout_log_probs", "response_mask", "layout")
    old = None if correction.config.bypass_mode else [piece.train_log_probs for piece in flat]
    inputs = PlanInputs(
        *(old, *([getattr(piece, name) for piece in flat] for name in names)),
        advantages=[piece.advantages for piece in flat],
        mini_batch_ids=ids,
    )
    plan, made = page["prepare"](correction, inputs if is_last else None, num_mini_batches=len(cuts))
    steps = []
    made = iter(made or [None] * len(flat))
    for index, some in enumerate(pieces):
        batches = [(piece.tokens, piece.positions, piece.labels, next(made)) for piece in some]
        metrics = page["step"](correction, plan, index, trainer.model, batches, seq_length=16, micro_batch_size=4)
        steps.append((metrics, gradients_of_trainer[index], gradients(trainer)))
    return steps


def gradients(trainer):
    return [parameter.main_grad.clone() for chunk in trainer.chunks for parameter in chunk.parameters()]


@pytest.mark.parametrize(
    ("layout", "mode"),
    [
        (Layout(pp=2), ["--bypass-mode", "--loss-type=reinforce"]),
        (Layout(pp=2, vpp=True), []),
    ],
    ids=["pp2-bypass", "pp2-vpp-decoupled"],
)
def test_the_library_page_takes_the_trainers_steps(ranks, tmp_path, mode, layout):
    # The whole vocabulary is real, and neither penalty is on: the page's loss asks for neither.
    flags_of_run = flags(
        tmp_path, "--vocab-size=16", "--grpo-kl-beta=0", "--global-batch-size=8", *layout.flags(), *mode
    )
    everywhere = ranks.run(steps_of_the_page, layout, flags_of_run)
    assert {len(steps) for steps in everywhere} == {2}
    for metrics, expected, got in (step for steps in everywhere for step in steps):
        assert metrics["loss/total"] != 0
        size = torch.cat([gradient.flatten() for gradient in expected]).norm()
        assert size > 0.01
        # The page plans micro-batches, the trainer all rows at once.
        assert all(
            (gradient - expected_gradient).norm() < 1e-6 * size
            for gradient, expected_gradient in zip(got, expected, strict=True)
        )


def test_the_library_page_carries_the_sums_by_itself():
    page = run("docs/library.md", 2)
    whole = correct_rollouts(page["old"], page["rollout"], page["mask"], page["config"], sequence_ids=torch.arange(4))
    for layout_rank, result in enumerate(page["results"]):
        layout = type(page["layout"]).padded(4, 16, cp_rank=layout_rank, cp_size=2)
        assert torch.equal(result.mask, layout.cut(whole.mask))
        torch.testing.assert_close(result.weights, layout.cut(whole.weights))
        # float32 log-probs: what the runs of a slice add up in float32 is right to 1e-7.
        assert result.metrics() == pytest.approx(whole.metrics(), rel=1e-6)


def kept_on_ranks():
    """Log-probs from this rank's vocabulary shard, and those of a plain softmax over the kept tokens."""
    group = ParallelGroups.from_megatron().tp
    torch.manual_seed(0)
    logits = torch.randn(2, 5, 12, dtype=torch.float64)
    labels = torch.randint(12, (2, 5))
    is_kept = (torch.rand(2, 5, 12) < 0.4).scatter_(2, labels.unsqueeze(2), True)
    ids = [row.nonzero().flatten().tolist() for row in is_kept.flatten(0, 1)]
    shard = logits.chunk(group_size(group), 2)[group_rank(group)].contiguous()
    score = run("docs/library.md", 3)["log_probs_of_the_kept"]
    got, _ = score(shard, labels, ids, torch.ones(2, 5, dtype=torch.bool), group)
    want = logits.masked_fill(~is_kept, -torch.inf).log_softmax(2).gather(2, labels.unsqueeze(2)).squeeze(2)
    return got, want


def test_the_library_page_scores_what_the_engine_kept(ranks):
    for got, want in ranks.run(kept_on_ranks, Layout(tp=2)):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def forward_steps(flags_of_run):
    """(log-probs and entropies of the page's forward step, whether the first result went to the schedule)."""
    from megatron_rc.launch.training.models.output import processed

    chunk = test_processor.build(flags_of_run, tied=True)

    def model(*inputs, output_processor, loss_mask=None, **more):
        """GPTModel of Megatron-Core 0.18, whichever is installed."""
        return processed(chunk, output_processor, *inputs, loss_mask=loss_mask, **more)

    page, (tokens, labels, mask, kept_tokens, _) = run("docs/library.md", 6), test_processor.data()
    number = training_oracle.VOCABULARY
    temperature = test_processor.TEMPERATURE
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    data = {"tokens": tokens, "position_ids": positions, "labels": labels, "loss_mask": mask}
    data |= test_processor.support(kept_tokens)
    step = partial(page["forward_step"], lambda data, results, output: (results, output), number, temperature)
    output, loss_func = step(iter([data]), model)
    results, given_to_schedule = loss_func(output)
    return torch.stack(results).detach(), given_to_schedule is results[0]


@pytest.mark.parametrize("layout", [Layout(tp=2, sp=True)], ids=str)
def test_the_library_page_has_forward_steps(ranks, tmp_path, layout):
    want, _ = test_processor.reference(test_processor.Case(True, "log-probs"), tied=True)
    for results, is_first in ranks.run(forward_steps, layout, test_processor.words_of(tmp_path, layout, True)):
        assert is_first
        torch.testing.assert_close(results, want, rtol=1e-9, atol=1e-9)


SHORT = (5, 0, 9, 1)  # tokens of four sequences


def packed_on_this_rank():
    """(metrics, weights of whole sequences) of log-probs that the page cuts."""
    groups = ParallelGroups.from_megatron()
    generator = torch.Generator().manual_seed(0)
    old, rollout = ([-1 - torch.rand(length, generator=generator) for length in SHORT] for _ in range(2))
    cut = functools.partial(
        run("docs/library.md", 4)["packed_slices"], cp_rank=group_rank(groups.cp), cp_size=group_size(groups.cp)
    )
    masks = [torch.ones(length, dtype=torch.bool) for length in SHORT]
    (layout, *_), *_ = pieces = [cut(tensors) for tensors in (old, rollout, masks)]
    result = correct_rollouts(*(piece for _, piece in pieces), CONFIG, layout, groups)
    result.check()
    return result.metrics(), result.weights, layout


CONFIG = RolloutCorrectionConfig.decoupled_seq_is_rs()


def test_the_library_page_packs_whole_micro_batches():
    """Two micro-batches, one for each optimizer step: the metrics of the padded batch."""
    batch, _ = clear_batch("nothing")
    config = RolloutCorrectionConfig.decoupled_token_is()
    rows = [
        (batch.train[row], batch.rollout[row], batch.mask[row], float(row)) for row in range(len(batch.mask) // 2 * 2)
    ]
    half = len(rows) // 2
    inputs = run("docs/library.md", 4)["packed_inputs"]([rows[:half], rows[half:]], per_step=1)
    plan = RolloutCorrection(config, ParallelGroups(), loss=PolicyLossConfig()).plan(inputs, num_mini_batches=2)
    plan.check()
    whole = correct_rollouts(*(torch.stack(column) for column in list(zip(*rows, strict=True))[:3]), config)
    assert plan.metrics()["rollout_corr/k3_kl"] == pytest.approx(whole.metrics()["rollout_corr/k3_kl"])
    counted = [sum(bool(mask.any()) for *_, mask, _ in part) for part in (rows[:half], rows[half:])]
    assert plan.counted[:, 1].tolist() == counted


def test_the_library_page_cuts_sequences_of_any_length(ranks):
    ((whole, weights, layout),) = ranks.run(packed_on_this_rank, Layout())
    assert layout.num_sequences == len(SHORT)
    of_ranks = ranks.run(packed_on_this_rank, Layout(cp=2))
    restored = of_ranks[0][2].restore([part for _, part, _ in of_ranks])
    for metrics, _, _ in of_ranks:
        assert metrics == pytest.approx(whole, rel=1e-6)
    counted = weights > 0
    torch.testing.assert_close(restored[restored > 0], weights[counted])
    assert int(counted.sum()) == sum(SHORT)


def averaged_gradient():
    """The gradient that DDP averages, of the page's loss on this rank's tokens; and the whole batch's, by itself."""
    groups = ParallelGroups.from_megatron()
    generator = torch.Generator().manual_seed(0)
    old = -1 - torch.rand(4, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(4, 8, generator=generator) < 0.7
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.1], dtype=torch.float64)
    loss = run("docs/library.md", 5)["own_loss"]
    averaged_gradients = []
    for own_groups in (groups, ParallelGroups()):
        rows = slice(group_rank(own_groups.dp), None, group_size(own_groups.dp))
        layout = SequenceLayout.padded(
            4 // group_size(own_groups.dp),
            8 // group_size(own_groups.cp),
            cp_rank=group_rank(own_groups.cp),
            cp_size=group_size(own_groups.cp),
        )
        local_old, local_mask = (layout.cut(tensor[rows]) for tensor in (old, mask))
        model = torch.nn.Linear(1, 1).double()
        ranks = (
            DistributedDataParallel(model, process_group=own_groups.dp_cp) if own_groups.dp_cp is not None else model
        )
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.zero_()
        loss(ranks(local_old.unsqueeze(-1)).squeeze(-1), local_old, advantages[rows], local_mask, own_groups).backward()
        averaged_gradients.append(model.bias.grad.item())
    return averaged_gradients


@pytest.mark.parametrize("layout", [Layout(cp=2, dp=2)], ids=str)
def test_the_library_page_knows_the_factor_of_averaged_gradients(ranks, layout):
    for averaged, whole in ranks.run(averaged_gradient, layout):
        assert averaged == pytest.approx(whole, rel=1e-12)
        assert abs(whole) > 0.1


def test_other_pages_run(tmp_path, monkeypatch, capsys):
    """The pages on presets and records; the third block of the last one needs verl: make test-adaptors."""
    assert run("docs/presets.md")["config"].rollout_rs_threshold == "0.2_2.0"
    assert "[0.2, 2]" in capsys.readouterr().out
    estimators = run("docs/presets.md", 1)
    assert estimators["advantages"][estimators["response_mask"]].sum().abs() < 1e-5
    assert estimators["per_response"].tolist() == [1, -1, 0.5, -0.5]
    exec(blocks(ROOT / "docs" / "presets.md", "python")[2], estimators)
    # Of two responses the other one is the mean, whatever its weight.
    torch.testing.assert_close(estimators["weighted"], estimators["per_response"])
    exec(blocks(ROOT / "docs" / "presets.md", "python")[3], estimators)
    assert estimators["advantages"].tolist() == pytest.approx([0.71, -0.71, -0.71, -0.71], abs=0.005)
    block, forms, _ = blocks(ROOT / "docs" / "rollouts.md", "python")
    monkeypatch.chdir(tmp_path)
    records_page = {"batch": recorded_batch(0)}
    exec(compile(block, "docs/rollouts.md", "exec"), records_page)
    assert records_page["batch"].num_sequences == 2 + records_page["other"].num_sequences
    support_page = {}
    for line in forms.splitlines():
        exec(line, support_page)
        assert not line.startswith("ids") or support_page["ids"].tolist() == [5, 6, 7]
    assert support_page["counts"].tolist() == [2, 0, 1]


def test_the_criterion_of_contributing_is_the_one_that_a_test_adds():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^    define\(\n(?:    .*\n)+", text, flags=re.MULTILINE)
    defined = []
    exec(textwrap.dedent(block), {"define": defined.append, **vars(criterion), **vars(bounds), "K1": K1})
    for field in dataclasses.fields(SEQ_MIN):
        if field.name != "statistic":
            assert getattr(defined[0], field.name) == getattr(SEQ_MIN, field.name)
