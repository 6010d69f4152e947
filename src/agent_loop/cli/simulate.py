"""`agent-loop simulate`: run a workload on a simulated cluster."""

from __future__ import annotations

import json
import math
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from agent_loop.cli.arguments import SamplesOption, above_0, finite
from agent_loop.errors import ConfigError, did_you_mean
from agent_loop.runtime.garbage_collection import frozen_objects

if TYPE_CHECKING:
    from agent_loop.simulation.cluster import ServerFault, SimulatedCluster
    from agent_loop.simulation.report import SimulationOutcome, SimulationReport
    from agent_loop.simulation.workload import TrajectoryPlan

NameT = TypeVar("NameT", bound=StrEnum)

POLICIES = "least-work, round-robin, least-requests, sticky-hash, verl"
ORDERS = "arrival, learnt, oracle"
EXIT_INTERRUPTED = 130


def simulate_command(
    *,
    servers: Annotated[int, typer.Option("--servers", min=1, help="Number of servers.")] = 512,
    trajectories: Annotated[
        int, typer.Option("--trajectories", min=1, help="Number of trajectories.")
    ] = 100_000,
    n: SamplesOption = None,
    slow_share: Annotated[
        float, typer.Option("--slow-share", min=0, max=1, callback=finite, help="Share of slow servers.")
    ] = 0.0,
    slow_speed: Annotated[
        float,
        typer.Option("--slow-speed", callback=above_0, help="Speed of slow servers, relative to the others."),
    ] = 0.5,
    policy: Annotated[str, typer.Option("--policy", help=f"Load balancing: {POLICIES}.")] = "least-work",
    order: Annotated[
        str,
        typer.Option(
            "--order",
            help=f"Order of queued requests: {ORDERS}. `learnt` and `oracle` start the trajectory with the most turns "
            "left, predicted or known.",
        ),
    ] = "arrival",
    max_concurrent: Annotated[
        str | None,
        typer.Option(
            "--max-concurrent",
            help="Maximum trajectories in flight: a number, or auto. By default all.",
            show_default=False,
        ),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            "--replay", help="Use recorded trajectories: a file, or a folder of files.", show_default=False
        ),
    ] = None,
    fail: Annotated[
        list[str] | None,
        typer.Option(
            "--fail",
            metavar="SERVER@SECOND[+SECONDS]",
            help="Server that fails at this time, and restarts after SECONDS. May be given more than once.",
            show_default=False,
        ),
    ] = None,
    batch: Annotated[
        int, typer.Option("--batch", min=1, help="Maximum concurrent requests of a server.")
    ] = 64,
    step_ms: Annotated[
        float,
        typer.Option("--step-ms", callback=above_0, help="Milliseconds of a decoding step without requests."),
    ] = 12.0,
    request_ms: Annotated[
        float,
        typer.Option(
            "--request-ms", min=0, callback=finite, help="Milliseconds that each request adds to a step."
        ),
    ] = 0.25,
    prefill: Annotated[
        float, typer.Option("--prefill", callback=above_0, help="Speed of the prefill, in tokens per second.")
    ] = 20_000.0,
    kv_tokens: Annotated[
        int, typer.Option("--kv-tokens", min=1, help="Size of a server's KV cache, in tokens.")
    ] = 400_000,
    perfect: Annotated[
        bool,
        typer.Option(
            "--perfect/--no-perfect",
            help="Also run a single server with the capacity of all servers, for comparison.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the workload.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> None:
    """Run a workload on a simulated cluster in virtual time, with the real manager, balancer and worker.

    The default workload is heavy-tailed: 2 to 40 turns (Pareto), with log-normal lengths and tool latencies. 100,000
    trajectories take a few minutes on one core.

    Examples:

        agent-loop simulate

        agent-loop simulate --servers 64 --trajectories 12500 --slow-share 0.1 --slow-speed 0.5

        agent-loop simulate --servers 8 --replay trajectories.jsonl --trajectories 4000 --fail 3@60+120 --json
    """
    from agent_loop.simulation.cluster import (
        OrderName,
        PolicyName,
        SimulatedCluster,
    )  # late: keeps `--help` quick
    from agent_loop.simulation.engine import EngineModel
    from agent_loop.simulation.replay import read_plans, repeat_plans
    from agent_loop.simulation.workload import Workload

    model = EngineModel(
        step_s=step_ms / 1000,
        step_s_per_request=request_ms / 1000,
        prefill_tokens_per_s=prefill,
        max_concurrent=batch,
        kv_tokens=kv_tokens,
    )
    cluster = SimulatedCluster(
        num_servers=servers,
        model=model,
        slow_share=slow_share,
        slow_speed=slow_speed,
        policy=_choice(policy, "--policy", PolicyName),
        order=_choice(order, "--order", OrderName),
        max_concurrent=None if max_concurrent is None else _bound(max_concurrent),
        faults=tuple(_fault(text) for text in fail or ()),
    )
    if replay is None:
        plans = Workload(num_trajectories=trajectories, group_size=n or 8, seed=seed).plans()
    else:
        recorded = read_plans(replay)
        plans = repeat_plans(recorded, times=-(-trajectories // len(recorded)))[:trajectories]
    console = Console(stderr=as_json)
    try:
        report = _run(cluster, plans, perfect=perfect, console=console)
    except KeyboardInterrupt:
        console.print("stopped: an unfinished simulation has no results")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2))
    else:
        console.print(_table(report))
        if report.num_failed:
            console.print(
                f"{report.num_failed} trajectories failed, the first with: {report.first_failure}",
                markup=False,
            )


def _run(
    cluster: SimulatedCluster, plans: list[TrajectoryPlan], *, perfect: bool, console: Console
) -> SimulationReport:
    from agent_loop.simulation.cluster import simulate  # late: keeps `--help` quick
    from agent_loop.simulation.report import MakespanBounds, SimulationReport

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    shown = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    with frozen_objects(), shown as progress:  # else garbage collection visits the plans repeatedly

        def run(cluster: SimulatedCluster, name: str) -> SimulationOutcome:
            task = progress.add_task(name, total=len(plans))
            return simulate(cluster, plans, on_trajectory=lambda: progress.advance(task))

        perfect_s = run(cluster.perfect(), "perfect pool").makespan_s if perfect else None
        outcome = run(cluster, f"{cluster.num_servers} servers")
    bounds = MakespanBounds.of(plans, model=cluster.model, capacity=cluster.capacity)
    return SimulationReport.of(outcome, bounds=bounds, perfect_s=perfect_s)


def _table(report: SimulationReport) -> Table:
    table = Table("", "", show_header=False)
    latency = report.latency_s
    table.add_row("trajectories", f"{report.num_trajectories}, {report.num_failed} failed")
    table.add_row("makespan", f"{report.makespan_s:.1f} s")
    if report.to_perfect is not None:
        table.add_row("to a perfect pool", f"{report.to_perfect:.3f}  ({report.perfect_s:.1f} s)")
    table.add_row("to the lower bound", f"{report.to_bound:.3f}")
    table.add_row("  all work at full rate", f"{report.work_bound_s:.1f} s")
    table.add_row("  longest trajectory alone", f"{report.longest_bound_s:.1f} s")
    for name in ("p50", "p90", "p99", "max"):
        table.add_row(f"latency {name}", f"{latency[name]:.1f} s")
    table.add_row("prefix hit rate", f"{report.prefix_hit_rate:.1%}")
    table.add_row("imbalance (most to mean work)", f"{report.imbalance:.2f}")
    table.add_row("utilisation", f"{report.utilisation:.1%}")
    table.add_row("preempted, KV cache full", str(report.num_preempted))
    table.add_row("resumed on another server", str(report.num_failovers))
    return table


def _choice(value: str, option: str, names: type[NameT]) -> NameT:
    try:
        return names(value)
    except ValueError:
        raise ConfigError(f"{option} is {value!r}{did_you_mean(value, map(str, names))}") from None


def _bound(text: str) -> int | Literal["auto"]:
    if text == "auto":
        return "auto"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--max-concurrent is {text!r}; give a number of at least 1, or auto")
    return int(text)


def _fault(text: str) -> ServerFault:
    from agent_loop.simulation.cluster import ServerFault  # late: keeps `--help` quick

    server, _, times = text.partition("@")
    at_s, _, for_s = times.partition("+")
    try:
        fault = ServerFault(int(server), float(at_s), float(for_s or "inf"))
        if not (0 <= fault.at_s < math.inf and fault.for_s > 0):
            raise ValueError
        return fault
    except ValueError:
        raise ConfigError(
            f"--fail is {text!r}; give the number of a server and seconds, as in 3@60 or 3@60+120"
        ) from None
