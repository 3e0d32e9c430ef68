"""A scenario from what the command line says: policies by name, any parameter as KEY=VALUE, a manifest's workload."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from swarmtrain.errors import UsageError
from swarmtrain.model.workload import Workload
from swarmtrain.route.rebalance import RebalanceOptions
from swarmtrain.route.router import POLICIES
from swarmtrain.sim.scenario import REBALANCE_RULES, Scenario
from swarmtrain.units import parse_number

NAMED_POLICIES = {
    "ours": "capacity+finish-time",
    "swarm": "queue:300+swarm-latency",  # as published
}
_NOT_SETTABLE = {"mix", "layout", "trace", "rebalance_options", "churn"}
_PREFIX = "rebalance."


def with_policy(scenario: Scenario, text: str) -> Scenario:
    """`RULE[:PERIOD][+ROUTING]` or a named pair: `capacity`, `queue:60`, `none+swarm-latency`, `ours`, `swarm`."""
    rule_text, _, routing = NAMED_POLICIES.get(text, text).partition("+")
    rule, _, period = rule_text.partition(":")
    changes: dict[str, Any] = {}
    if rule not in REBALANCE_RULES or (routing and routing not in POLICIES):
        raise UsageError(
            f"unknown policy {text[:80]!r}",
            fix=f"RULE[:SECONDS][+ROUTING] with a rule of {', '.join(REBALANCE_RULES)} and a routing of"
            f" {', '.join(POLICIES)}; or {' or '.join(NAMED_POLICIES)}",
        )
    changes["rebalance"] = rule
    if routing:
        changes["routing"] = routing
    if period:
        if rule != "queue":
            raise UsageError(f"{text[:80]!r}: only the rule `queue` has a period")
        changes["rebalance_period_s"] = parse_number(period, text)
    return scenario.with_(**changes)


def with_settings(scenario: Scenario, items: list[str]) -> Scenario:
    """Any parameter of a scenario by name, as in `download_s=30` or `rebalance.min_gain=0.1`."""
    for item in items:
        name, separator, text = item.partition("=")
        if not separator:
            raise UsageError(f"{item[:80]!r} is not NAME=VALUE")
        if name.startswith(_PREFIX):
            options = _changed(scenario.rebalance_options, name.removeprefix(_PREFIX), name, text)
            scenario = replace(scenario, rebalance_options=options)
        elif name in _NOT_SETTABLE:
            raise UsageError(f"{name} has an option of its own")
        else:
            scenario = _changed(scenario, name, name, text)
    return scenario


def with_workload(scenario: Scenario, workload: Workload) -> Scenario:
    """The stages, tensors and steps of a manifest. Speeds are then in units of its mean stage."""
    num_stages = len(workload.stages)
    return scenario.with_(
        num_stages=num_stages,
        num_peers=max(scenario.num_peers, num_stages),
        stage_costs=workload.costs,
        boundary_bytes=workload.boundary_bytes,
        backward_bytes=workload.backward_bytes,
        batch=workload.batch,
        delay=workload.delay,
        delay_from=workload.delay_from,
        checkpoint_every=workload.checkpoint_every,
        moves_every=workload.moves_every,
        gradient_bytes=tuple(stage.reduced.whole for stage in workload.stages),
        gradient_bytes_between=tuple(stage.reduced.between for stage in workload.stages),
    )


def settable() -> list[str]:
    """The names that `--set` knows."""
    own = [entry.name for entry in fields(Scenario) if entry.name not in _NOT_SETTABLE]
    return own + [f"{_PREFIX}{entry.name}" for entry in fields(RebalanceOptions)]


def _changed(target: Any, name: str, full_name: str, text: str) -> Any:
    if name not in {entry.name for entry in fields(target)}:
        raise UsageError(f"a scenario has no parameter {full_name[:80]!r}", fix=f"it has {', '.join(settable())}")
    old = getattr(target, name)
    value: Any
    if isinstance(old, tuple):
        value = tuple(parse_number(part, full_name) for part in text.split(","))
    elif isinstance(old, str):
        value = text
    elif isinstance(old, int):
        value = _whole(text, full_name)
    else:
        value = parse_number(text, full_name)
    return replace(target, **{name: value})


def _whole(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError as error:
        raise UsageError(f"{where[:80]}: {text[:40]!r} is not a whole number") from error
