"""Settings: types, checks and one-line errors."""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields
from pathlib import Path

import pytest
from pydantic import ValidationError

from actors.worker.worker_options import WorkerOptions
from elastic.protocol.policy import Policy
from pipelines.errors import UserError
from pipelines.run.drive import warn_unsaved
from pipelines.run.options import policy_of
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.recipes import byte_lm, mlp, tiny_moe
from pipelines.settings import (
    AuditSettings,
    CheckpointSettings,
    FailureSettings,
    GrowthSettings,
    LossMonitorSettings,
    QuarantineSettings,
    SnapshotSettings,
    StragglerSettings,
    TrainSettings,
)
from pipelines.settings.overrides import differing_training_settings, override, settings_from
from pipelines.settings.setting import entries_of
from pipelines.settings.settings import RESUMABLE_SETTINGS

POLICY_GROUPS = (
    AuditSettings,
    CheckpointSettings,
    FailureSettings,
    GrowthSettings,
    LossMonitorSettings,
    QuarantineSettings,
    SnapshotSettings,
    StragglerSettings,
)


@pytest.mark.parametrize(
    ("change", "read"),
    [
        ("optimizer.lr=3e-4", lambda s: s.optimizer.lr == 3e-4),
        ("model.num_layers=7", lambda s: s.model.num_layers == 7),
        ("compile=true", lambda s: s.compile is True),
        ("activation_checkpointing=true", lambda s: s.activation_checkpointing == "full"),
        ("activation_checkpointing=false", lambda s: s.activation_checkpointing == "none"),
        ("activation_checkpointing=none", lambda s: s.activation_checkpointing == "none"),
        ("activation_checkpointing=selective", lambda s: s.activation_checkpointing == "selective"),
        ("dtype=float64", lambda s: s.dtype == "float64"),
        ("data.source=some,where", lambda s: s.data.source == "some,where"),
        ("data.separator=none", lambda s: s.data.separator is None),
        ("data.source=a=b", lambda s: s.data.source == "a=b"),
        ("record_samples=a/b.jsonl", lambda s: s.record_samples == Path("a/b.jsonl")),
    ],
)
def test_override_is_parsed_by_the_type_of_its_setting(change, read) -> None:
    assert read(override(byte_lm(), [change]))


def test_tuple_is_written_with_commas() -> None:
    assert override(mlp(), ["model.dims=4,5,6"]).model.dims == (4, 5, 6)


def test_last_override_of_a_key_counts_and_the_recipe_is_unchanged() -> None:
    before = byte_lm()
    after = override(before, ["seed=1", "batch=30", "microbatch=10", "seed=2"])
    assert (after.seed, after.batch, after.num_microbatches) == (2, 30, 3)
    assert before == byte_lm()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optimiser.lr=1", "optimizer.lr"),
        ("lr=1", "optimizer.lr"),
        ("model.num_layer=1", "model.num_layers"),
        ("zzzz=1", "there are: model.kind"),
        ("model=1", "there is no such setting"),
        ("checkpoint=5", "checkpoint is a group: checkpoint.every, checkpoint.keep_last"),
        ("every=5", "similar: audit.every, snapshot.every, straggler.every, checkpoint.every"),
        ("seed", "write key=value"),
        ("optimizer.lr=fast", "valid number"),
        ("optimizer.lr=-1", "greater than 0"),
        ("steps=1.5", "valid integer"),
        ("compile=perhaps", "valid boolean"),
        ("activation_checkpointing=some", "'none', 'selective' or 'full'"),
        ("dtype=float8", "'float32', 'float64' or 'bfloat16'"),
        ("batch=none", "valid integer"),
        ("straggler.factor=1", "must be greater than 1"),
        ("straggler.reports=0", "greater than 0"),
        ("quarantine.after_crashes=-1", "greater than or equal to 0"),
        ("model.kind=mlp", "'transformer'"),
        ("batch=25", "batch=25 must be a multiple of microbatch=2: set batch to 24 or 26"),
    ],
)
def test_invalid_override_is_a_one_line_error(change, message) -> None:
    settings = override(byte_lm(), ["microbatch=2", "dtype=bfloat16"])
    with pytest.raises(UserError) as error:
        override(settings, [change])
    assert message in str(error.value)
    assert " : " not in str(error.value)
    assert "\n" not in str(error.value)


def test_number_of_heads_must_divide_the_width() -> None:
    with pytest.raises(UserError, match=r"model\.dim=100"):
        override(byte_lm(), ["model.dim=100"])
    with pytest.raises(UserError, match="num_kv_heads=3"):
        override(byte_lm(), ["model.num_kv_heads=3"])


def test_top_k_cannot_exceed_the_number_of_experts() -> None:
    assert override(tiny_moe(), ["model.experts.top_k=4"]).model.experts.top_k == 4
    with pytest.raises(UserError, match=r"model\.experts\.top_k=5 exceeds .*num_experts=4"):
        override(tiny_moe(), ["model.experts.top_k=5"])


def test_settings_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        byte_lm().seed = 3
    with pytest.raises(ValidationError, match="flavour"):
        TrainSettings(flavour="sweet")


@pytest.mark.parametrize("settings", [byte_lm(), tiny_moe(), mlp()])
def test_settings_survive_json(settings) -> None:
    assert TrainSettings.model_validate(json.loads(settings.model_dump_json())) == settings


def test_only_training_settings_are_compared() -> None:
    old = byte_lm()
    assert (
        differing_training_settings(old, override(old, ["steps=7", "eval_every=3", "compile=true"]))
        == []
    )
    new = override(old, ["steps=7", "optimizer.lr=0.5", "seed=9", "data.seq_len=64"])
    assert differing_training_settings(old, new) == [
        "data.seq_len: 128 -> 64",
        f"optimizer.lr: {old.optimizer.lr} -> 0.5",
        "seed: 0 -> 9",
    ]


@pytest.mark.parametrize(
    ("flat", "name"),
    [
        ("checkpoint_every", "checkpoint.every"),
        ("keep_last", "checkpoint.keep_last"),
        ("snapshot_server_timeout_s", "snapshot.server_timeout_s"),
        ("hang_timeout_s", "failure.hang_timeout_s"),
        ("growth_horizon_s", "growth.horizon_s"),
        ("max_skipped", "loss_monitor.max_skipped"),
        ("failure.keep_best", "checkpoint.keep_best"),
    ],
)
def test_a_name_without_its_group_or_with_another_is_answered_with_the_right_one(
    flat: str, name: str
) -> None:
    with pytest.raises(UserError) as error:
        override(TrainSettings(), [f"{flat}=5"])
    assert str(error.value) == f"--set {flat}: there is no such setting; similar: {name}"


def test_the_settings_are_the_only_defaults() -> None:
    """The policy and the worker options have none for what a setting or a duty decides."""
    assert not [field.name for field in fields(Policy) if field.default is not MISSING]
    settable = {entry.name.replace(".", "_") for entry in entries_of(TrainSettings)}
    defaults = {field.name for field in fields(WorkerOptions) if field.default is not MISSING}
    assert defaults == {"faults", "profiled", "max_snapshot_bytes"}
    assert not defaults & settable


def test_every_setting_of_the_policy_reaches_it() -> None:
    """Each number of these groups changes exactly one field of the policy, or is not the core's."""
    plain, unused = policy_of(TrainSettings(), 1, 2, "run"), set()
    for entry in entries_of(TrainSettings):
        if not issubclass(entry.group, POLICY_GROUPS):
            continue
        default = entry.field.default
        others = {"copy": "xor:3", "auto": "7min", "0.25": "0.9", "False": "true", "True": "false"}
        value = others.get(str(default), "9")
        changed = policy_of(override(TrainSettings(), [f"{entry.name}={value}"]), 1, 2, "run")
        before, after = asdict(plain), asdict(changed)
        names = [name for name in before if before[name] != after[name]]
        if not names:
            unused.add(entry.name)
        assert len(names) <= 1 or entry.name == "checkpoint.every", names
    assert unused == {"failure.driver_timeout_s", "failure.orphan_timeout_s"}


def test_another_kind_of_model_differs_in_its_fields() -> None:
    differences = differing_training_settings(byte_lm(), mlp())
    assert "model.kind: transformer -> mlp" in differences
    assert any(line.startswith("model.dims: None -> ") for line in differences)


def test_list_of_training_settings_is_frozen() -> None:
    names = {entry.name for entry in entries_of(TrainSettings)}
    assert names > RESUMABLE_SETTINGS
    assert {name.partition(".")[0] for name in names - RESUMABLE_SETTINGS} == {
        "model",
        "data",
        "optimizer",
        "lora",
        "seed",
        "init_from",
        "batch",
        "microbatch",
        "updates_per_batch",
        "dtype",
    }


@pytest.mark.parametrize(
    ("text", "steps", "seconds"),
    [("auto", 0, 0.0), ("0", 0, 0.0), ("250", 250, 0.0), ("15min", 0, 900.0), (".5min", 0, 30.0)],
)
def test_checkpoint_every_is_steps_time_auto_or_off(text: str, steps: int, seconds: float) -> None:
    """The default `auto` leaves the interval to the controller; 0 disables periodic checkpoints."""
    before = TrainSettings(checkpoint=CheckpointSettings(every=7))
    settings = override(before, [f"checkpoint.every={text}"])
    assert (settings.checkpoint.every_steps, settings.checkpoint.every_s) == (steps, seconds)
    assert TrainSettings().checkpoint.every == "auto"
    assert bool(warn_unsaved(settings)) == (text == "0")


@pytest.mark.parametrize("text", ["never", "-1", "15 min", "1.5"])
def test_invalid_checkpoint_every_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.every"):
        override(TrainSettings(), [f"checkpoint.every={text}"])


@pytest.mark.parametrize("text", ["0min", "0.000001min", ".016666min"])
def test_checkpoint_interval_under_a_second_is_refused(text: str) -> None:
    """A regression test: such an interval silently disabled checkpoints."""
    with pytest.raises(UserError) as refused:
        override(TrainSettings(), [f"checkpoint.every={text}"])
    assert str(refused.value) == (
        f"--set checkpoint.every={text}: must be at least 0.017min (1 s), or 0 for no periodic "
        "checkpoints"
    )
    values = {**TrainSettings().model_dump(), "checkpoint": {"every": text}}
    with pytest.raises(
        UserError, match=r"recipe\.json checkpoint\.every.*: must be at least 0\.017min"
    ):
        settings_from(values, "recipe.json")
    assert override(TrainSettings(), ["checkpoint.every=0.017min"]).checkpoint.every_s > 1.0


@pytest.mark.parametrize(
    ("changes", "is_auto", "every_s"),
    [
        ((), True, 0.0),
        (("checkpoint.every=0",), False, 0.0),
        (("checkpoint.every=2min",), False, 120),
    ],
)
def test_checkpoint_every_reaches_the_policy_of_the_controller(
    changes: tuple[str, ...], is_auto: bool, every_s: float, tmp_path: Path
) -> None:
    request = TrainRequest(
        "tiny", changes=changes, storage=str(tmp_path), data="random", workers="2"
    )
    policy = make_plan(request, num_gpus=0).run.opening.policy
    assert (policy.checkpoint_auto, policy.checkpoint_every_s) == (is_auto, every_s)
    assert policy.silence_timeout_s == TrainSettings().failure.silence_timeout_s == 5.0


def test_selective_recomputation_is_refused_where_it_is_not_possible() -> None:
    with pytest.raises(UserError, match=r"schedule=zero_bubble recomputes.*interleaved_1f1b"):
        override(byte_lm(), ["schedule=zero_bubble", "activation_checkpointing=selective"])
    with pytest.raises(UserError, match="compile=false"):
        override(byte_lm(), ["compile=true", "activation_checkpointing=selective"])
