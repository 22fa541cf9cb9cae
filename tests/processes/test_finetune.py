"""Fine-tuning: equals a plain loop of `transformers` and `peft`, which load the export."""

from __future__ import annotations

import json
from pathlib import Path

import models_on_disk  # offline, before transformers is imported
import peft
import plain_causal_lm
import pytest
import torch
from harness import Outcome, run_in_processes
from run_checks import assert_no_step_repeated
from test_hugging_face_models import SIZES
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from actors.runtime.fault_spec import Fault
from elastic.geometry.regions import Region
from elastic.geometry.sample_order import sample_of
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested, WorkerDraining
from pipelines.errors import UserError
from pipelines.hugging_face.adapters import is_adapter
from pipelines.hugging_face.causal_lm import positions_of
from pipelines.hugging_face.weights.export import export
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.run.program import TrainingProgram
from pipelines.settings import CheckpointSettings
from pipelines.training.workload.optimizer import learning_rate

NUM_STEPS = 6
LORA = ("lora.rank=4", "lora.alpha=8", "lora.targets=q_proj,v_proj,down_proj")


def model_folder(folder: Path) -> Path:
    torch.manual_seed(1)
    config = CONFIG_MAPPING["llama"](**SIZES | {"vocab_size": 264})
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    return folder / "model"


def request_for(folder: Path, *changes: str) -> TrainRequest:
    conversations = [
        {"prompt": f"What comes after {n}?", "response": f"{n + 1}, I think" + "." * (n % 5)}
        for n in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, conversations)))
    common = ("dtype=float64", "data.seq_len=120", "batch=4", "eval_every=0", "optimizer.lr=1e-3")
    return TrainRequest(
        "finetune",
        storage=str(folder),
        data=str(folder / "chats.jsonl"),
        steps=NUM_STEPS,
        changes=(f"init_from={model_folder(folder)}", *common, *changes),
    )


def reshard_to(layout: str, step: int) -> tuple[int, LayoutRequested]:
    return step, LayoutRequested("other", TargetLayout.parse(layout))


def train_with_faults(tmp_path: Path, *changes: str) -> tuple[dict[int, float], TrainingProgram]:
    """Train with four workers, of which two are killed and one is drained."""
    losses, program, run = train(
        tmp_path,
        "dp=4",
        changes,
        faults=(Fault("kill", "w1", 2, "compute"), Fault("kill", "w2", 4, "apply")),
        due=((4, WorkerDraining("w3", "shrinks")),),
    )
    assert {"w1", "w2"} <= {line["worker"] for line in run.lines_of("WorkerLost")}
    assert "w3" not in run.lines_of("Resume")[-1]["workers"]
    return losses, program


def train(
    tmp_path: Path, layout: str, changes: tuple[str, ...], **events: object
) -> tuple[dict[int, float], TrainingProgram, Outcome]:
    """Train with four workers."""
    plan = make_plan(request_for(tmp_path, *changes), 0)
    settings = plan.settings.model_copy(update={"checkpoint": CheckpointSettings(every=NUM_STEPS)})
    folder = plan.run.program.kwargs["data_folder"]
    run = run_in_processes(
        tmp_path / "run",
        settings,
        4,
        layout=layout,
        data_folder=folder,
        **events,
    )
    assert run.stopped.outcome == "completed"
    assert_no_step_repeated(run)
    recipe = {"settings": settings.model_dump(mode="json"), "data_folder": folder}
    (run.folder / "recipe.json").write_text(json.dumps(recipe))
    return run.losses(), TrainingProgram(**recipe, device="cpu"), run


def train_plain_model(program: TrainingProgram, model: torch.nn.Module) -> list[float]:
    settings, data, batches = program.settings, program.workload.train, []
    for step in range(NUM_STEPS):
        ids = range(step * settings.batch, (step + 1) * settings.batch)
        batch = data.read(
            [sample_of(settings.seed, sample_id, data.num_samples) for sample_id in ids]
        )
        batches.append((batch.tokens, batch.targets, positions_of(batch.documents)))
    optimizer = settings.optimizer
    losses_and_norms = plain_causal_lm.train(
        model,
        batches,
        [learning_rate(optimizer, step) for step in range(1, NUM_STEPS + 1)],
        (optimizer.beta1, optimizer.beta2),
        optimizer.weight_decay,
        optimizer.max_grad_norm,
    )
    return [loss for loss, _ in losses_and_norms]


@pytest.mark.soak
def test_finetuning_of_all_weights_equals_transformers(tmp_path: Path) -> None:
    losses, program = train_with_faults(tmp_path)
    model = plain_causal_lm.load(tmp_path / "model")
    assert list(losses.values()) == pytest.approx(train_plain_model(program, model), rel=1e-9)
    export("run", tmp_path, tmp_path / "out")
    stored = models_on_disk.load_pretrained(tmp_path / "out", torch.float64).state_dict()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(stored[name], weight, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_finetuning_of_adapters_equals_peft(tmp_path: Path) -> None:
    """Base weights are not in the optimizer; the export is a `peft` folder."""
    losses, program = train_with_faults(tmp_path, *LORA)
    optimizer_names = {spec.name for spec in program.specs() if spec.kind == "optimizer"}
    assert optimizer_names and all(is_adapter(name) for name in optimizer_names)
    assert_equals_peft(tmp_path, losses, program)


@pytest.mark.soak
def test_adapters_over_tp_and_pp_equal_peft_through_reshards(tmp_path: Path) -> None:
    losses, program, run = train(
        tmp_path,
        "dp=2,tp=2",
        LORA,
        due=(reshard_to("pp=2,tp=2", 2), reshard_to("fsdp=2,pp=2", 4)),
    )
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts == ["dp=2,tp=2", "pp=2,tp=2", "pp=2,fsdp=2"]
    assert_equals_peft(tmp_path, losses, program)


def assert_equals_peft(tmp_path: Path, losses: dict[int, float], program: TrainingProgram) -> None:
    """Losses and the exported adapters are those of a plain loop with `peft`."""
    specs = program.specs()
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"
    )
    model = peft.get_peft_model(plain_causal_lm.load(tmp_path / "model"), config).double()
    initial_adapters = {
        f"base_model.model.{spec.name}": program.initial(spec, Region.whole(spec.shape))
        for spec in specs
        if is_adapter(spec.name) and spec.kind == "parameter"
    }
    assert not model.load_state_dict(initial_adapters, strict=False).unexpected_keys
    assert list(losses.values()) == pytest.approx(train_plain_model(program, model), rel=1e-9)
    export("run", tmp_path, tmp_path / "out")
    loaded = peft.PeftModel.from_pretrained(
        plain_causal_lm.load(tmp_path / "model"), tmp_path / "out"
    )
    for name, weight in loaded.state_dict().items():
        expected = model.state_dict()[name]
        torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)


REFUSED = {
    "no model": ((), (), "init_from=FOLDER"),
    "no such layers": ((), ("lora.rank=4", "lora.targets=nowhere"), "lora.targets=nowhere"),
    "stages without adapters": (("pp=4",), LORA, "the model has 2 layers"),
    "an embedding": (("tp=2",), (*LORA[:2], "lora.targets=embed_tokens"), "not one of a linear"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_finetuning_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    layout, changes, message = REFUSED[name]
    request = request_for(tmp_path, *changes)
    if name == "no model":
        request = TrainRequest("finetune", storage=str(tmp_path), data=request.data)
    if layout:
        request = TrainRequest(**vars(request) | {"layout": layout[0], "workers": layout[0][-1]})
    with pytest.raises(UserError, match=message):
        make_plan(request, 0)
