"""The page of distillation has the measurements of all its runs, and its runs can start."""

from pathlib import Path

import pytest
import transformers

from benchmarks import distillation
from benchmarks.study import settings
from megatron_rc.launch.engines.registry import ENGINES
from megatron_rc.launch.flags import parser
from megatron_rc.launch.flags.configure import configure
from megatron_rc.launch.tasks import Problem
from tests.support.paths import ROOT
from tests.test_site import blocks

PAGE = ROOT / "docs" / "distillation.md"
DATA = distillation.read(ROOT / "docs" / "distillation.jsonl")


def test_the_table_of_the_page_is_that_of_the_data():
    # Runs of the last seeds may be missing: the table says so.
    assert [row["name"] for row in DATA] == [run.name for run in distillation.runs()][: len(DATA)]
    for form in distillation.FORMS:
        assert distillation.table(DATA, form) in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("divergences", "word"), [((0.8, 0.89), "better"), ((0.8, 0.91), "undecided"), ((1.3, 1.4), "worse")]
)
def test_a_verdict_needs_all_seeds_apart(divergences, word):
    rows = []
    for seed, kl in enumerate((1.0, 1.1, 1.15)):
        rows.append({"engine": "stale", "correction": "none", "seed": seed, "kl": kl})
    for seed, kl in enumerate((*divergences, divergences[0])):
        rows.append({"engine": "stale", "correction": "token_is", "seed": seed, "kl": kl})
    assert distillation.verdict(rows, "stale", "token_is") == word
    assert distillation.verdict(rows[:-1], "stale", "token_is") == "unknown"


def test_the_prompt_of_the_page_has_the_answer():
    (block,) = blocks(PAGE, "python")
    names = {}
    exec(compile(block, "docs/distillation.md", "exec"), names)
    assert names["with_answer"](Problem("1 + 1 = ", "2")) == Problem("The answer is 2. 1 + 1 = ", "2")


def test_every_run_can_start(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(_teachers_config())
    for kind in settings.ENGINES:
        monkeypatch.setitem(ENGINES, f"study-{kind.name}", ENGINES["transformers"])
    monkeypatch.setitem(parser._CHOICES, "rollout_engine", tuple(ENGINES))
    # A parser with these engines for this test alone: others of the process may have made the launcher's already.
    monkeypatch.setattr(parser, "PARSER", parser.build_parser(with_megatron=False))
    monkeypatch.chdir(ROOT)
    for run in distillation.runs():
        if run.seed != distillation.SEEDS[0]:
            continue
        config, _ = configure([*run.flags(Path(tmp_path)), f"--runs-dir={tmp_path}"], 1)
        assert config.loss.distils == (run.form == "divergence")
        assert config.teachers[0].config.transformer.num_layers == 4


def _teachers_config():
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlamaConfig(
        **shape, num_key_value_heads=2, vocab_size=13, max_position_embeddings=16, tie_word_embeddings=True
    )
    return config.to_json_string(use_diff=False)
