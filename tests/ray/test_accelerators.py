"""Resources that workers request, on clusters that pretend to have various GPUs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import ray

from actors.ray_backend.cluster.resources import NoSuchAccelerator, choose_resources

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[None]:
    num_cpus, *types = request.param
    resources = {f"accelerator_type:{name}": 1 for name in types}
    num_gpus = len(types)
    ray.init(
        "local", num_cpus=num_cpus, num_gpus=num_gpus, resources=resources, log_to_driver=False
    )
    yield
    ray.shutdown()


@pytest.mark.parametrize("cluster", [(2, "L4")], indirect=True)
def test_auto_uses_the_only_gpu_type_present(cluster: None) -> None:
    of_l4 = {"num_cpus": 0, "num_gpus": 1, "accelerator_type": "L4"}
    assert choose_resources("auto") == choose_resources("L4") == of_l4
    assert choose_resources("H100") == {**of_l4, "accelerator_type": "H100"}, (
        "the autoscaler may start one"
    )
    assert choose_resources("gpu") == {"num_cpus": 0, "num_gpus": 1}
    assert choose_resources("cpu") == {"num_cpus": 1}
    with pytest.raises(NoSuchAccelerator, match="a type such as L4"):
        choose_resources("L5")


@pytest.mark.soak
@pytest.mark.parametrize("cluster", [(2, "L4", "A10G")], indirect=True)
def test_auto_is_refused_with_two_gpu_types(cluster: None) -> None:
    with pytest.raises(NoSuchAccelerator, match="A10G and L4, and a run uses one type"):
        choose_resources("auto")
    assert choose_resources("A10G")["accelerator_type"] == "A10G"


@pytest.mark.parametrize(
    "cluster", [pytest.param((2,), marks=pytest.mark.soak), (0,)], indirect=True
)
def test_auto_on_a_cluster_without_gpus_uses_cpus_or_is_refused(cluster: None) -> None:
    if ray.cluster_resources().get("CPU"):
        assert choose_resources("auto") == {"num_cpus": 1}
        return
    with pytest.raises(NoSuchAccelerator, match="choose what its autoscaler starts"):
        choose_resources("auto")
