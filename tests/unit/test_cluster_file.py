"""`cluster.yaml` is valid for the installed Ray and installs what it copies."""

from __future__ import annotations

import re
import subprocess
import venv
from pathlib import Path
from shutil import copyfile, copytree

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from actors.ray_backend.cluster.resources import PREFIX

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_cluster_file_is_valid_for_the_installed_ray() -> None:
    """The schema and the checks are those of the installed Ray."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    validate_config(prepare_config(cluster))
    for local in cluster["file_mounts"].values():
        assert local.startswith("~") or (ROOT / local).exists(), local
    pinned = (ROOT / "constraints.txt").read_text()
    for image in ("head_image", "worker_image"):
        version = re.search(r"ray:([\d.]+)-", cluster["docker"][image])[1]
        assert f"ray=={version}\n" in pinned, "the image's Ray is another than the pinned one"


def test_each_gpu_type_prefers_spot_over_on_demand() -> None:
    """Each GPU type has the same machine twice; the head is on demand and takes no worker."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    types = cluster["available_node_types"]
    head = types.pop(cluster["head_node_type"])
    assert "InstanceMarketOptions" not in head["node_config"] and head["resources"] == {"CPU": 0}
    spot = {name: kind for name, kind in types.items() if name.endswith("-spot")}
    assert len(spot) == 2 and len(types) == 4
    for name, kind in spot.items():
        on_demand = types[name.removesuffix("-spot")]
        assert kind["node_config"].pop("InstanceMarketOptions") == {"MarketType": "spot"}
        assert kind.pop("priority") > on_demand.pop("priority")
        assert kind.pop("labels") == {"ray.io/market-type": "spot"}
        assert on_demand.pop("labels") == {"ray.io/market-type": "on-demand"}
        assert kind == on_demand
        [accelerator] = [key for key in kind["resources"] if key.startswith(PREFIX)]
        assert f"{accelerator.removeprefix(PREFIX)}" in (DOCS / "cluster.md").read_text()


def test_setup_command_installs_the_copied_sources(tmp_path: Path) -> None:
    """The setup command runs in a new virtual environment; the dependencies come from this one."""
    cluster = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    home = tmp_path / "home"
    for remote, local in cluster["file_mounts"].items():
        if remote.startswith("~/elastic-training/"):
            target = home / remote.removeprefix("~/")
            target.parent.mkdir(parents=True, exist_ok=True)
            copy = copytree if (ROOT / local).is_dir() else copyfile
            copy(ROOT / local, target)
    venv.create(tmp_path / "venv", with_pip=True)
    site_packages = str(Path(yaml.__file__).parents[1])
    [installed] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (installed / "dependencies.pth").write_text(f"{site_packages}\n")
    environment = {
        "HOME": str(home),
        "PATH": f"{tmp_path / 'venv' / 'bin'}:/usr/bin:/bin",
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip's spelling of "no isolation"
    }
    [command] = cluster["setup_commands"]
    with_setuptools = {**environment, "PYTHONPATH": site_packages}  # for the build
    subprocess.run(["bash", "-c", command], env=with_setuptools, check=True, timeout=300)
    script = tmp_path / "venv" / "bin" / "elastic"
    help_text = subprocess.run(
        [str(script), "--help"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert "train" in help_text.stdout
    imported_from = subprocess.run(
        [str(script.with_name("python")), "-c", "import elastic; print(elastic.__file__)"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert imported_from.stdout.strip() == str(
        home / "elastic-training" / "elastic" / "__init__.py"
    )
