"""A stranger in the simulated swarm: a process of somebody's own making that has the public invite and no daemon.

It speaks the wire through the real node, links, frames and encoder, and does only what a test tells it:

    mallory = Stranger(swarm, "mallory")
    mallory.answers[Prepare] = lambda message, exchange: Unprepared(missing, (), "")
    mallory.beat(stage=1, state="serving")                       # enrols, and sends heartbeats from now on
    assert mallory.ask(peer, FetchState(...)) ...                # a call, and what became of it
    mallory.stream_to(peer).write(b"...")                        # bytes of its own making

Everything it does costs virtual time only. It is no `Life` of the swarm: nobody waits for its end or judges it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from swarmtrain.chain.membership import Membership
from swarmtrain.chain.offer import COORDINATOR_TOPIC
from swarmtrain.directory.directory import Directory, DirectoryOptions, TopicRule
from swarmtrain.p2p.errors import NetError
from swarmtrain.p2p.network import ByteStream, HostOptions, NetworkHost
from swarmtrain.reduce.partition import cut
from swarmtrain.rpc.errors import CallRefused, Refusal
from swarmtrain.rpc.exchange import Exchange
from swarmtrain.rpc.node import Node
from swarmtrain.run.invite import Invite
from swarmtrain.simulated.swarm import Life, SimulatedSwarm
from swarmtrain.wire.frames import pack_hello
from swarmtrain.wire.messages import (
    MESSAGES,
    Code,
    Enrol,
    Enrolled,
    Heartbeat,
    Prepare,
    ReduceShare,
    Verdict,
)
from swarmtrain.wire.peer_report import SERVING, PeerReport
from swarmtrain.wire.schema import Message

ANSWERED = "answered"
BEAT_S = 2.0
DEADLINE_S = 60.0

Answer = Callable[[Any, Exchange], Message | Awaitable[Message]]
Outcome = Message | NetError


class Stranger:
    """See the module docstring. Ready when the constructor returns."""

    def __init__(
        self,
        swarm: SimulatedSwarm,
        name: str,
        *,
        has_directory: bool = False,
        enrols: bool = True,
        invite: Invite | None = None,
    ) -> None:
        """`has_directory`: it is a node of the run's directory too, so that it can announce records. Unless it
        `enrols` it has no certificate; `invite` is another one than the run's own."""
        self.invite, self._enrols = invite or swarm.invite(), enrols
        self.swarm, self.name = swarm, name
        self.answers: dict[type[Message], Answer] = {}  # to what it is asked; everything else is refused
        self.heard: list[Message] = []  # everything that it was asked
        self.verdicts: list[Verdict] = []
        self.outcomes: list[Outcome] = []  # of what it told and did not wait for
        self.incarnation = f"{name}-1"
        self._has_directory = has_directory
        self._is_ready = False
        self._beating: asyncio.Task[None] | None = None
        self.machine = swarm.stranger_machine(name)
        self.node: Node
        self.host: NetworkHost
        self.directory: Directory
        self.process = self.machine.start(self._main)
        swarm.until(lambda: self._is_ready, f"{name} is there")

    async def _main(self) -> None:
        invite = self.invite
        options = HostOptions(
            state_dir=self.machine.disk.root, listen=(self.machine.address,), bootstrap=invite.bootstrap
        )
        self.host = await self.machine.start_host(options)
        self.membership = Membership(invite)
        self.membership.peer_id = self.host.peer_id
        if self._has_directory:
            rules = {COORDINATOR_TOPIC: TopicRule(countersigned_by=invite.run_key)}
            options_ = DirectoryOptions(rules=rules, gate=self.membership)
            self.directory = await Directory.start(self.host, invite.run_id, options_)
            self.membership.clock = self.directory.now
        self.node = Node(self.host, MESSAGES, self._handle, gate=self.membership)
        if self._enrols:
            await self._enrol(invite)
        self._is_ready = True
        await asyncio.Event().wait()

    async def _enrol(self, invite: Invite) -> None:
        """Get a certificate, as a peer does."""
        proof = hmac.digest(invite.token, self.peer_id.encode(), hashlib.sha256) if invite.token else b""
        request = Enrol(invite.run_id, self.name, token_number=invite.token_number, token_proof=proof)
        answer = await self.node.call(self._learn(self.swarm.coordinator), request, DEADLINE_S, expect=Enrolled)
        self.membership.hold(answer.certificate)
        self.node.show_certificate()

    async def _handle(self, message: Message, exchange: Exchange) -> Message:
        self.heard.append(message)
        answer = self.answers.get(type(message))
        if answer is None:
            raise Refusal(Code.UNKNOWN, "a stranger knows nothing")
        found = answer(message, exchange)
        return found if isinstance(found, Message) else await found

    @property
    def peer_id(self) -> str:
        """Its identity."""
        return self.host.peer_id

    @property
    def run_id(self) -> str:
        """As the invite says."""
        return self.swarm.invite().run_id

    def ask(self, target: Life | str, message: Message, *, deadline_s: float = DEADLINE_S) -> Outcome:
        """The answer, or the error that the call ended with. Virtual time passes until then."""
        found: list[Outcome] = []
        self.process.spawn(self._call(target, message, deadline_s, found), f"{self.name} asks")
        self.swarm.until(lambda: bool(found), f"{self.name} is answered")
        return found[0]

    def outcome(self, target: Life | str, message: Message, *, deadline_s: float = DEADLINE_S) -> str:
        """The same in one word: ANSWERED, the code of the refusal, or the name of the error."""
        found = self.ask(target, message, deadline_s=deadline_s)
        if isinstance(found, CallRefused):
            return found.code
        return type(found).__name__ if isinstance(found, NetError) else ANSWERED

    def tell(self, target: Life | str, message: Message, *, deadline_s: float = DEADLINE_S) -> None:
        """A call that nobody waits for; what became of it is added to `outcomes`."""
        self.process.spawn(self._call(target, message, deadline_s, self.outcomes), f"{self.name} tells")

    def stream_to(self, target: Life | str, receiver: Deaf | None = None, *, says_hello: bool = True) -> ByteStream:
        """A stream of bytes, which the stranger writes itself; what comes back is dropped."""
        found: list[ByteStream] = []

        async def work() -> None:
            stream = await self.host.open(self._learn(target), timeout_s=10.0)
            stream.start(receiver or Deaf())
            if says_hello:
                stream.write(pack_hello(self.membership.proof(stream.peer_id), "a stranger"))
            found.append(stream)

        self.process.spawn(work(), f"{self.name} opens a stream")
        self.swarm.until(lambda: bool(found), f"{self.name} has a stream")
        return found[0]

    def do(self, work: Awaitable[Any]) -> Any:
        """Run something in its process, and return what comes of it."""
        found: list[Any] = []

        async def run() -> None:
            found.append(await work)

        self.process.spawn(run(), f"{self.name} works")
        self.swarm.until(lambda: bool(found), f"{self.name} has done it")
        return found[0]

    async def share_nothing(self, prepare: Prepare) -> None:
        """Its part in an all-reduce, as a member without work that owns nothing: the others end theirs."""
        owners = [entry for entry in prepare.roster if entry.owned]
        for piece in cut([entry.owned for entry in owners]):
            share = ReduceShare(
                prepare.run, prepare.term, prepare.stage, prepare.step, prepare.attempt, piece.index, b""
            )
            found: list[Outcome] = []
            await self._call(owners[piece.owner].peer_id, share, DEADLINE_S, found)

    def report(self, stage: int, state: str = SERVING, **fields: Any) -> PeerReport:
        """What it says of itself."""
        return PeerReport(stage, state, self.incarnation, **fields)

    def beat(self, stage: int, state: str = SERVING, *, metrics: str = "", **fields: Any) -> None:
        """Send heartbeats from now on. Its step and digest are `fields`, or else those that the last verdict named."""
        if self._beating is not None:
            self._beating.cancel()
        beat = Heartbeat(self.run_id, self.report(stage, state, **fields), self.name, metrics)
        self._beating = self.process.spawn(self._beat(beat, follows="step" not in fields), f"{self.name} beats")

    async def _beat(self, beat: Heartbeat, *, follows: bool) -> None:
        while True:
            found: list[Outcome] = []
            await self._call(self.swarm.coordinator, beat, DEADLINE_S, found)
            if isinstance(found[0], Verdict):
                self.verdicts.append(found[0])
                if found[0].certificate and self.membership.hold(found[0].certificate) is not None:
                    self.node.show_certificate()
                if follows:
                    beat = replace(beat, report=replace(beat.report, step=found[0].step))
            await asyncio.sleep(BEAT_S)

    async def _call(self, target: Life | str, message: Message, deadline_s: float, found: list[Outcome]) -> None:
        try:
            found.append(await self.node.call(self._learn(target), message, deadline_s))
        except NetError as error:
            found.append(error)

    def _learn(self, target: Life | str) -> str:
        """The id of a target; of a daemon, its address too."""
        if isinstance(target, str):
            return target
        self.knows(target)
        return target.peer_id

    def knows(self, *targets: Life) -> None:
        """It learns where these daemons are."""
        for target in targets:
            self.host.learn([f"{target.machine.address}/p2p/{target.peer_id}"], of=target.peer_id)


class Deaf:
    """A receiver that drops everything."""

    def __init__(self) -> None:
        self._scratch = memoryview(bytearray(4096))
        self.is_closed = False
        self.num_bytes = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        """See `StreamReceiver`."""
        return self._scratch

    def buffer_updated(self, num_bytes: int) -> None:
        """See `StreamReceiver`."""
        self.num_bytes += num_bytes

    def stream_closed(self, error: Exception | None) -> None:
        """See `StreamReceiver`."""
        self.is_closed = True

    def pause_writing(self) -> None:
        """See `StreamReceiver`."""

    def resume_writing(self) -> None:
        """See `StreamReceiver`."""
