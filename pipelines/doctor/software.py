"""What is installed: versions asked for and found, and torch beside the GPUs' driver."""

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

from pipelines.doctor.finding import Finding

PROJECT = "elastic-training"
ALWAYS_TOLD = ("torch", "ray", "mlflow")
DRIVER = Path("/proc/driver/nvidia/version")


def versions() -> Iterator[Finding]:
    """Python, the packages that matter most, and the others only where they are amiss."""
    asked_python, request = asked_for()
    yield python_version(platform.python_version(), asked_python)
    for requirement in request:
        found = package_version(requirement, _installed(requirement.name))
        if found.verdict != "ok" or requirement.name in ALWAYS_TOLD:
            yield found


def asked_for() -> tuple[str, list[Requirement]]:
    """What the project asks of Python and of packages, as installed or by its `pyproject.toml`."""
    file = Path(__file__).parents[2] / "pyproject.toml"
    if file.is_file():
        project = tomllib.loads(file.read_text())["project"]
        return project["requires-python"], [Requirement(one) for one in project["dependencies"]]
    told = metadata.metadata(PROJECT)
    every = [Requirement(one) for one in metadata.requires(PROJECT) or ()]
    return told["Requires-Python"] or "", [one for one in every if one.marker is None]


def python_version(version: str, request: str) -> Finding:
    if SpecifierSet(request).contains(version, prereleases=True):
        return Finding("python", version)
    return Finding("python", version, "failed", f"install Python {request}")


def package_version(requirement: Requirement, version: str | None) -> Finding:
    """`version` is None for what is not installed."""
    mend = f"pip install '{requirement}'"
    if version is None:
        return Finding(requirement.name, "not installed", "failed", mend)
    if requirement.specifier.contains(version, prereleases=True):
        return Finding(requirement.name, version)
    return Finding(requirement.name, f"{version}, asked is {requirement.specifier}", "failed", mend)


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
        mend = "" if nccl else "install a torch with NCCL: groups of GPUs need it"
        yield Finding("NCCL", version, "ok" if nccl else "failed", mend)


def driver_version(told: str) -> str:
    """Out of what the kernel's module says of itself."""
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\S+)", told)
    return found[1] if found else "unknown"


def gpus_seen(driver: str | None, built_for: str | None, names: Sequence[str]) -> Finding:
    """`driver` is its version, `built_for` the CUDA of torch; both None where there is none."""
    if names:
        kinds = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return Finding("GPUs", f"{kinds}; driver {driver or 'unknown'}, torch for CUDA {built_for}")
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
        f"driver {driver}, but torch for CUDA {built_for} sees none",
        "failed",
        "look at CUDA_VISIBLE_DEVICES and `nvidia-smi`; a driver that is older than this CUDA "
        "needs a newer one, or an older torch",
    )


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
