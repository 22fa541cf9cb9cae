"""The Python API before a start: supported and refused arguments of Ray Train."""

from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path

import pytest
from ray import train, tune
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
from written_runs import WrittenRun

from actors.ray_backend.controller import DriverReport
from actors.storage.checkpoint_files import publish
from elastic.protocol.commands import Stopped
from pipelines.api import ElasticTrainer, UserError
from pipelines.api.configs import RunOptions, Scaling, changes_of
from pipelines.api.result import ended, renamed, result_of
from pipelines.api.tables import Tables
from pipelines.run.plan import TrainRequest, make_plan, store_recipe
from pipelines.run.recipes import byte_lm, load, name_of, tiny
from pipelines.settings import TrainSettings
from pipelines.settings.overrides import override


def test_scaling_config_sets_workers_accelerator_and_resources() -> None:
    assert Scaling.of(None) == Scaling()
    assert Scaling.of(ScalingConfig(num_workers=(2, 8))).workers == "2:8"
    fixed = Scaling.of(
        ScalingConfig(num_workers=4, resources_per_worker={"CPU": 2, "memory": 1e9, "disk": 1})
    )
    assert (fixed.workers, fixed.changes) == ("4:4", ("accelerator=cpu",))
    assert fixed.per_worker == {"num_cpus": 2, "memory": 1e9, "resources": {"disk": 1}}
    assert Scaling.of(ScalingConfig(num_workers=1, use_gpu=True)).changes == ("accelerator=gpu",)
    typed = ScalingConfig(num_workers=1, use_gpu=True, accelerator_type="L4")
    assert Scaling.of(typed).changes == ("accelerator=L4",)


def test_run_config_sets_name_storage_and_retention(tmp_path: Path) -> None:
    checkpoints = CheckpointConfig(num_to_keep=2)
    options = RunOptions.of(
        RunConfig(name="mine", storage_path=tmp_path, checkpoint_config=checkpoints)
    )
    assert (options.name, options.storage) == ("mine", str(tmp_path))
    assert options.changes == ("checkpoint.keep_last=2", "checkpoint.keep_best=0")
    assert RunOptions.of(RunConfig(failure_config=FailureConfig(max_failures=-1))).changes == ()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"scaling_config": ScalingConfig(num_workers=2, placement_strategy="SPREAD")},
            "placement_strategy",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=2, label_selector={"a": "b"})},
            "label_selector",
        ),
        (
            {"scaling_config": ScalingConfig(num_workers=2, elastic_resize_monitor_interval_s=1.0)},
            "next step boundary",
        ),
        ({"scaling_config": ScalingConfig(num_workers=2, accelerator_type="L4")}, "use_gpu=True"),
        (
            {
                "scaling_config": ScalingConfig(
                    num_workers=2, use_gpu=True, resources_per_worker={"GPU": 2}
                )
            },
            "one GPU",
        ),
        ({"scaling_config": {"num_workers": 2}}, "give a ray.train.ScalingConfig"),
        ({"run_config": tune.RunConfig(name="mine")}, "give a ray.train.RunConfig"),
        (
            {"run_config": RunConfig(failure_config=FailureConfig(max_failures=3))},
            "without a limit",
        ),
        ({"run_config": RunConfig(worker_runtime_env={"pip": ["x"]})}, "ray.init"),
        (
            {
                "run_config": RunConfig(
                    checkpoint_config=CheckpointConfig(checkpoint_score_attribute="loss")
                )
            },
            "checkpoint.keep_best",
        ),
    ],
)
def test_unsupported_options_of_ray_train_are_refused(arguments, message) -> None:
    with pytest.raises(UserError, match=message) as error:
        ElasticTrainer("tiny", **arguments)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"layout": "dp=3"},
            "layout dp=3 needs 3 workers, but ScalingConfig\\(num_workers\\) allows 2",
        ),
        ({"set": {"optimizer.lrx": 1}}, "set optimizer.lrx: there is no such setting"),
        ({"inject": ["hit worker 1"]}, "inject 'hit worker 1' is not understood"),
        ({"run_config": RunConfig(name="no/name")}, "RunConfig\\(name\\) 'no/name'"),
    ],
)
def test_refusals_name_arguments_of_python_not_options(tmp_path, arguments, message) -> None:
    defaults = {"run_config": RunConfig(storage_path=tmp_path), "data": "random"}
    trainer = ElasticTrainer(
        "tiny", scaling_config=ScalingConfig(num_workers=2), **{**defaults, **arguments}
    )
    for start_run in (trainer.fit, trainer.start):
        with pytest.raises(UserError, match=message) as error:
            start_run()
        assert "--" not in str(error.value)
    assert not any(tmp_path.iterdir())


def test_messages_rename_options_to_arguments_and_nothing_else() -> None:
    message = "--set seed=1 for run-name a--b: resume it, or choose another --run-name; ray --set-x"
    assert (
        renamed(message)
        == "set seed=1 for run-name a--b: resume it, or choose another RunConfig(name); ray --set-x"
    )


def test_set_accepts_python_values_and_nested_settings() -> None:
    values = {"optimizer.lr": 1e-3, "optimizer": {"beta1": 0.8}, "compile": True, "seed": 7}
    changed = override(tiny(), changes_of(values))
    assert (changed.optimizer.lr, changed.optimizer.beta1) == (0.001, 0.8)
    assert (changed.compile, changed.seed) == (True, 7)
    assert override(changed, changes_of({"init_from": None})).init_from is None


def test_recipe_is_a_function_or_its_result_or_a_name() -> None:
    assert load(tiny) == load(tiny()) == load("tiny")
    assert name_of(byte_lm) == "pipelines.run.recipes:byte_lm"
    assert name_of(byte_lm()) == "transformer"
    with pytest.raises(UserError, match="recipe int: is int, not TrainSettings or a Recipe"):
        ElasticTrainer(3).as_trainable()


def net(width: int = 8) -> TrainSettings:
    return tiny().model_copy(update={"seed": width})


def test_recipe_function_receives_its_arguments(tmp_path: Path) -> None:
    assert (load(net).seed, load(net, {"width": 3}).seed) == (8, 3)
    with pytest.raises(UserError, match=r"test_api:net.*unexpected keyword argument 'widht'"):
        load(net, {"widht": 3})
    with pytest.raises(UserError, match="only a function takes arguments"):
        ElasticTrainer(tiny(), recipe_config={"width": 3}).as_trainable()
    request = TrainRequest(net, "run", str(tmp_path), data="random", arguments={"width": 3})
    store_recipe(make_plan(request, num_gpus=0))
    with pytest.raises(UserError, match=r"arguments: {'width': '3'} -> {'width': '4'}"):
        make_plan(replace(request, arguments={"width": 4}), num_gpus=0)


def test_metrics_table_has_one_row_per_step_that_was_not_rolled_back(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    tables = Tables(run.folder)
    assert tables.metrics().empty
    for loss in (4.0, 3.0, 2.0):
        run.commit(loss)
    assert list(tables.metrics()["loss"]) == [4.0, 3.0, 2.0]
    run.lose("w1")
    run.roll_back(1)
    run.resume("w0")
    run.commit(None)
    table = tables.metrics()
    assert list(table["step"]) == [1, 2] and isnan(table["loss"].iloc[-1])
    events = tables.events()
    assert {"lost", "rolled back"} <= set(events["kind"])
    assert events["text"].str.contains("killed by signal 9").any()
    assert tables.run_status().as_json()["step"] == 2


def test_end_of_a_run_becomes_a_ray_result_or_exception(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path / "run")
    run.start(2)
    run.commit(3.0)
    publish(run.folder.files, 1, 1, ())
    run.commit(2.0)
    result = result_of(run.folder)
    assert isinstance(result, train.Result) and (result.error, result.metrics["step"]) == (None, 2)
    assert result.path == str(run.folder.path) and len(result.metrics_dataframe) == 2
    assert isinstance(result.checkpoint, train.Checkpoint)
    with result.checkpoint.as_directory() as folder:
        assert (Path(folder) / "manifest.json").exists()
    assert result.get_best_checkpoint("loss", "min").path == result.checkpoint.path
    assert ended(run.folder, DriverReport(Stopped("interrupted", 2))).metrics == result.metrics
    with pytest.raises(TrainingFailedError, match=r"(?s)'run' failed at step 2: no.*Traceback"):
        ended(run.folder, DriverReport(Stopped("failed", 2, "no", "Traceback: theirs")))
    with pytest.raises(UserError, match="RunConfig"):
        ended(run.folder, DriverReport(Stopped("user_error", 0, "choose another --run-name")))
    with pytest.warns(UserWarning, match="MLflow is away"):
        ended(run.folder, DriverReport(Stopped("completed", 2), ("MLflow is away",)))
