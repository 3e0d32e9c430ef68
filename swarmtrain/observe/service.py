"""What a daemon serves over HTTP: metrics, its snapshot, health."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from http import HTTPStatus

from prometheus_client.core import Metric

from swarmtrain.observe.cost import Cost
from swarmtrain.observe.http import Handler, Request, Response, as_json
from swarmtrain.observe.metrics import Snapshot, exposition, peer_families

TakeSnapshot = Callable[[], Snapshot]


def daemon_routes(
    snapshot: TakeSnapshot, families: Callable[[Snapshot], Iterator[Metric]], cost: Cost
) -> dict[str, Handler]:
    """The routes of every daemon: `/metrics`, `/api/status`, `/healthz`."""

    def metrics(request: Request) -> Response:
        with cost:
            return Response(*exposition(families, snapshot(), request.headers.get("accept", "")))

    def status(request: Request) -> Response:
        with cost:
            return as_json(snapshot())

    def health(request: Request) -> Response:
        state = str(snapshot()["state"])
        is_well = state != "gone"
        return Response(f"{state}\n".encode(), status=HTTPStatus.OK if is_well else HTTPStatus.SERVICE_UNAVAILABLE)

    return {"/metrics": metrics, "/api/status": status, "/healthz": health}


def peer_routes(snapshot: TakeSnapshot, cost: Cost) -> dict[str, Handler]:
    """The routes of a peer."""
    return daemon_routes(snapshot, peer_families, cost)
