"""The package as it is installed: what a wheel holds, what it needs, what an import brings along."""

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
import yaml

import megatron_rc
from megatron_rc.records.formats.jsonl import to_json_lines
from tests.replay.batches import scored_batch
from tests.support.minimal_debian import PACKAGES, RELEASES
from tests.support.paths import LINKED, ROOT, SOURCES, copy_checkout

HEAVY = ("megatron.core", "transformers", "numpy.testing", "yaml", "tokenizers", "matplotlib", "tensorboard", "tqdm")


@pytest.mark.processes
def test_import_needs_torch_alone():
    """And the launcher's own flags are parsed without Megatron."""
    code = (
        "import sys, torch; before = set(sys.modules)\n"
        "import megatron_rc\n"
        "for name in megatron_rc.__all__: getattr(megatron_rc, name)\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        f"assert not [name for name in {HEAVY!r} if name in sys.modules and name not in before]\n"
        "print(sorted(new - sys.stdlib_module_names))\n"
        "from megatron_rc.launch.flags.parser import build_parser\n"
        "assert '--sequence-parallel, --no-sequence-parallel' in build_parser(with_megatron=False).format_help()\n"
        "assert not [name for name in sys.modules if name.startswith('megatron.')]\n"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert output.stdout.strip() == "['megatron_rc']"


def alone():
    """The environment without PYTHONPATH, on which pip and a new environment would find this checkout."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def run(*command, **options):
    return subprocess.run(command, check=True, capture_output=True, text=True, env=alone(), **options)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The sources in a folder where links are lost."""
    folder = tmp_path_factory.mktemp("copy")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", *(*LINKED, "docs") * (name == "megatron_rc"))
            shutil.copytree(ROOT / name, folder / name, ignore=ignored)
        else:
            shutil.copy(ROOT / name, folder / name)
    pages = shutil.ignore_patterns("*.py", "*.png", "*.json", "__pycache__")
    shutil.copytree(ROOT / "docs", folder / "megatron_rc" / "docs", ignore=pages)
    return folder


def built(sources, folder):
    """The wheel of a folder or an archive of sources."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet", "--no-deps")
    run(*pip, "--no-build-isolation", "--wheel-dir", str(folder), str(sources))
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def wheel(copy):
    return built(copy, copy / "dist")


@pytest.fixture
def distribution(monkeypatch):
    """What the setup.py of a folder says of itself."""
    importlib.import_module("setuptools")  # brings distutils, which newer Pythons lack
    core = importlib.import_module("distutils.core")

    def read(folder):
        monkeypatch.chdir(folder)
        return core.run_setup("setup.py", stop_after="init")

    return read


def test_links_change_no_package(copy, distribution):
    assert distribution(ROOT).get_version() == megatron_rc.__version__
    with_links = distribution(ROOT).packages
    without = distribution(copy).packages
    assert sorted(with_links) == sorted(without)
    assert len(with_links) > 15
    for name in (*LINKED, "docs"):
        assert (ROOT / "megatron_rc" / name).readlink() == Path("..") / name
    files = [path for top in ("megatron_rc", *LINKED) for path in (ROOT / top).rglob("*.py")]
    assert not [path for path in files if not (path.parent / "__init__.py").exists()]


@pytest.mark.processes
def test_a_wheel_holds_every_module_and_every_launch_file(copy, wheel):
    with zipfile.ZipFile(wheel) as archive:
        names_in_wheel = {
            name for name in archive.namelist() if name.endswith((".py", ".yaml", ".sh", ".html", ".md", "py.typed"))
        }
    expected_names = set()
    for top in ("megatron_rc", *LINKED):
        for path in (copy / top).rglob("*"):
            if path.suffix in (".py", ".yaml", ".sh", ".html", ".md") or path.name == "py.typed":
                inside = path.relative_to(copy).as_posix()
                expected_names.add(inside if top == "megatron_rc" else f"megatron_rc/{inside}")
    assert names_in_wheel == expected_names


@pytest.fixture(scope="module")
def base(wheel, tmp_path_factory):
    return with_torch(wheel, tmp_path_factory.mktemp("base"))


def with_torch(wheel, folder):
    """Python of a new environment with the wheel, and torch and its requirements alone, lent by this environment."""
    run(sys.executable, "-m", "venv", "--without-pip", str(folder / "venv"))
    python = folder / "venv" / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python))
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel))
    site = Path(run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    for name in needed_by("torch"):
        for file in metadata.files(name):
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (site / top).exists():
                (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    return python


def needed_by(name):
    """The distribution, and those that it needs on this machine."""
    needed = set()
    left = [name]
    while left:
        requirement = left.pop()
        if requirement not in needed and any(True for _ in metadata.distributions(name=requirement)):
            needed.add(requirement)
            lines = [line for line in metadata.requires(requirement) or [] if "extra" not in line]
            left += [re.split(r"[^\w.-]", line)[0] for line in lines]
    return needed


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "code", "begin"),
    [
        (["launch", "--config=count_up", "--dry-run"], 2, "error: --config needs yaml, which is not installed: pip "),
        (["launch", "--num-layers=2"], 2, "error: training needs megatron.core, which is not installed: pip "),
        (["doctor", "record.jsonl"], 1, "record.jsonl: "),
        (["replay", "record.jsonl", "--preset", "decoupled_token_is"], 0, ""),
    ],
)
def test_a_base_install_works_or_names_the_extra(base, wheel, tmp_path, words, code, begin):
    """By the console script; without numpy, of whose absence torch would speak first."""
    (tmp_path / "record.jsonl").write_text("\n".join(to_json_lines(scored_batch())))
    command = [str(base.with_name("megatron-rc")), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone(), check=False)
    printed = done.stdout + done.stderr
    assert (done.returncode, printed[: len(begin)]) == (code, begin)
    assert "Traceback" not in printed
    assert "NumPy" not in printed
    if "pip install" in printed:
        assert printed.endswith(f"pip install 'megatron-rc[launch] @ {wheel.as_uri()}'\n")


@pytest.mark.processes
def test_the_wheel_configures_a_run(base, tmp_path):
    """The launcher's libraries are lent by this environment; the package and its launch files come from the wheel."""
    code = (
        "import megatron_rc, megatron_rc.parallel, megatron_rc.launch.flags.configure as c\n"
        "c.configure(['--config', 'count_up', '--runs-dir', 'runs'], 4)\n"
        "print(megatron_rc.__file__, c.__file__)"
    )
    lent = alone() | {"PYTHONPATH": sysconfig.get_path("purelib")}
    done = subprocess.run([str(base), "-c", code], check=True, capture_output=True, text=True, env=lent, cwd=tmp_path)
    site = base.parent.parent / "lib"
    assert all(Path(path).is_relative_to(site) for path in done.stdout.split())


@pytest.mark.processes
def test_the_console_script_names_its_commands_and_the_pages(base):
    script = str(base.with_name("megatron-rc"))
    assert all(name in run(script, "--help").stdout for name in ("launch", "dry-run", "doctor", "replay", "export"))
    assert Path(run(script, "docs").stdout.strip(), "metrics.md").is_file()
    done = subprocess.run([script, "train"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.split()[:2]) == (2, ["error:", "train"])


@pytest.fixture(scope="module")
def source_archive(tmp_path_factory):
    """Built in a copy, since setuptools writes beside what it reads."""
    folder = tmp_path_factory.mktemp("sources") / "megatron_rc"
    copy_checkout(folder)
    run(sys.executable, "setup.py", "--quiet", "sdist", "--formats=gztar", cwd=folder)
    (archive,) = (folder / "dist").glob("*.tar.gz")
    return archive


@pytest.mark.processes
def test_a_source_archive_holds_its_tests_and_their_links(source_archive):
    with tarfile.open(source_archive) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers()}
    for name in ("tests/test_packaging.py", "docs/index.md", "Makefile", "constraints.txt", "launch/one_node.sh"):
        assert name in members
    assert {name: members[f"megatron_rc/{name}"].linkname for name in (*LINKED, "docs")} == {
        name: f"../{name}" for name in (*LINKED, "docs")
    }
    files = [path.relative_to(ROOT) for path in (ROOT / "tests").rglob("*.*")]
    # Other targets of the Makefile leave pytest's own folders there.
    sources = {path.as_posix() for path in files if path.suffix != ".pyc" and ".pytest_cache" not in path.parts}
    assert sources <= members.keys()


def test_torch_is_needed_alone_and_the_page_says_what_each_extra_adds(distribution):
    """Each with its packages, without the versions; extras for work on the project without."""
    assert distribution(ROOT).install_requires == ["torch>=2.6"]
    extras = distribution(ROOT).extras_require
    page = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`[a-z`, -]+`) \| *([^|]*?) *\|", page, flags=re.MULTILINE)
    listed = {name: packages for names, packages in rows for name in re.findall("`([a-z-]+)`", names)}
    assert set(listed) == set(extras)
    for name, packages in listed.items():
        assert not packages or set(packages.split(", ")) == names_of(extras[name]), name
    assert {name for name, packages in listed.items() if not packages} == {"test", "coverage", "docs", "dev"}


def names_of(requirements):
    """Package names of requirements, without versions, extras and conditions."""
    return {re.split(r"[^\w-]", requirement)[0] for requirement in requirements}


def installed_by(target):
    """Words of each pip command of a make target in a new environment."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
    command = ["make", "--dry-run", "--always-make", target]
    shown = subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True).stdout
    commands = [line.partition("||")[0] for line in shown.splitlines() if "-m pip " in line]
    return [shlex.split(command.partition(" install ")[2]) for command in commands]


@pytest.mark.parametrize(
    ("target", "extras"),
    [
        ("test", [".[launch,test]"]),
        ("lint", [".[launch,test]", ".[dev]"]),
        ("test-long", [".[launch,test]", ".[reasoning-gym]"]),
    ],
)
def test_make_installs_wheels_alone(target, extras):
    """In the versions of constraints.txt; reasoning-gym's requirements have no wheels."""
    pytorch, *commands = installed_by(target)
    assert [command[-1] for command in commands] == extras
    assert pytorch[-1] == "torch"
    for command in (pytorch, *commands):
        assert command[command.index("-c") + 1] == "constraints.txt"
        only_wheels = "--only-binary" in command and command[command.index("--only-binary") + 1] == ":all:"
        assert only_wheels == (command[-1] != ".[reasoning-gym]"), command


def test_the_workflow_tries_the_commands_on_the_machines_that_the_readme_names():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["debian"]
    assert job["strategy"]["matrix"]["release"] == list(RELEASES)
    for release, python in RELEASES.items():
        assert f"({release}, {python})" in readme

    commands = [step["run"] for step in job["steps"] if "run" in step]
    (installs,) = re.findall("^apt-get install -y .+$", readme, flags=re.MULTILINE)
    assert installs.split()[3:] == list(PACKAGES)
    assert commands == [f"apt-get update && {installs}", "make run", "make test"]


# What a host calls, in an environment in which only torch, its requirements and the package can be imported.
HOSTS_WORK = """
import importlib.util, types
import torch
import megatron_rc as rc
from megatron_rc import parallel
from megatron_rc.adaptors import megatron_lm, nemo_rl, slime, verl
from megatron_rc.adaptors.check.__main__ import main as check

for name in ("megatron", "transformers", "yaml", "numpy", "safetensors", "matplotlib"):
    assert importlib.util.find_spec(name) is None, name
for name in rc.__all__: getattr(rc, name)
torch.manual_seed(0)
old, mask = -torch.rand(4, 6), torch.ones(4, 6, dtype=torch.bool)
rollout, advantages = old - 0.1 * torch.rand(4, 6), torch.randn(4, 1).expand(4, 6)
hidden, labels, layer = torch.randn(6, 4, 3), torch.randint(9, (4, 6)), torch.nn.Linear(3, 9, bias=False)
parallel.log_prob_processor()(hidden_states=hidden, output_layer=layer, labels=labels)
config = rc.RolloutCorrectionConfig.decoupled_token_is()
result = rc.correct_rollouts(old, rollout, mask, config)
result.check()
assert result.metrics()["rollout_corr/kl"] < 0
theta = old.clone().requires_grad_()
loss = rc.policy_loss(theta, old, advantages, mask, weights=result.weights).per_token
rc.aggregate_loss(loss, mask).backward()
assert theta.grad.abs().sum() > 0
given = {"response_mask": mask.long(), "old_log_probs": old, "rollout_log_probs": rollout}
batch = types.SimpleNamespace(batch=dict(given), non_tensor_batch={})
weighted, _ = verl.VerlCorrection(config).add_to_batch(batch)
torch.testing.assert_close(weighted.batch["rollout_is_weights"], result.weights)
call = {"pg_loss": loss.detach().flatten(), "loss_masks": list(mask), "total_lengths": [7] * 4}
call |= {"train_log_probs": list(old), "rollout_log_probs": list(rollout), "response_lengths": [6] * 4}
slime.SlimeCorrection(config, parallel.ParallelGroups())(types.SimpleNamespace(use_tis=True), **call)
nemo_rl.CorrectedLoss(types.SimpleNamespace(loss_type="token_level"), config)
megatron_lm.MegatronCorrection(lambda: None, parallel.ParallelGroups())
assert check(["verl"]) == 2
print("done")
"""


@pytest.mark.long
@pytest.mark.parametrize("kind", ["wheel", "source archive"])
def test_a_host_needs_torch_alone(base, source_archive, tmp_path, kind):
    python = base if kind == "wheel" else with_torch(built(source_archive, tmp_path), tmp_path / "environment")
    command = [str(python), "-c", HOSTS_WORK]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=alone(), check=False)
    assert done.stdout.strip() == "done", done.stderr
