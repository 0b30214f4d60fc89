"""Packaging: the folders ``parallel/``, ``launch/`` and ``configs/`` are imported as ``megatron_rc.<folder>``.

Relative links in ``megatron_rc/`` and the map below both make these names. The map works if links are lost, for example
in an archive on a file system without links. Each alone fails for some way of installing. ``find_packages`` follows
links, so linked folders are excluded in ``megatron_rc/`` and listed once, under their import names. A fourth link puts
the pages of ``docs/`` into the wheel, because messages refer to them.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.sdist import sdist

# Packages of --reward math-verify; its parser has several versions.
MATH = ["math-verify[antlr4-13-2]>=0.9"]
MOVED = ("parallel", "launch", "configs")


def packages() -> list[str]:
    """Every import package: ``megatron_rc`` and the folders beside it."""
    linked = [pattern for folder in MOVED for pattern in (folder, f"{folder}.*")]
    names = ["megatron_rc", *(f"megatron_rc.{name}" for name in find_packages("megatron_rc", exclude=linked))]
    for folder in MOVED:
        names += [f"megatron_rc.{folder}", *(f"megatron_rc.{folder}.{name}" for name in find_packages(folder))]
    return names


def version() -> str:
    """Value of ``megatron_rc.__version__``, read without importing torch."""
    text = Path(__file__).with_name("megatron_rc").joinpath("__init__.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, flags=re.MULTILINE)[0]


class SourceArchive(sdist):
    """Source archive with the links that its tests need."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copy the files, then make the links."""
        super().make_release_tree(base_dir, files)
        for folder in (*MOVED, "docs"):
            Path(base_dir, "megatron_rc", folder).symlink_to(Path("..", folder))


setup(
    name="megatron-rc",
    version=version(),
    description="Rollout Correction for PPO with Megatron-Core, exact on sharded log-probs",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        *[f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)],
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    entry_points={
        "console_scripts": ["megatron-rc=megatron_rc.launch.command:main"],
        "vllm.general_plugins": ["megatron_rc=megatron_rc.launch.engines.weight_stream:register"],
    },
    cmdclass={"sdist": SourceArchive},
    python_requires=">=3.10,<3.14",
    packages=packages(),
    package_dir={"megatron_rc": "megatron_rc", **{f"megatron_rc.{folder}": folder for folder in MOVED}},
    package_data={
        "megatron_rc": ["py.typed", "docs/*.md"],
        "megatron_rc.configs": ["**/*.yaml"],
        "megatron_rc.launch": ["*.sh"],
    },
    install_requires=["torch>=2.6"],
    extras_require={
        "megatron": ["megatron-core>=0.16,<0.20", "numpy"],
        "launch": [
            "httpx2",  # comes with transformers 5.19; earlier ones have httpx
            "megatron-core>=0.16,<0.20",
            "matplotlib",
            "numpy",
            "psutil",  # megatron-core 0.19 saves no checkpoint without it
            "pyyaml",
            "safetensors",
            "tensorboard",
            "tqdm",
            "transformers>=5",
        ],
        "gpu": ["transformer-engine[pytorch]"],
        "data": ["datasets>=3"],
        "gguf": ["accelerate", "gguf", "transformers>=5"],
        "bridge": ["mbridge[megatron]>=0.15.1"],
        "vllm": ["vllm"],
        "wandb": ["wandb"],
        "math": MATH,
        # Alone in an extra, because packages that it requires are built from source, with a C compiler.
        "reasoning-gym": ["reasoning-gym>=0.1.25"],
        "test": [
            "datasets>=3",
            *MATH,
            "einops",
            "hypothesis",
            "mbridge>=0.15.1",
            "psutil",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "safetensors",
            "setuptools>=68",
            "triton; platform_system == 'Linux'",
            "wandb",
        ],
        "coverage": ["coverage"],
        "docs": ["furo", "myst-parser", "sphinx", "sphinx-mathjax-offline"],
        "dev": ["mypy", "ruff", "types-PyYAML"],
    },
)
