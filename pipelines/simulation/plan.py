"""From a request to the run that is simulated: trace, policy, job, layout and costs."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from pathlib import Path

from actors.simulation.simulation import SimulatedRun
from elastic.geometry.errors import ElasticError
from elastic.geometry.target_layout import TargetLayout
from elastic.geometry.training_job import Job
from elastic.simulation.costs import Costs
from elastic.simulation.step_times import LayoutTimes
from elastic.simulation.trace import Availability, parse_trace
from pipelines.errors import UserError
from pipelines.observe.history.run_folder import find_run
from pipelines.run.options import policy_of
from pipelines.run.refusals import parse_layout, parse_workers
from pipelines.settings import TrainSettings
from pipelines.settings.overrides import override
from pipelines.simulation.generator import generate
from pipelines.simulation.measured import MeasuredRun, measure
from pipelines.simulation.request import SimulateRequest
from pipelines.simulation.settings import read_costs

STATE_BYTES = 10**9
ENDLESS = 10**12
"""More steps than any trace has time for."""
MICROBATCHES_PER_WORKER = 8


def plan_run(request: SimulateRequest) -> SimulatedRun:
    """What the request asks for. Raises `UserError`."""
    trace = read_trace(request).with_notice(_finite("--notice-s", request.notice_s))
    measured = None
    if request.from_run is not None:
        measured = measure(find_run(request.from_run, request.storage))
    known = {**measured.costs, "step_s": measured.step_s} if measured else {}
    costs = read_costs(known, request.costs, request.cost, request.step_s)
    return run_over(trace, request, costs, measured)


def read_trace(request: SimulateRequest) -> Availability:
    """The trace of a request. Raises `UserError`."""
    if (request.trace is None) == (request.generate is None):
        raise UserError("give a trace or --generate: elastic simulate TRACE.csv")
    if request.generate is not None:
        return generate(request.generate)
    assert request.trace is not None, "one of both is given"
    try:
        return parse_trace(Path(request.trace).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{request.trace}: cannot be read ({error}); give a text file") from None
    except ElasticError as error:
        raise UserError(f"{request.trace}: {error}") from None


def run_over(
    trace: Availability,
    request: SimulateRequest,
    costs: Costs,
    measured: MeasuredRun | None = None,
) -> SimulatedRun:
    """The run of a request over this trace. Raises `UserError`."""
    per_node = request.workers_per_node
    min_workers, max_workers = 1, max(1, trace.peak * per_node)
    if request.workers:
        min_workers, max_workers = parse_workers(request.workers)
    settings = override(TrainSettings(), request.changes)
    if settings.snapshot.redundancy != "copy":
        raise UserError(
            f"--set snapshot.redundancy={settings.snapshot.redundancy}: the simulation has no "
            "parity; use copy"
        )
    layout = parse_layout(request.layout) if request.layout else TargetLayout()
    state_bytes = measured.state_bytes if measured else STATE_BYTES
    if request.state_bytes is not None:
        state_bytes = int(_finite("--state-bytes", request.state_bytes))
    num_microbatches = request.batch or (measured.num_microbatches if measured else 0)
    job = Job(
        num_microbatches=num_microbatches or MICROBATCHES_PER_WORKER * max_workers,
        microbatch=1,
        state_bytes=state_bytes,
        param_bytes=state_bytes // 4,
        steps=request.steps or ENDLESS,
        checkpoint_every=settings.checkpoint.every_steps,
        layer_costs=(1,) * (4 * layout.pp * layout.vp) if layout.pp > 1 else (),
    )
    policy = policy_of(settings, min_workers, max_workers, "simulated")
    target = TargetLayout.parse(request.layout or "", max_workers)
    if measured and costs.step_s == measured.step_s:  # no option sets another
        step_s = _scaled(measured, LayoutTimes(job, target, max_workers, per_node, 1.0))
        costs = replace(costs, step_s=step_s)
    return SimulatedRun(trace, policy, job, target, costs, per_node, request.layout or "")


def _scaled(measured: MeasuredRun, times: LayoutTimes) -> float:
    """The time of a step with all workers, from one with as many as were measured."""
    relative, _ = times.with_workers(measured.num_workers)
    return measured.step_s / relative if isfinite(relative) else measured.step_s


def _finite(option: str, value: float) -> float:
    if not isfinite(value) or value < 0:
        raise UserError(f"{option} {value:g}: give a number of 0 or more")
    return value
