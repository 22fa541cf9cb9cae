"""`deploy/`: the image and the RayJob agree with each other, and with what is pinned."""

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
"""The fields of KubeRay's API reference (v1.5), so that no misspelt one is silently dropped."""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    told: dict[str, Any] = yaml.safe_load((DEPLOY / "rayjob.yaml").read_text())
    return told


@pytest.fixture(scope="module")
def cluster(job: dict[str, Any]) -> dict[str, Any]:
    told: dict[str, Any] = job["spec"]["rayClusterSpec"]
    return told


def pods(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def assert_known(kind: str, told: dict[str, Any]) -> None:
    assert set(told) <= set(KNOWN[kind].split()), kind


def test_the_fields_are_those_of_kuberay(job: dict[str, Any], cluster: dict[str, Any]) -> None:
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


def test_what_is_promised_of_it(job: dict[str, Any], cluster: dict[str, Any]) -> None:
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert cluster["authOptions"] == {"mode": "token"}
    assert cluster["enableInTreeAutoscaling"] is True
    assert cluster["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    for pod in pods(cluster):
        [shared] = [v for v in pod["volumes"] if v.get("emptyDir", {}).get("medium") == "Memory"]
        [container] = pod["containers"]
        assert {"name": shared["name"], "mountPath": "/dev/shm"} in container["volumeMounts"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_hook_ends_before_the_grace_period(cluster: dict[str, Any]) -> None:
    """Else SIGTERM would come while it still waits, or SIGKILL at once after."""
    for group in cluster["workerGroupSpecs"]:
        pod = group["template"]["spec"]
        hook = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
        assert hook[:3] == ["python", "-m", "actors.notices.drain"]
        assert 0 < float(hook[3]) < pod["terminationGracePeriodSeconds"]
    assert (ROOT / "actors" / "notices" / "drain.py").exists()


def test_the_command_is_accepted(job: dict[str, Any]) -> None:
    program, name, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "elastic"
    typer.main.get_command(app).commands[name].make_context(name, list(arguments))
    most = int(arguments[arguments.index("--workers") + 1].partition(":")[2])
    groups = job["spec"]["rayClusterSpec"]["workerGroupSpecs"]
    assert most <= sum(group["maxReplicas"] for group in groups)


def test_versions_agree_with_what_is_pinned(cluster: dict[str, Any]) -> None:
    pinned = (ROOT / "constraints.txt").read_text()
    [base] = re.findall(
        r"^FROM rayproject/ray:([\d.]+)-py(\d)(\d+)-\$\{ACCELERATOR\}$", DOCKERFILE, re.M
    )
    assert f"ray=={base[0]}\n" in pinned and cluster["rayVersion"] == base[0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f">={base[1]}.{base[2]}" == project["requires-python"]
    images = {pod["containers"][0]["image"] for pod in pods(cluster)}
    assert images == {f"REGISTRY/{project['name']}:{project['version']}"}
    told = (ROOT / "docs" / "kubernetes.md").read_text()
    assert f"docker build -f deploy/Dockerfile -t {images.pop()} ." in told


def test_the_image_gets_all_it_needs_and_is_not_roots() -> None:
    assert re.findall(r"^USER (\w+)$", DOCKERFILE, re.M) == ["ray"]
    copied = {
        name
        for line in re.findall(r"^COPY --chown=ray:users (.+)$", DOCKERFILE, re.M)
        for name in line.split()[:-1]
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        name.rstrip("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    needed = {"pyproject.toml", "constraints.txt", project["project"]["readme"]}
    assert copied == packages | needed | set(project["project"]["license-files"])
    assert all((ROOT / name).exists() for name in copied)
    let_in = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in let_in if line.startswith("!")} == copied
    assert "*" in let_in


def test_the_image_installs_the_dependencies_of_the_project(tmp_path: Path) -> None:
    """The command that reads them out of pyproject.toml is run as it stands in the Dockerfile."""
    [command] = re.findall(r"^RUN (sed .+?) > /tmp/dependencies.txt", DOCKERFILE, re.M)
    told = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert told.stdout.splitlines() == project["dependencies"]
