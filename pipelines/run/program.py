"""The training program that each worker process builds from a run's settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, assert_never
from weakref import WeakMethod

import torch
from torch import Tensor

from actors.runtime.program import DeviceFigures, Groups, Interrupt, Waits, WrittenPart
from actors.storage.storage import Storage
from elastic.geometry.regions import Region
from elastic.geometry.tensor_specs import TensorSpec
from pipelines.data.cache.shared_indexes import INDEX_FOLDER, INDEXES
from pipelines.data.packing import PackedChats
from pipelines.data.prepared import open_prepared
from pipelines.data.windows import Samples
from pipelines.errors import UserError
from pipelines.hugging_face.building import config_of_model
from pipelines.hugging_face.causal_lm import CausalLMWorkload
from pipelines.hugging_face.weights.pretrained import open_pretrained
from pipelines.loop.loop import Loop
from pipelines.loop.replica import LoopReplica
from pipelines.loop.script import Script, recipe_of
from pipelines.run.recipes import load, load_shipped
from pipelines.settings import (
    CustomModelSettings,
    HuggingFaceSettings,
    MlpSettings,
    TrainSettings,
    TransformerSettings,
)
from pipelines.settings.recipe import Recipe
from pipelines.settings.script_file import ScriptFile
from pipelines.training.checkpoint.part_file import write_part
from pipelines.training.checkpoint.reader import read_regions
from pipelines.training.custom.custom_workload import CustomWorkload
from pipelines.training.custom.merge_trial import Merging
from pipelines.training.custom.module_calls import BodyTrial
from pipelines.training.custom.modules.custom_module import MAX_WHOLE_BYTES
from pipelines.training.models.language_model import LanguageModelWorkload
from pipelines.training.models.mlp import MlpWorkload
from pipelines.training.models.next_token import open_samples
from pipelines.training.passes.pass_size import PassObservations
from pipelines.training.replica.replica import ShardedReplica
from pipelines.training.replica.step_flops import ForwardFlops, count_step_flops, peak_flops
from pipelines.training.replica.warm_up import Build, warm_up
from pipelines.training.workload.state import initial_value, state_specs
from pipelines.training.workload.workload import Workload, nothing


class TrainingProgram:
    """Trains the workload of the settings; see `actors.runtime.program.Program`.

    `settings` are those of `TrainSettings`, as JSON. `data_folder` is the folder or URL of the
    prepared data, None for synthetic data. `device` is by default the GPU if there is one.
    `recipe` is a custom recipe, a custom training loop, the file of either, or its name
    (`path/to/file.py:function`); the recipe's own settings are ignored. `positions` is the folder
    or URL in which a stream of samples notes its positions, and which has the indexes of data.
    Raises `UserError` for unusable data or an unusable pretrained model.
    """

    def __init__(
        self,
        settings: dict[str, Any],
        data_folder: str | None = None,
        device: str | None = None,
        recipe: Recipe | Script | ScriptFile | str | None = None,
        positions: str | None = None,
    ) -> None:
        self.settings = TrainSettings.model_validate(settings)
        INDEXES.use(f"{positions}/{INDEX_FOLDER}" if positions else None)
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.steps = self.settings.steps
        self.eval_every = self.settings.eval_every
        self.pretrained = open_pretrained(self.settings)
        if isinstance(recipe, ScriptFile):
            recipe = load_shipped(recipe, self.settings)
        if isinstance(recipe, str):
            loaded = load(recipe)
            recipe = loaded if isinstance(loaded, Recipe | Script) else None
        self.loop = None
        self.pass_observations = PassObservations()
        if isinstance(recipe, Script):
            self.loop = Loop(recipe.function, self.settings.seed)
            recipe = recipe_of(self.loop.declaration, self.settings)
        # The module of a custom loop exists with its values: drawing a part of it gains nothing.
        most_bytes = inf if self.loop else MAX_WHOLE_BYTES
        self.workload = make_workload(self.settings, data_folder, recipe, most_bytes, positions)
        if self.loop is not None and isinstance(self.workload, CustomWorkload):
            self.workload.optimizer_factory = self.loop.optimizer_factory
            if self.loop.declaration.in_one_pass:
                self.workload.merging = Merging(None, divides_draws=True)
            self.workload.body = BodyTrial()
            take_data = WeakMethod(self._take_data)  # else the loop's thread would outlive it
            self.loop.on_restart = lambda: (take_data() or nothing)()
        runs_whole = isinstance(self.workload, CustomWorkload) and not self.workload.values.is_large
        self._counter = ForwardFlops() if runs_whole else None

    @property
    def waits(self) -> Waits:
        return self.pass_observations.waits.total

    @property
    def figures(self) -> DeviceFigures:
        """The speed of this process' device; the operations of a custom module are known after
        `warm_up`."""
        is_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if is_gpu else ""
        if self._counter is not None:
            step_flops = self._counter.of_step(self.settings)
        elif isinstance(self.workload, CustomWorkload):
            step_flops = None
        else:
            step_flops = count_step_flops(self.workload, self.settings)
        return DeviceFigures(name, step_flops, peak_flops(name, self.settings))

    def _take_data(self) -> None:
        """Use the datasets and functions of the script's present execution."""
        if self.loop is not None and isinstance(self.workload, CustomWorkload):
            present = recipe_of(self.loop.declaration, self.workload.settings)
            # The module is that of the first execution, which keeps its values of step 0.
            self.workload.take_data(replace(present, model=self.workload.recipe.model))

    def specs(self) -> tuple[TensorSpec, ...]:
        """Every logical tensor of the state; see `pipelines.training.workload.state`."""
        return state_specs(self.workload, self.settings)

    def warm_up(self) -> None:
        """Check that this machine can read the data, then build and step once and discard the
        result; see `pipelines.training.replica.warm_up`. Raises `UnsuitableMachine`."""
        self.workload.reach()
        if isinstance(self.workload, CustomWorkload):
            INDEXES.refuse_other()
            self.workload.start_readers()
        warm_up(self.workload, self.settings, self.device, self._replica, self._counter)
        if self.loop is not None:
            self.loop.restart_script()
        elif self.settings.may_merge:
            _ = self.workload.why_unmergeable  # it may run a trial, whose result is kept

    def build(self, groups: Groups) -> ShardedReplica:
        """This rank's part under an assignment: shapes, no values yet."""
        return self._replica(self.workload, self.settings, groups, self.pass_observations)

    @property
    def _replica(self) -> Build:
        return partial(LoopReplica, loop=self.loop) if self.loop else ShardedReplica

    def initial(self, spec: TensorSpec, region: Region, interrupt: Interrupt = nothing) -> Tensor:
        """A region of a tensor at step 0, on the device."""
        if self.pretrained and self.pretrained.has(spec):
            return self.pretrained.read(spec, region).to(self.device)
        value = initial_value(self.workload, self.settings, spec, region, interrupt)
        return value.to(self.device)

    def write_part(
        self, checkpoint: Storage, name: str, parts: Mapping[str, tuple[Region, Tensor]]
    ) -> WrittenPart:
        """Write one worker's regions of a checkpoint."""
        return write_part(checkpoint, name, parts)

    def read_regions(self, checkpoint: Storage, wanted: Mapping[str, Region]) -> dict[str, Tensor]:
        """Read regions from a checkpoint; see `pipelines.training.checkpoint.reader`."""
        return read_regions(checkpoint, wanted, self.specs())


def make_workload(
    settings: TrainSettings,
    data_folder: str | None = None,
    recipe: Recipe | None = None,
    most_bytes: float = MAX_WHOLE_BYTES,
    positions: str | None = None,
) -> Workload:
    """The workload of the settings. Held-out data are opened only if evaluation is on. A custom
    module of more than `most_bytes` is never built whole."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    match settings.model:
        case MlpSettings():
            return MlpWorkload(settings.model, settings.seed, dtype)
        case TransformerSettings():
            splits = _splits(settings, settings.model.vocab_size, data_folder)
            return LanguageModelWorkload(settings.model, *splits, dtype)
        case HuggingFaceSettings():
            vocab_size = config_of_model(settings.model.config).get_text_config().vocab_size
            splits = _splits(settings, vocab_size, data_folder)
            return CausalLMWorkload(settings.model, *splits, dtype, settings.lora)
        case CustomModelSettings():
            if recipe is None:
                raise UserError("model.kind=custom: a custom model needs a `Recipe`; give one")
            return CustomWorkload(replace(recipe, settings=settings), most_bytes, positions)
        case _:
            assert_never(settings.model)


def _splits(
    settings: TrainSettings, vocab_size: int, data_folder: str | None
) -> tuple[Samples, Samples | None]:
    """The training samples, and the held-out samples if evaluation is on."""
    chats = data_folder if settings.data.format == "chat" else None
    prepared = open_prepared(data_folder, settings.cache) if data_folder and not chats else None

    def opened(split: str) -> Samples:
        if chats is not None:
            return PackedChats(chats, split)
        return open_samples(settings.data, vocab_size, settings.seed, split, prepared)

    return opened("train"), opened("held_out") if settings.eval_every else None
