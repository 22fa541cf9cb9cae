"""The load-balancing loss of routers trains as in a plain loop that accumulates gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import causal_lm_cases  # offline, before transformers is imported
import plain_causal_lm
import pytest
import torch
from harness import run_in_processes
from test_replica import CPU, program_of, train
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from actors.runtime.fault_spec import Fault
from elastic.geometry.target_layout import TargetLayout
from elastic.protocol.events import LayoutRequested
from pipelines.errors import UserError
from pipelines.hugging_face.architectures import fields_of
from pipelines.hugging_face.building import build
from pipelines.run.plan import TrainRequest, make_plan
from pipelines.settings import CheckpointSettings, DataSettings, TrainSettings
from pipelines.training.replica.warm_up import group_of_one
from pipelines.training.workload.optimizer import learning_rate

BATCH, MICROBATCH = 8, 2
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.3}


def save_model(folder: Path, family: str, **changes: object) -> Path:
    fields = {**fields_of(family), **ROUTED, **changes}
    torch.manual_seed(1)
    config = CONFIG_MAPPING[fields.pop("model_type")](**fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
    return folder / family


def settings_of(model_folder: Path, across: bool = True, **changes: object) -> TrainSettings:
    data = DataSettings(source="random", seq_len=16, attend_across_documents=across)
    return causal_lm_cases.settings_for(
        model_folder, batch=BATCH, microbatch=MICROBATCH, data=data, **changes
    )


def microbatches(settings: TrainSettings, num_steps: int) -> Iterator[list[tuple]]:
    """The microbatches of each step: tokens, targets and positions."""
    for batch in causal_lm_cases.plain_batches(
        settings, program_of(settings).workload.train, num_steps
    ):
        parts = (
            [None] * settings.num_microbatches if part is None else part.split(MICROBATCH)
            for part in batch
        )
        yield list(zip(*parts, strict=True))


def train_by_accumulation(settings: TrainSettings) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The usual script: `(loss / number of microbatches).backward()` for each of them, with the
    loss of `transformers`, but in float64."""
    model, losses = plain_causal_lm.load(settings.init_from), []
    rates = settings.optimizer
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.ndim > 1], "weight_decay": rates.weight_decay},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ],
        betas=(rates.beta1, rates.beta2),
        eps=1e-8,
    )
    for step, batch in enumerate(microbatches(settings, settings.steps), start=1):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(rates, step)
        total = 0.0
        for tokens, targets, _ in batch:
            output = model(tokens)
            loss = cross_entropy(output.logits.flatten(0, 1), targets.flatten())
            loss = loss + model.router_aux_loss_coef * output.aux_loss
            (loss / len(batch)).backward()
            total += loss.item() / len(batch)
        torch.nn.utils.clip_grad_norm_(parameters, rates.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model.state_dict()


@pytest.mark.slow
def test_run_with_two_kills_and_a_reshard_equals_the_usual_script(tmp_path: Path) -> None:
    """With three workers, two and one, over `fsdp` and `dp`."""
    checkpoint = CheckpointSettings(every=2)
    settings = settings_of(save_model(tmp_path, "mixtral"), steps=10, checkpoint=checkpoint)
    faults = (Fault("kill", "w2", 3, "compute"), Fault("kill", "w1", 8, "compute"))
    due = ((5, LayoutRequested("other", TargetLayout.parse("fsdp=2"))),)
    run = run_in_processes(tmp_path / "run", settings, 3, layout="fsdp=3", due=due, faults=faults)
    assert run.stopped.outcome == "completed"
    layouts = [line["layout"] for line in run.lines_of("Resume")]
    assert layouts == ["fsdp=3", "dp=2", "fsdp=2", "dp=1"], run.story()
    losses, _ = train_by_accumulation(settings)
    assert [run.losses()[n] for n in range(1, 11)] == pytest.approx(losses, rel=1e-9)


@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_each_token_counts_its_microbatch_if_documents_share_sequences(
    tmp_path: Path, family: str
) -> None:
    """Microbatches have different numbers of targets; each loss counts by them."""
    settings = settings_of(save_model(tmp_path, family), across=False)
    with group_of_one(CPU) as groups:
        trained = train(program_of(settings), groups, 3)
    model, rates = plain_causal_lm.load(settings.init_from), settings.optimizer
    expected = plain_causal_lm.train(
        model,
        microbatches(settings, 3),
        [learning_rate(rates, step) for step in range(1, 4)],
        (rates.beta1, rates.beta2),
        rates.weight_decay,
        rates.max_grad_norm,
    )
    losses, norms = zip(*expected, strict=True)
    assert trained.losses == pytest.approx(losses, rel=1e-9)
    assert trained.norms == pytest.approx(norms, rel=1e-9)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(trained.tensors[name], weight, rtol=1e-9, atol=1e-12)
    whole_batch, _ = causal_lm_cases.train_plain_model(settings, 1)
    assert whole_batch[0][0] != pytest.approx(losses[0], rel=1e-6), "a merged pass would differ"


def test_settings_of_passes_do_not_change_the_loss(tmp_path: Path) -> None:
    settings = settings_of(save_model(tmp_path, "mixtral"))
    other = settings.model_copy(update={"activation_checkpointing": "full", "pass_samples": BATCH})
    losses = []
    for chosen in (settings, other):
        with group_of_one(CPU) as groups:
            losses.append(train(program_of(chosen), groups, 2).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize("axis", ["pp", "cp"])
def test_axis_that_cuts_a_microbatch_is_refused_with_the_reason(tmp_path: Path, axis: str) -> None:
    model_folder = save_model(tmp_path, "mixtral")
    request = TrainRequest(
        f"hf:{model_folder}", storage=str(tmp_path), workers="2", layout=f"{axis}=2", data="random"
    )
    with pytest.raises(UserError, match=r"load-balancing loss.*output_router_logits=false"):
        make_plan(request, 0)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_loss_that_a_model_does_not_compute_is_refused(family: str) -> None:
    with pytest.raises(UserError, match="computes no load-balancing loss") as refused:
        build(fields_of(family) | ROUTED)
    assert "\n" not in str(refused.value)
