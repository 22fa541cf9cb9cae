"""Modules in the run's dtype keep complex buffers, ties and buffers of several modules."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pipelines.settings import TrainSettings
from pipelines.training.sharding.sharded import bring_constants
from pipelines.training.workload.state import in_stored_dtype


class Turned(nn.Module):
    """Two linear layers with one weight, and rotations and a scale that both have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.layers[1].weight = self.layers[0].weight
        angles = torch.arange(2.0)
        rotations, scale = torch.polar(torch.ones(2), angles), torch.full((4,), 0.5)
        for layer in self.layers:
            layer.register_buffer("rotations", rotations, persistent=False)
            layer.register_buffer("scale", scale, persistent=False)
            layer.register_buffer("nothing", None)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            pairs = torch.view_as_complex(layer(x).unflatten(-1, (-1, 2)))
            x = torch.view_as_real(pairs * layer.rotations).flatten(-2) * layer.scale
        return x


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rotations_stay_complex_and_what_is_shared_stays_one(dtype: str) -> None:
    module = in_stored_dtype(Turned(), TrainSettings(dtype=dtype))
    first, second = module.layers
    assert first.rotations.dtype == torch.complex64
    assert first.rotations is second.rotations
    assert first.scale is second.scale and first.weight is second.weight
    assert {first.scale.dtype, first.weight.dtype} == {getattr(torch, dtype)}
    assert "scale" not in module.state_dict() and first.nothing is None
    plain = Turned()
    plain.load_state_dict(module.state_dict())
    x = torch.randn(3, 4)
    expected = plain(x).to(first.weight)
    torch.testing.assert_close(module(x.to(first.weight)), expected, rtol=1e-4, atol=1e-5)


def test_recurrent_layer_computes_in_the_run_s_dtype() -> None:
    layer = in_stored_dtype(nn.LSTM(3, 2), TrainSettings(dtype="float64"))
    (output, _), x = layer(torch.ones(4, 1, 3).double()), torch.ones(4, 1, 3)
    torch.testing.assert_close(output.float(), layer.float()(x)[0])


def test_constants_of_several_modules_are_brought_to_the_device_once() -> None:
    module = Turned()
    bring_constants(module, torch.device("meta"))
    first, second = module.layers
    assert first.scale.is_meta and first.scale is second.scale
    assert first.rotations.is_meta and first.rotations is second.rotations
    assert not first.weight.is_meta
