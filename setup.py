"""Packaging. Tool settings are in pyproject.toml, the versions seen working in constraints.txt."""

import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """Read the version without importing the package, so that a build needs setuptools alone."""
    text = (ROOT / "weight_update" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r"^__version__\s*(?::\s*str\s*)?=\s*[\"']([^\"']+)[\"']", text, re.MULTILINE)
    if found is None:
        raise RuntimeError("weight_update/__init__.py defines no __version__ string")
    return found.group(1)


def long_description() -> str:
    """Return the README, or nothing where a partial checkout lacks it."""
    readme = ROOT / "README.rst"
    return readme.read_text(encoding="utf-8") if readme.is_file() else ""


def union(*groups: list[str]) -> list[str]:
    """Merge requirement lists; sorted, each requirement once."""
    return sorted({requirement for group in groups for requirement in group})


COLLECTORS = ["torchrl>=0.14.1,<0.15", "gymnasium>=1.0"]
RAY = ["ray>=2.40"]
PROMETHEUS = ["prometheus_client>=0.20"]
CLI = union(PROMETHEUS, ["click>=8.1", "packaging>=22.0", "rich>=13.0"])
LZ4 = ["lz4>=4.0"]
ZSTD = ["zstandard>=0.19"]
SLURM = union(COLLECTORS, ["submitit>=1.5"])
TENSORBOARD = ["tensorboard>=2.16"]
NVCOMP = ["nvidia-nvcomp-cu12>=5.2"]
TRANSFORMERS = ["transformers>=5.23,<5.25; python_version >= '3.11'"]  # it uses internals of the cache
VLLM = ["vllm>=0.33,<0.34"]
# test/engines runs with 0.5.23; sessions of weight updates are a recent part of its interface.
SGLANG = ["sglang>=0.5.23,<0.6"]
EXAMPLES = union(COLLECTORS, TRANSFORMERS, ["matplotlib>=3.8", "tqdm>=4.66"])
BENCH = union(EXAMPLES, RAY, ["psutil>=5.9"])
DOCS = ["sphinx>=8.0", "furo>=2024.8.6"]
TEST = union(
    EXAMPLES,
    CLI,
    PROMETHEUS,
    SLURM,
    TENSORBOARD,
    [
        "hypothesis>=6.100",
        "mypy>=1.18",
        "psutil>=5.9",
        "pytest>=8.0",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.8",
        "ruff>=0.15",
    ],
)

# Loaded by ctypes. Where there is no C compiler, the package works without them.
LOOPS = [
    Extension(
        name,
        [source],
        extra_compile_args=["-O3"],
        py_limited_api=True,
        optional=True,
    )
    for name, source in (
        ("weight_update.compression._ans", "weight_update/compression/ans.c"),
        ("weight_update.encodings._copying", "weight_update/encodings/copying.c"),
        ("weight_update.encodings.patch._kernels", "weight_update/encodings/patch/kernels.c"),
        ("weight_update.transports.distributed._transfer", "weight_update/transports/distributed/transfer.c"),
        ("weight_update.wire._unchanged", "weight_update/wire/unchanged.c"),
    )
]

setup(
    name="weight-update",
    version=version(),
    description="Keeps the policies of reinforcement-learning workers current with their trainer",
    long_description=long_description(),
    long_description_content_type="text/x-rst",
    author="the weight_update authors",
    license="MIT",
    license_files=["LICENSE"],
    packages=find_packages(include=["weight_update*", "collectors*"]),
    package_data={"weight_update": ["py.typed"], "collectors": ["py.typed"]},
    ext_modules=LOOPS,
    options={"bdist_wheel": {"py_limited_api": "cp310"}},
    python_requires=">=3.10",
    install_requires=["torch>=2.11", "tensordict>=0.14", "fsspec>=2023.1", "typing_extensions"],
    extras_require={
        "collectors": COLLECTORS,
        "ray": RAY,
        "cli": CLI,
        "nvcomp": NVCOMP,
        "sglang": SGLANG,
        "slurm": SLURM,
        "lz4": LZ4,
        "zstd": ZSTD,
        "prometheus": PROMETHEUS,
        "transformers": TRANSFORMERS,
        "tensorboard": TENSORBOARD,
        "vllm": VLLM,
        "examples": EXAMPLES,
        "bench": BENCH,
        "docs": DOCS,
        "test": TEST,
        # Everything that runs anywhere. nvcomp, vllm and sglang are left out: they need CUDA.
        "all": union(COLLECTORS, RAY, CLI, LZ4, ZSTD, PROMETHEUS, TENSORBOARD, BENCH, DOCS, TEST),
    },
    entry_points={
        "console_scripts": ["weight-update = weight_update.cli:main"],
        "vllm.general_plugins": ["weight_update = weight_update.serving.vllm:register"],
    },
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
)
