"""Checks of installed software: required versions, and torch against the GPU driver."""

from __future__ import annotations

import platform
import re
import tomllib
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from actors.distributed.torch_names import PROVEN, missing_names
from pipelines.doctor.finding import Finding

PROJECT = "elastic-training"
ALWAYS_SHOWN = ("torch", "ray", "mlflow")
DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> Iterator[Finding]:
    """Python, the most important packages, and any other package with a problem."""
    python, requirements = project_requirements()
    yield python_version(platform.python_version(), python)
    for requirement in requirements:
        finding = package_version(requirement, _installed(requirement.name))
        if finding.verdict != "ok" or requirement.name in ALWAYS_SHOWN:
            yield finding
    yield torch_names(torch.__version__, missing_names())


def torch_names(version: str, missing: Sequence[str]) -> Finding:
    """Whether torch has the private names that the project uses, and is a proven version."""
    proven = ", ".join(PROVEN)
    fix = f"pip install torch=={PROVEN[-1]}"
    if missing:
        return Finding("torch's private names", f"missing: {', '.join(missing)}", "failed", fix)
    if version.partition("+")[0] in PROVEN:
        return Finding("torch's private names", f"all found; {version} is proven")
    value = f"all found, but {version} is not proven (proven: {proven})"
    return Finding("torch's private names", value, "warning", fix)


def project_requirements() -> tuple[str, list[Requirement]]:
    """The versions of Python and of packages that the project requires, from `pyproject.toml` or
    its installed metadata."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text())["project"]
        return project["requires-python"], [Requirement(text) for text in project["dependencies"]]
    python = metadata.metadata(PROJECT)["Requires-Python"] or ""
    requirements = [Requirement(text) for text in metadata.requires(PROJECT) or ()]
    return python, [requirement for requirement in requirements if requirement.marker is None]


def python_version(version: str, required: str) -> Finding:
    if SpecifierSet(required).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", version, "failed", f"install Python {required}")


def package_version(requirement: Requirement, version: str | None) -> Finding:
    """`version` is None if the package is not installed."""
    fix = f"pip install '{requirement}'"
    if version is None:
        return Finding(requirement.name, "not installed", "failed", fix)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, version)
    value = f"{version}, required is {requirement.specifier}"
    return Finding(requirement.name, value, "failed", fix)


def gpus() -> Iterator[Finding]:
    """The driver, the GPUs that torch sees through it, and NCCL."""
    driver = driver_version(DRIVER.read_text()) if DRIVER.is_file() else None
    names = []
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield gpus_seen(driver, torch.version.cuda, names)
    if names:
        nccl = dist.is_nccl_available()
        version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else "not in this torch"
        fix = "" if nccl else "install a torch with NCCL, which GPU process groups need"
        yield Finding("NCCL", version, "ok" if nccl else "failed", fix)


def driver_version(text: str) -> str:
    """The driver's version in the text of its kernel module."""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", text)
    return match[1] if match else "unknown"


def gpus_seen(driver: str | None, built_for: str | None, names: Sequence[str]) -> Finding:
    """`driver` is the driver's version, `built_for` the CUDA version of torch, or None."""
    if names:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        value = f"{kinds}; driver {driver or 'unknown'}, torch for CUDA {built_for}"
        return Finding("GPUs", value)
    if driver is None:
        return Finding("GPUs", "none: workers train on CPUs")
    if built_for is None:
        return Finding(
            "GPUs",
            f"driver {driver}, but torch {torch.__version__} is built without CUDA",
            "failed",
            "install a CUDA build of torch: see pytorch.org/get-started",
        )
    return Finding(
        "GPUs",
        f"driver {driver}, but torch for CUDA {built_for} sees no GPU",
        "failed",
        "check CUDA_VISIBLE_DEVICES and `nvidia-smi`; if the driver is older than this CUDA, "
        "update the driver or install an older torch",
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
