"""One coordinator at a time: who else holds the run's key and coordinates, and who yields."""

from __future__ import annotations

import logging

from swarmtrain.chain.claim import Claim
from swarmtrain.chain.offer import COORDINATOR_TOPIC
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.net.directory import Directory

log = logging.getLogger(__name__)


class Superseded(SwarmtrainError):
    """Another coordinator has taken over the run: its term is higher, or as high and it has got further."""

    error_id = "ST-SUPERSEDED"
    exit_code = ExitCode.REFUSED

    @classmethod
    def by(cls, rival: Claim, term: int) -> Superseded:
        """For a coordinator whose own term is `term`."""
        return cls(
            f"{rival.peer_id[-8:]} coordinates this run under term {rival.term}; this one's is {term}",
            fix="leave the run to it, or stop it first",
        )


async def check_start(directory: Directory, own: Claim) -> None:
    """Superseded if somebody coordinates under the term that this one would take, or a later one.

    Whom this process cannot see yet it finds while it runs.
    """
    for rival in await _rivals(directory, own.peer_id):
        if rival.term >= own.term:
            raise Superseded.by(rival, own.term)


async def check_running(directory: Directory, own: Claim) -> None:
    """Superseded if another claim is greater. Peers obey the greatest only: there is nothing left to do."""
    for rival in await _rivals(directory, own.peer_id):
        if rival > own:
            raise Superseded.by(rival, own.term)


async def _rivals(directory: Directory, own_id: str) -> list[Claim]:
    try:
        records = await directory.lookup(COORDINATOR_TOPIC)
    except SwarmtrainError as error:
        log.info("cannot look for other coordinators: %s", error)
        return []
    claims = [Claim.read(peer_id, record.value) for peer_id, record in records.items() if peer_id != own_id]
    return [claim for claim in claims if claim is not None]
