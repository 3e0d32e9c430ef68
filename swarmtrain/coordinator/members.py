"""The peers of a run as the coordinator knows them. Pure: times are given."""

from __future__ import annotations

import ipaddress
import re
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from swarmtrain.route.views import MIN_RATE
from swarmtrain.wire.messages import Heartbeat, Hop
from swarmtrain.wire.peer_report import HOLDS_STATE, PeerReport

SILENT_S = 10.0  # a peer without a heartbeat for this long is lost
METRICS_ADDRESS = re.compile(r"(?:[A-Za-z0-9._-]{1,64}|\[[0-9A-Fa-f:.]{2,45}\]):[0-9]{1,5}")
_FOLLOWS = ("joining", "syncing", "serving")  # in these states a peer may apply a step before its next heartbeat
MAX_HEARD = 1 << 16
MAX_RATE_RATIO = 16.0  # a fibre line among home lines is wider by about that
MAX_EXCLUDED = 4096  # how many are remembered; an older one that comes back is judged by its state alone


@dataclass(frozen=True)
class Member:
    """One incarnation of one peer."""

    peer_id: str
    report: PeerReport  # of its last heartbeat; state, step and digest may have been corrected since
    seen_at: float
    name: str = ""
    metrics: str = ""  # HOST:PORT of its metrics
    spent: tuple[float, ...] = ()  # seconds: compute, reduce, queue, wire, idle
    numeric_class: str = ""  # peers of a stage with the same one compute the same bits
    listening_from: int | None = None  # first step whose all-reduce this newcomer listens to
    excluded_at: int | None = None  # the step in which it was given up; it has not been told to serve since
    was_admitted: bool = False  # it was told to serve; its work may arrive before its next heartbeat
    doubted_at: float | None = None  # when its link broke, if it has sent no heartbeat since

    @property
    def stage(self) -> int:
        """The stage that it hosts."""
        return self.report.stage

    @property
    def state(self) -> str:
        """Its state, as far as the coordinator believes it."""
        return self.report.state

    @property
    def step(self) -> int:
        """Steps that it has applied."""
        return self.report.step

    @property
    def rates(self) -> tuple[float, float]:
        """Announced bytes per second, up and down; 0 if unknown. Else at least MIN_RATE: a share must not overflow.

        Nobody has measured them: `believable` bounds them where they decide something.
        """
        up, down = self.report.up_bytes_per_s, self.report.down_bytes_per_s
        return max(up, MIN_RATE) if up else 0.0, max(down, MIN_RATE) if down else 0.0

    @property
    def must_sync(self) -> bool:
        """Whether it says that it serves although it was excluded."""
        return self.excluded_at is not None and self.state == "unknown"

    @property
    def answers(self) -> bool:
        """Whether it answers for work. An admitted peer may receive work before its next heartbeat."""
        return self.was_admitted or self.state in HOLDS_STATE

    @property
    def is_ready(self) -> bool:
        """Whether it joins an all-reduce without work of its own. A syncing peer listens until its next heartbeat."""
        return self.state == "serving" or (self.was_admitted and self.state == "joining")

    @property
    def key(self) -> tuple[str, str]:
        """What books and rosters call it."""
        return self.peer_id, self.report.incarnation


def may_be_scraped(address: str) -> bool:
    """Whether a HOST:PORT that a peer states of itself is handed on to the run's Prometheus.

    Not one that is nobody's own: link-local (where clouds keep their metadata), unspecified, multicast, reserved.
    """
    if not METRICS_ADDRESS.fullmatch(address):
        return False
    host = address.rpartition(":")[0].strip("[]")
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        is_numeric = not host.strip("0123456789.xXabcdefABCDEF") and host[:1].isdigit() and "." in host
        return "metadata" not in host.lower() and not is_numeric and not host.isdecimal()
    mapped = getattr(ip, "ipv4_mapped", None) or ip
    if mapped.is_loopback:  # of a run on one machine; ::1 counts as reserved, too
        return True
    return not (mapped.is_link_local or mapped.is_unspecified or mapped.is_multicast or mapped.is_reserved)


def believable(rates: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Announced rates of the peers of a stage, each at most MAX_RATE_RATIO times the median of the others' ones.

    Who announces more owns more of the sum, and nobody checks what is announced.
    """
    ups, downs = (_bounded([pair[way] for pair in rates]) for way in (0, 1))
    return list(zip(ups, downs, strict=True))


def _bounded(rates: Sequence[float]) -> list[float]:
    known = sorted(rate for rate in rates if rate)
    if len(known) < 2:
        return list(rates)
    low, high = (len(known) - 2) // 2, (len(known) - 1) // 2  # around the median of all but one

    def usual(own: float) -> float:
        """The median of the others: those from its own position on move down by one."""
        skip = bisect_left(known, own)
        return 0.5 * sum(known[i + (i >= skip)] for i in (low, high))

    return [min(rate, MAX_RATE_RATIO * usual(rate)) if rate else rate for rate in rates]


class Members:
    """The peers that have sent heartbeats and are not lost."""

    def __init__(self) -> None:
        self._by_peer: dict[str, Member] = {}
        self._admitted: dict[int, set[str]] = {}  # by stage; as `was_admitted` says
        self._heard: OrderedDict[str, None] = OrderedDict()  # peers that were ever here, the newest last
        self._excluded: OrderedDict[tuple[str, str], int] = OrderedDict()  # the step; until they are told to serve

    def heartbeat(self, peer_id: str, beat: Heartbeat, now: float) -> Member | None:
        """Note a heartbeat. Returns the former incarnation if the peer has restarted."""
        former, report = self._by_peer.get(peer_id), beat.report
        self._heard[peer_id] = None
        self._heard.move_to_end(peer_id)
        while len(self._heard) > MAX_HEARD:
            self._heard.popitem(last=False)
        self._disown(former)
        is_same = former is not None and former.key == (peer_id, report.incarnation) and former.stage == report.stage
        excluded_at = self._excluded.get((peer_id, report.incarnation))
        is_late = former is not None and is_same and former.state in _FOLLOWS and former.step > report.step
        if former is not None and is_late and report.state == "serving":  # it was sent before the peer's last apply
            report = replace(report, step=former.step, state_digest=former.report.state_digest)
        if excluded_at is not None and report.state == "serving":
            report = replace(report, state="unknown")
        is_waiting = report.state == "syncing"  # only a peer that waits for a state listens
        self._by_peer[peer_id] = Member(
            peer_id=peer_id,
            report=report,
            seen_at=now,
            name=beat.name,
            metrics=beat.metrics if may_be_scraped(beat.metrics) else "",
            spent=beat.spent,
            numeric_class=beat.numeric_class,
            listening_from=former.listening_from if former is not None and is_same and is_waiting else None,
            excluded_at=excluded_at,
        )
        return None if is_same else former

    def get(self, peer_id: str) -> Member | None:
        """The current incarnation of a peer; None if it is lost or unknown."""
        return self._by_peer.get(peer_id)

    def was_heard(self, peer_id: str) -> bool:
        """Whether a peer has ever been a member, as far as is remembered."""
        return peer_id in self._heard

    def name(self, peer_id: str) -> str:
        """What its owner calls a peer; empty if it is unknown."""
        member = self._by_peer.get(peer_id)
        return member.name if member is not None else ""

    def counts(self, hop: Hop) -> bool:
        """Whether a hop of a route counts: this incarnation is a member, answers for work, and hosts that stage."""
        member = self._by_peer.get(hop.peer_id)
        if member is None or (member.report.incarnation, member.stage) != (hop.incarnation, hop.stage):
            return False
        return member.answers

    def admit(self, peer_id: str) -> None:
        """A peer was told to serve: from now on its work counts."""
        member = self._by_peer.get(peer_id)
        if member is not None:
            self._excluded.pop(member.key, None)
            self._by_peer[peer_id] = replace(member, was_admitted=True, excluded_at=None)
            self._admitted.setdefault(member.stage, set()).add(peer_id)

    def refuse(self, peer_id: str) -> None:
        """A peer was told something else than to serve: whatever it says, it is in no all-reduce until it is."""
        member = self._by_peer.get(peer_id)
        if member is not None and member.state == "serving":
            self._by_peer[peer_id] = replace(member, report=replace(member.report, state="unknown"))

    def _disown(self, member: Member | None) -> None:
        if member is not None and member.was_admitted:
            self._admitted[member.stage].discard(member.peer_id)

    def of_stage(self, stage: int, *states: str) -> list[Member]:
        """The peers of a stage in one of `states`, in a fixed order."""
        found = [m for m in self._by_peer.values() if m.stage == stage and m.state in states]
        return sorted(found, key=lambda member: member.peer_id)

    def answering(self, stage: int) -> list[Member]:
        """The peers of a stage whose work counts, in a fixed order."""
        found = [m for m in self._by_peer.values() if m.stage == stage and m.answers]
        return sorted(found, key=lambda member: member.peer_id)

    def num_admitted(self, stage: int) -> int:
        """How many peers of a stage were told to serve at their last heartbeat."""
        return len(self._admitted.get(stage, ()))

    def all(self) -> list[Member]:
        """All peers."""
        return sorted(self._by_peer.values(), key=lambda member: (member.stage, member.peer_id))

    def note_step(self, peer_id: str, step: int, state_digest: str, now: float) -> None:
        """A peer has applied a step, and so it is there."""
        member = self._by_peer.get(peer_id)
        if member is not None:
            seen_at = max(now, member.seen_at)
            report = replace(member.report, step=step, state_digest=state_digest)
            self._by_peer[peer_id] = replace(member, report=report, seen_at=seen_at)

    def listen(self, stage: int, step: int) -> None:
        """Every peer of the stage that waits for a state listens to the all-reduces from `step` on."""
        for member in self.of_stage(stage, "syncing"):
            if member.listening_from is None:
                self._by_peer[member.peer_id] = replace(member, listening_from=step)

    def stop_listening(self, key: tuple[str, str], step: int) -> None:
        """A listener has missed the all-reduce of `step`: it needs a later state, if it is not fetching one already."""
        member = self._by_peer.get(key[0])
        if member is None or member.report.incarnation != key[1] or member.listening_from is None:
            return
        if member.listening_from <= step:
            self._by_peer[key[0]] = replace(member, listening_from=None)

    def forget_steps(self) -> None:
        """The run was rolled back: no state counts until its peer's next heartbeat, and no peer is excluded."""
        self._excluded.clear()
        self._admitted.clear()
        for member in self.all():
            self._by_peer[member.peer_id] = replace(
                member,
                report=replace(member.report, step=0, state_digest="", state="unknown"),
                listening_from=None,
                was_admitted=False,
                excluded_at=None,
            )

    def remove(self, peer_id: str, *, excluded_at: int | None = None) -> Member | None:
        """A peer is gone. With `excluded_at`, this incarnation must not serve in that step if it comes back."""
        member = self._by_peer.pop(peer_id, None)
        self._disown(member)
        if member is not None and excluded_at is not None:
            self._excluded[member.key] = excluded_at
            while len(self._excluded) > MAX_EXCLUDED:
                self._excluded.popitem(last=False)
        return member

    def doubt(self, peer_id: str, now: float) -> None:
        """The link to a peer broke: it may be gone. Its next heartbeat takes that back."""
        member = self._by_peer.get(peer_id)
        if member is not None and member.doubted_at is None:
            self._by_peer[peer_id] = replace(member, doubted_at=now)

    def excuse(self, seconds: float) -> None:
        """No heartbeat could be heard for this long: silence is not held against any peer."""
        for member in self.all():
            self._by_peer[member.peer_id] = replace(member, seen_at=member.seen_at + seconds)

    def silent(self, now: float, limit_s: float = SILENT_S) -> list[Member]:
        """Peers without a heartbeat."""
        return [member for member in self._by_peer.values() if now - member.seen_at > limit_s]
