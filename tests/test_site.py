"""What a reader follows: links, anchors and commands of the documents, and the pages that are made from code."""

import functools
import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

import megatron_rc
from docs import pages
from megatron_rc import attribution, parallel
from megatron_rc.launch.flags.launch_file import read_launch_file
from megatron_rc.launch.flags.parser import build_parser, long_options
from megatron_rc.launch.flags.torchrun import torchrun_parser
from tests.support.paths import ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").rglob("*.md")),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
NAMES = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)


@functools.cache
def text_of(path: Path):
    return path.read_text(encoding="utf-8")


def blocks(path, *languages):
    return [block for _, language, block in FENCE.findall(text_of(path)) if language in languages]


@functools.cache
def anchors(path: Path):
    """The anchors of a page's headings, as GitHub makes them."""
    highest_numbers: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", FENCE.sub("", text_of(path)), flags=re.MULTILINE):
        shown = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
        highest_numbers[slug] = highest_numbers.get(slug, -1) + 1
    return {
        slug if not number else f"{slug}-{number}"
        for slug, last in highest_numbers.items()
        for number in range(last + 1)
    }


def broken_links(path, text):
    """Links into the checkout that lead nowhere: no such file, or no such heading."""
    for link in re.findall(r"(?<!`)\]\(([^)\s]+)\)", FENCE.sub("", text)):
        target, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        page = (path.parent / target) if target else path
        if not page.exists() or (anchor and anchor not in anchors(page.resolve())):
            yield link


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(path):
    assert not list(broken_links(path, text_of(path)))
    wrong = ["nowhere.md", f"{path.name}#nowhere", "#nowhere"]
    assert list(broken_links(path, "".join(f"[a]({link})" for link in wrong))) == wrong


def test_the_front_page_leads_to_every_page():
    """The site's table of contents is made from it; a page that is in none is an error of the build."""
    index = ROOT / "docs" / "index.md"
    listed = re.findall(r"^ *.+ <(.+)>$", pages.completed("docs/index", text_of(index)), flags=re.MULTILINE)
    pages_listed = [(index.parent / f"{name}.md").resolve() for name in listed]
    assert len(pages_listed) == len(set(pages_listed))
    assert set(pages_listed) == set(DOCUMENTS) - {index}


def test_the_page_of_the_api_has_every_public_name():
    table = text_of(ROOT / "docs" / "api.md").partition("| part | names |")[2]
    listed = re.findall(r"`([^`]+)`", table)
    assert len(listed) == len(set(listed)) == len(pages.api_names())
    assert {f"megatron_rc.{name}" for name in megatron_rc.__all__} <= set(listed)
    assert {f"megatron_rc.parallel.{name}" for name in parallel.__all__} <= set(listed)
    assert {f"megatron_rc.attribution.{name}" for name in attribution.__all__} <= set(listed)
    assert ".. autofunction:: megatron_rc.correct_rollouts\n" in made("api")
    assert ".. autoclass:: megatron_rc.RolloutCorrectionConfig\n" in made("api")
    assert made("api").count(".. auto") == len(listed)


@functools.cache
def made(name):
    return pages.completed(f"docs/{name}", text_of(ROOT / "docs" / f"{name}.md"))


def test_the_page_on_launching_has_every_flag_and_every_command():
    flag_names = {*long_options(build_parser()), *long_options(torchrun_parser())} - {"", "help"}
    listed = re.findall(r"^````\{option\} (.+)$", made("launching"), flags=re.MULTILINE)
    names = {name for line in listed for name in re.findall(r"--([\w-]+)", line)}
    assert {name for name in flag_names if "_" not in name} == names
    assert len(flag_names) > 400
    assert "````{option} --lr LR\n" in made("launching")
    assert "megatron\\_rc" not in "".join(blocks(ROOT / "docs" / "launching.md", "text"))
    for command in pages.COMMANDS:
        assert f"python -m megatron_rc.{command}" in made("launching")
    files = [path for path in (ROOT / "launch").rglob("*.py") if '\nif __name__ == "__main__":' in text_of(path)]
    commands_found = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files}
    # The launcher's flags, and what takes none.
    others = {"launch.check_engine", "launch.train_ppo", "launch.rewards.worker", "launch.weights.from_gguf"}
    assert commands_found - others - {"launch.__main__"} == {
        name for name in pages.COMMANDS if name.startswith("launch.")
    }


def test_the_page_on_launching_has_every_launch_file():
    files = sorted((ROOT / "configs" / "launch").glob("*.yaml"))
    shown = made("launching").partition("\n## Launch files\n")[2].partition("\n## Every flag\n")[0]
    assert re.findall(r"^### (\w+)$", shown, flags=re.MULTILINE) == [path.stem for path in files]
    assert all(text_of(path) in shown for path in files)
    assert "<!-- made by" not in made("launching")


# What runs the Python blocks of each page, and how many there are.
RUN_BY = {
    "README.md": ("test_docs.py", 3),
    "docs/adaptors.md": ("adaptors/pages.py", 5),
    "docs/data.md": ("launch/test_own_modules.py", 2),
    "docs/attribution.md": ("attribution/test_attribute.py", 1),
    "docs/distillation.md": ("test_distillation_page.py", 1),
    "docs/library.md": ("test_docs.py", 7),
    "docs/models.md": ("launch/test_export.py", 1),
    "docs/presets.md": ("test_docs.py", 4),
    "docs/rollouts.md": ("test_docs.py", 3),
    "docs/choosing.md": ("test_why_example.py", 1),
}


def test_python_blocks_are_run():
    numbers = {name: len(blocks(path, "python")) for name, path in zip(NAMES, DOCUMENTS, strict=True)}
    assert numbers == dict.fromkeys(NAMES, 0) | {name: number for name, (_, number) in RUN_BY.items()}
    for name, (test, _) in RUN_BY.items():
        assert Path(name).name in text_of(ROOT / "tests" / test)
        for block in blocks(ROOT / name, "python"):
            compile(block, name, "exec")


COMMANDS = [(name, block) for name, path in zip(NAMES, DOCUMENTS, strict=True) for block in blocks(path, "sh", "bash")]
# Commands that are no project's of ours.
FOREIGN = {".", "apt-get", "cd", "git", "sbatch", "tensorboard", "vllm", "wandb"}


def commands(block):
    """The words of each command of a block, without variables in front of it."""
    for line in block.replace("\\\n", " ").splitlines():
        tokens = shlex.split(line, comments=True)
        for is_end, part in itertools.groupby(tokens, lambda word: word in ("&&", "|", ";", "&")):
            command = list(itertools.dropwhile(re.compile(r"[A-Z_]+=").match, part))
            if command and not is_end:
                yield command[: command.index(">")] if ">" in command else command


@functools.cache
def helped(module):
    return pages.help_of(module)


def wrong(tokens):
    """What of a command does not exist: a target, a module, a file, a flag; None where all does."""
    command, *arguments = tokens[0].removeprefix(".venv/bin/"), *tokens[1:]
    if command == "make":
        targets = re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), flags=re.MULTILINE)
        return [word for word in arguments if "=" not in word and word not in targets]
    if command == "pip":
        extras = re.findall(r"\[([\w-]+)\]", " ".join(arguments))
        return [name for name in extras if f'"{name}": ' not in text_of(ROOT / "setup.py")]
    if command == "torchrun" or arguments[:2] in (
        ["-m", "megatron_rc.launch"],
        ["-m", "megatron_rc.launch.check_engine"],
    ):
        _, left = torchrun_parser().parse_known_args(arguments if command == "torchrun" else arguments[2:])
        left = [word for word in left if word != "launch/train_ppo.py"]
        return build_parser().parse_known_args(left)[1]
    if command.startswith("python") and arguments[:1] == ["-m"]:
        if importlib.util.find_spec(arguments[1]) is None:
            return [arguments[1]]
        flags_of_command = (
            helped(arguments[1]) if arguments[1].removeprefix("megatron_rc.") in pages.COMMANDS else " ".join(arguments)
        )
        return [
            word for word in arguments[2:] if word.startswith("--") and word.partition("=")[0] not in flags_of_command
        ]
    if command.startswith("python") or "/" in command:
        file = arguments[0] if command.startswith("python") else command
        return [] if (ROOT / file).exists() else [file]
    return [] if command in FOREIGN or command.startswith("--") else [command]


@pytest.mark.parametrize(("name", "block"), COMMANDS, ids=[name for name, _ in COMMANDS])
def test_commands_exist(name, block):
    assert not [(tokens, wrong(tokens)) for tokens in commands(block) if wrong(tokens)]


NOWHERE = """make nothing
python -m megatron_rc.nothing
python -m megatron_rc.doctor x --nothing
python -m megatron_rc.launch --nproc-per-node 2 --learning-rate 1
python examples/nothing.py
launch/nothing.sh x
nothing --at all"""


def test_commands_and_flags_that_do_not_exist_are_found():
    for line in NOWHERE.splitlines():
        assert [tokens for tokens in commands(f"A=1 {line}  # why\n") if wrong(tokens)], line
    assert list(unknown_flags("`--lr`, `--rdzv-*`, `--preset`, `--learning-rate 1`")) == ["learning-rate"]


# Pages that name other programs' flags, or those of tests/gpu and benchmarks; and such flags on other pages.
OF_OTHERS = ("benchmarks/RESULTS.md", "docs/adaptors.md", "docs/gpu.md", "docs/migrating.md")
OTHERS = {"custom-tis-function-path", "data-path", "no-enable-chunked-prefill"}
OTHERS |= {"save-debug-rollout-data", "save-debug-train-data"}
OTHERS |= {"enable-return-routed-experts", "return-sampling-mask", "skip-tokenizer-init"}
# A flag of an earlier version, in CHANGELOG.md.
OTHERS |= {"load-last-valid"}


def unknown_flags(text):
    """Flags between backticks that no parser has; a whole command is none."""
    flag_names = {
        name.replace("_", "-") for parser in (build_parser(), torchrun_parser()) for name in long_options(parser)
    }
    helps = "".join(helped(f"megatron_rc.{command}") for command in pages.COMMANDS)
    for quoted in re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        if quoted.split()[0] not in ("python", "torchrun", "vllm"):
            for name in re.findall(r"(?<![\w-])--([\w-]+)(?![\w*-])", quoted):
                if name.replace("_", "-") not in flag_names | OTHERS and f"--{name}" not in helps:
                    yield name


@pytest.mark.parametrize("name", [name for name in NAMES if name not in OF_OTHERS])
def test_flags_between_backticks_exist(name):
    assert not list(unknown_flags(text_of(ROOT / name)))


SETTINGS = [(name, block) for name, path in zip(NAMES, DOCUMENTS, strict=True) for block in blocks(path, "yaml")]
# The first line of a block that is another program's: a comment with its name.
ELSEWHERE = re.compile(r"# (verl|slime|NeMo-RL|OpenRLHF|GitHub)\b")


@pytest.mark.parametrize(("name", "block"), SETTINGS, ids=[name for name, _ in SETTINGS])
def test_launch_files_of_the_documents_are_read(name, block, tmp_path):
    assert isinstance(yaml.safe_load(block), dict)
    if not ELSEWHERE.match(block):
        path = tmp_path / "page.yaml"
        path.write_text(block, encoding="utf-8")
        build_parser().parse_args(read_launch_file(str(path)))
