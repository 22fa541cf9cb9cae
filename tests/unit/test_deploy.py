"""`deploy/`: the image and the RayJob agree with each other and with the pinned versions."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from pipelines.cli import app

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
KNOWN = {
    "RayJobSpec": "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint "
    "entrypointNumCpus entrypointNumGpus entrypointResources jobId managedBy metadata "
    "rayClusterSpec runtimeEnvYAML shutdownAfterJobFinishes submissionMode submitterConfig "
    "submitterPodTemplate suspend ttlSecondsAfterFinished",
    "RayClusterSpec": "authOptions autoscalerOptions enableInTreeAutoscaling "
    "gcsFaultToleranceOptions headGroupSpec headServiceAnnotations managedBy rayVersion suspend "
    "workerGroupSpecs",
    "AutoscalerOptions": "env envFrom idleTimeoutSeconds image imagePullPolicy resources "
    "securityContext upscalingMode version volumeMounts",
    "HeadGroupSpec": "enableIngress headService labels rayStartParams resources serviceType "
    "template",
    "WorkerGroupSpec": "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts "
    "rayStartParams replicas resources scaleStrategy suspend template",
}
"""The fields of KubeRay's API reference (v1.5): KubeRay silently drops a misspelt field."""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    manifest: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    return manifest


@pytest.fixture(scope="module")
def cluster(job: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = job["spec"]["rayClusterSpec"]
    return spec


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def assert_known(kind: str, spec: dict[str, Any]) -> None:
    assert set(spec) <= set(KNOWN[kind].split()), kind


def test_manifest_has_only_fields_of_kuberay(job: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert_known("RayJobSpec", job["spec"])
    assert_known("RayClusterSpec", cluster)
    assert_known("AutoscalerOptions", cluster["autoscalerOptions"])
    assert_known("HeadGroupSpec", cluster["headGroupSpec"])
    for group in cluster["workerGroupSpecs"]:
        assert_known("WorkerGroupSpec", group)
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", group["groupName"])
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for pod in pods(cluster):
        assert pod["containers"][0]["image"] and pod["restartPolicy"] == "Never"


def test_manifest_sets_the_promised_security_memory_and_autoscaling(
    job: dict[str, Any], cluster: dict[str, Any]
) -> None:
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    for pod in pods(cluster):
        [shm_volume] = [
            v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"
        ]
        [container] = pod["containers"]
        assert {"name": shm_volume["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_pre_stop_hook_ends_before_the_grace_period(cluster: dict[str, Any]) -> None:
    """Otherwise SIGTERM would arrive while the hook waits, or SIGKILL directly after it."""
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[:3] == ["python", "-m", "actors.notices.drain"]
        assert 0 < float(hook[3]) < pod["terminationGracePeriodSeconds"]
    assert (ROOT / "actors" / "notices" / "drain.py").exists()


def test_entrypoint_is_a_valid_command_line(job: dict[str, Any]) -> None:
    program, name, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "elastic"
    typer.main.get_command(app).commands[name].make_context(name, list(arguments))
    max_workers = int(arguments[arguments.index("--workers") + 1].partition(":")[2])
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert max_workers <= sum(group["maxReplicas"] for group in groups)


def test_versions_agree_with_the_pinned_ones(cluster: dict[str, Any]) -> None:
    pinned = (ROOT / "constraints.txt").read_text()
    [base] = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-py(\d)(\d+)-\$\{ACCELERATOR\}$", DOCKERFILE, re.M
    )
    assert f"ray=={base[0]}\n" in pinned and cluster["rayVersion"] == base[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f">={base[1]}.{base[2]}" == project["requires-python"]
    images = {pod["containers"][0]["image"] for pod in pods(cluster)}
    assert images == {f"REGISTRY/{project['name']}:{project['version']}"}
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    assert f"docker build -f deploy/Dockerfile -t {images.pop()} ." in page


def test_image_contains_all_needed_files_and_does_not_run_as_root() -> None:
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.M) == ["ray"]
    copied_files = {
        name
        for line in re.findall(r"^COPY --chown=ray:users (.+)$", DOCKERFILE, re.M)
        for name in line.split()[:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"]}
    assert copied_files == packages | needed | set(project["project"]["license-files"])
    assert all((ROOT / name).exists() for name in copied_files)
    ignore_lines = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore_lines if line.startswith("!")} == copied_files
    assert "*" in ignore_lines


def test_image_installs_the_dependencies_of_the_project(tmp_path: Path) -> None:
    """The test runs the command of the Dockerfile that reads them from pyproject.toml."""
    [command] = re.findall(r"^RUN (sed .+?) > /tmp/dependencies.txt", DOCKERFILE, re.M)
    finished = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert finished.stdout.splitlines() == project["dependencies"]
