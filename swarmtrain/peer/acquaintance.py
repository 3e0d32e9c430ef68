"""Addresses of peers that this one has to call and has never met: others of its stage, and donors of its state.

The directory's own contacts cover a few dozen peers. In a larger stage a roster names strangers; their addresses are
in the records that they announce under the stage's topic.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from swarmtrain.chain.neighbours import stage_reports
from swarmtrain.directory.directory import Directory
from swarmtrain.errors import SwarmtrainError
from swarmtrain.p2p.network import NetworkHost

log = logging.getLogger(__name__)

LOOK_S = 1.0  # the directory is read for strangers so often at most


class Acquaintance:
    """Reads the records of some stages when somebody in them cannot be reached."""

    def __init__(self, host: NetworkHost, directory: Directory, stages: Sequence[int]) -> None:
        self._host, self._directory, self._stages = host, directory, tuple(stages)
        self._met: dict[str, tuple[str, ...]] = {}  # addresses, as last announced
        self._looking = asyncio.Lock()
        self._looked_at = -LOOK_S

    async def meet(self, peer_id: str) -> bool:
        """A peer could not be dialed; whether the directory says something of it that was not known before."""
        known = self._met.get(peer_id)
        async with self._looking:
            loop = asyncio.get_running_loop()
            if self._met.get(peer_id) == known and loop.time() - self._looked_at >= LOOK_S:
                self._met = await self._look()
                self._looked_at = loop.time()
        return self._met.get(peer_id, known) != known

    async def _look(self) -> dict[str, tuple[str, ...]]:
        found: dict[str, tuple[str, ...]] = {}
        for stage in self._stages:
            try:
                reports = await stage_reports(self._directory, stage)
            except SwarmtrainError as error:
                log.debug("cannot read the directory: %s", error)
                continue
            for peer_id, report in reports.items():
                if peer_id != self._host.peer_id:
                    self._host.learn(report.addresses, of=peer_id)
                    found[peer_id] = report.addresses
        return found
