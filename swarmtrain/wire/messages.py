"""Every message of the step protocol, in the order in which a microbatch meets them.

Coordinator to stage 0, and each stage to the next, speak the same `Work`: the coordinator is the caller of stage 0.
Every message that belongs to a step names the run, the coordinator's term and the step; a peer that disagrees with one
of them refuses with a code of `Code`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from swarmtrain.units import MIB
from swarmtrain.wire.certificates import Credential, Kind
from swarmtrain.wire.field_types import (
    Assignment,
    Attempt,
    Digest,
    ExclusionNumber,
    Incarnation,
    Loss,
    MicrobatchIndex,
    PeerId,
    Rate,
    Round,
    RunId,
    SealDigest,
    Seconds,
    Signature,
    StageIndex,
    Step,
    Term,
    Text,
)
from swarmtrain.wire.peer_report import PeerReport
from swarmtrain.wire.schema import AllowNonFinite, Blob, Lengths, MaxLength, Message, Priority, Range, Registry, message

REDONE = struct.Struct("<QII")  # step, microbatch, round
MAX_REDONE = 1 << 15  # of the open steps
MAX_CHECKED = 1024  # microbatches in one check
MAX_MEASURED_BYTES = 1 << 20  # that a measurement of a line costs, each way
MAX_EMPTY_STAGES = 16  # named in a verdict; work does not get past the first of them anyway
MAX_EXCLUSIONS_TOLD = 128  # in one verdict; a peer that does not know as many asks again at once


class Code(StrEnum):
    """Why a peer refuses a message. `busy` and `closing` come from the link layer with the same meaning."""

    WRONG_RUN = "wrong-run"
    WRONG_STAGE = "wrong-stage"  # the peer serves another stage
    OLD_TERM = "old-term"  # a newer coordinator is in charge
    NOT_COORDINATOR = "not-coordinator"  # only the run's coordinator may say this
    BEHIND = "behind"  # the peer has not reached this step yet
    AHEAD = "ahead"  # this step is over
    STALE_BASIS = "stale-basis"  # the sender's subspace basis is another one
    NEED_KEYFRAME = "need-keyframe"  # a message that builds on a state that is not here: send it whole
    BAD_TENSOR = "bad-tensor"  # wrong shape, damaged, or not finite
    BAD_ROSTER = "bad-roster"  # not an all-reduce of this stage
    NOT_SERVING = "not-serving"  # joining, paused or draining
    BUSY = "busy"
    REDIRECTED = "redirected"  # another peer of the stage has stolen it: `redirect_to` names the thief
    UNPREPARED = "unprepared"  # apply came without a prepared sum
    UNKNOWN = "unknown"  # nothing is known of what was asked for
    NOBODY = "nobody"  # no peer of `stage`, further downstream, did it in time
    NOT_ADMITTED = "not-admitted"  # the caller has no certificate that allows this
    DIVERGED = "diverged"  # training itself produced numbers that are not finite


@dataclass(frozen=True, slots=True)
class Hop:
    """The peer that served one stage of a microbatch. A restarted process is another incarnation, with no ledger."""

    stage: StageIndex
    peer_id: PeerId
    incarnation: Incarnation


Hops = Annotated[tuple[Hop, ...], MaxLength(1024)]


@message(kind="work", priority=Priority.BOUNDARY)
class Work(Message):
    """One microbatch for one stage. Answer: `Done`, when all stages downstream are done. Progress: `Progress`."""

    run: RunId
    term: Term
    stage: StageIndex
    step: Step
    microbatch: MicrobatchIndex
    basis_epoch: Step
    evaluate: bool  # forward only: a validation microbatch
    hints: Hops  # the peers downstream that are known to have taken it
    tokens: Annotated[Blob, MaxLength(16 * MIB)]
    boundary: Annotated[Blob, MaxLength(256 * MIB)]  # empty for stage 0
    backlog_s: Seconds = 0.0  # other work that the caller has to do, when it sends this
    is_stolen: bool = False  # a peer of the stage was redirected from it: it is not stolen again
    round: Round = 0  # how often it was begun anew on all stages, because work on it was found to be wrong
    signature: Signature = b""  # of what is sent, by its sender: chain/signatures.py


@message(kind="done", priority=Priority.BOUNDARY)
class Done(Message):
    """The answer to `Work`: the gradient for the caller's output, the loss, the route, and where the time went."""

    loss: Loss
    route: Hops
    queue_s: Seconds
    forward_s: Seconds
    backward_s: Seconds
    gradient: Annotated[Blob, MaxLength(256 * MIB)]  # empty for stage 0 and for validation
    load_s: Seconds = 0.0  # both passes of everything that the callee holds now
    waited_s: Seconds = 0.0  # in queues and at their limits, here and downstream, detours of stolen work included
    signature: Signature = b""  # of the gradient, by the callee


@message(kind="progress", priority=Priority.CONTROL)
class Progress(Message):
    """The callee's forward is done, and the next stage is asked. Flows upstream, again with every new hop, so that a
    caller's hints are fresh when its callee dies."""

    hops: Hops  # the peers that have taken the microbatch, from the callee downstream, as far as known
    load_s: Seconds = 0.0  # both passes of everything that the callee holds now


@message(kind="steal_request", priority=Priority.CONTROL)
class StealRequest(Message):
    """From a thief, a peer that runs out of work, to a victim of the same stage. Answer: `StealReply`."""

    run: RunId
    stage: StageIndex
    load_s: Seconds  # both passes of everything that it holds, most of which is downstream now
    service_s: Seconds  # both passes of one microbatch


@message(kind="steal_reply", priority=Priority.CONTROL)
class StealReply(Message):
    """Whether a microbatch was stolen. Its caller sends it, unless it chooses another peer."""

    is_stolen: bool


@message(kind="replay", priority=Priority.CONTROL)
class Replay(Message):
    """To a peer that has finished a microbatch: give it to the next stage again, from the ledger. Answer: `Done`."""

    run: RunId
    term: Term
    step: Step
    microbatch: MicrobatchIndex
    hints: Hops
    round: Round = 0


@message(kind="heartbeat", priority=Priority.CONTROL)
class Heartbeat(Message):
    """A peer tells the coordinator that it lives, every two seconds. Answer: `Verdict`."""

    run: RunId
    report: PeerReport  # without addresses: the coordinator has a link to it
    name: Annotated[str, MaxLength(64)] = ""  # its owner's, for the overview
    metrics: Annotated[str, MaxLength(80)] = ""  # HOST:PORT where its metrics can be read, or empty
    spent: Annotated[tuple[Seconds, ...], MaxLength(5)] = ()  # seconds: compute, reduce, queue, wire, idle
    exclusions: ExclusionNumber = 0  # the last one that it has heard of in this term
    numeric_class: Digest = ""  # peers of a stage with the same one compute the same bits


@message(kind="seek_stage", priority=Priority.CONTROL)
class SeekStage(Message):
    """A peer that may host any of `stages` asks where it is needed most. Answer: `StageFound`."""

    run: RunId
    stages: Annotated[tuple[StageIndex, ...], MaxLength(1024)]


@message(kind="stage_found", priority=Priority.CONTROL)
class StageFound(Message):
    """Where the peer should go; the coordinator counts on it for a while."""

    stage: StageIndex
    reason: Text


@message(kind="ask_move", priority=Priority.CONTROL)
class AskMove(Message):
    """A serving peer asks for permission to leave its stage for another one. Answer: `MoveAnswered`."""

    run: RunId
    assignment: Assignment
    source: StageIndex
    target: StageIndex


@message(kind="move_answered", priority=Priority.CONTROL)
class MoveAnswered(Message):
    """Permission to leave, or why not."""

    granted: bool
    reason: Text


class Directive(StrEnum):
    """What the coordinator wants of a peer."""

    SERVE = "serve"
    SYNC = "sync"  # fetch the state of `sync_step` first
    WAIT = "wait"  # a state to fetch will be there soon
    LEAVE = "leave"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """What a volunteer sees of the run. 0: not known yet."""

    loss: Annotated[float, Range(0.0, 1e9)] = 0.0  # of the last step
    tokens_per_s: Rate = 0.0  # over the last step
    left_s: Seconds = 0.0  # until its last step, at the pace of the last ones; while it trains


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A peer is excluded from the run, or not any more. See chain/exclusions.py."""

    number: ExclusionNumber
    peer_id: PeerId
    is_lifted: bool = False


@message(kind="verdict", priority=Priority.CONTROL)
class Verdict(Message):
    """What the coordinator wants of the peer, and where the run stands. `reason` is for people."""

    term: Term
    step: Step
    directive: Directive
    reason: Text
    sync_step: Step  # for SYNC: which state to fetch, its digest, and from whom
    sync_digest: Digest
    donors: Annotated[tuple[PeerId, ...], MaxLength(64)]
    empty_stages: Annotated[tuple[StageIndex, ...], MaxLength(MAX_EMPTY_STAGES)] = ()  # the first that lack peers
    is_banned: bool = False  # calls to the peer failed: the coordinator sends it no work for a while
    progress: RunProgress = RunProgress()
    credit: Annotated[int, Range(0, 2**53)] = 0  # decided microbatches that count as this peer's, on all its stages
    exclusions: Annotated[tuple[Exclusion, ...], MaxLength(MAX_EXCLUSIONS_TOLD)] = ()  # that the peer has not heard of
    credit_s: Seconds = 0.0  # of the steps in which it had a part
    certificate: Credential = b""  # a new one in place of the peer's
    redone: Annotated[bytes, MaxLength(MAX_REDONE * REDONE.size)] = b""  # REDONE of microbatches that are begun anew
    is_only: bool = False  # no other peer that stays has its state, nor a checkpoint: the run would lose steps with it


@message(kind="fetch_receipt", priority=Priority.CONTROL)
class FetchReceipt(Message):
    """Asks the coordinator for the caller's receipt. Answer: `ReceiptIssued`."""

    run: RunId


@message(kind="receipt_issued", priority=Priority.CONTROL)
class ReceiptIssued(Message):
    """What counts as the caller's own, signed by the run's key: see chain/receipt.py."""

    body: Annotated[str, MaxLength(32 * 1024)]
    signature: Annotated[bytes, MaxLength(128)]


@message(kind="dial_back", priority=Priority.CONTROL)
class DialBack(Message):
    """Asks the coordinator to open a connection to the caller's own address, as it sees it, at this port. Answer:
    `DialedBack`."""

    run: RunId
    port: Annotated[int, Range(1024, 65535)]


@message(kind="dialed_back", priority=Priority.CONTROL)
class DialedBack(Message):
    """What was dialed, and why it did not answer; empty if it did."""

    address: Annotated[str, MaxLength(256)]
    error: Text
    measured_bytes: Annotated[int, Range(0, MAX_MEASURED_BYTES)]  # that a `measure_line` may have each way; 0: none


@message(kind="measure_line", priority=Priority.STATE)
class MeasureLine(Message):
    """Bytes that mean nothing, up; as many as are wanted, down. After a `dial_back` only. Answer: `LineMeasured`."""

    run: RunId
    wanted_bytes: Annotated[int, Range(0, MAX_MEASURED_BYTES)]
    filling: Annotated[Blob, MaxLength(MAX_MEASURED_BYTES)]


@message(kind="line_measured", priority=Priority.STATE)
class LineMeasured(Message):
    """The bytes that were wanted."""

    filling: Annotated[Blob, MaxLength(MAX_MEASURED_BYTES)]


@message(kind="enrol", priority=Priority.CONTROL)
class Enrol(Message):
    """A newcomer asks the coordinator for a certificate. Answer: `Enrolled`."""

    run: RunId
    name: Annotated[str, MaxLength(64)]
    kind: Kind = Kind.MEMBER
    token_number: ExclusionNumber = 0
    token_proof: Annotated[bytes, Lengths((0, 32))] = b""  # that it has the token, for its own peer id
    challenge: Annotated[bytes, MaxLength(32)] = b""  # as a former answer told
    work: Annotated[bytes, MaxLength(256)] = b""  # its solution


@message(kind="enrolled", priority=Priority.CONTROL)
class Enrolled(Message):
    """The certificate; or what must be done for one: solve the challenge, or ask again while an operator decides."""

    certificate: Credential = b""
    challenge: Annotated[bytes, MaxLength(32)] = b""
    difficulty: Annotated[int, Range(0, 64)] = 0  # zero bits per puzzle
    retry_after_s: Seconds = 0.0


@message(kind="fetch_run", priority=Priority.CONTROL)
class FetchRun(Message):
    """Asks for the run's definition. Answer: `RunOffer`."""

    run: RunId


@message(kind="run_offer", priority=Priority.CONTROL)
class RunOffer(Message):
    """The manifest, signed by the run's key, with the digests of what every peer derives from its seed."""

    manifest: Annotated[str, MaxLength(256 * 1024)]
    basis_digest: Digest
    table_digest: Digest
    signature: Annotated[bytes, MaxLength(128)]
    version: Annotated[str, MaxLength(32)]


@dataclass(frozen=True, slots=True)
class RosterEntry:
    """A peer in an all-reduce, the microbatches that it answers for, and the share of the sum that it owns."""

    peer_id: PeerId
    incarnation: Incarnation
    microbatches: Annotated[bytes, MaxLength(4 * MIB)]  # uint32, little endian, ascending
    owned: Annotated[int, Range(0, 2**48)]  # elements of the flat gradient, in roster order of its group
    group: Annotated[int, Range(0, 4095)] = 0  # see reduce/groups.py


@message(kind="prepare", priority=Priority.CONTROL)
class Prepare(Message):
    """All-reduce the gradient of a step inside one stage. Answer: `Prepared` or `Unprepared`."""

    run: RunId
    term: Term
    stage: StageIndex
    step: Step
    attempt: Attempt
    roster: Annotated[tuple[RosterEntry, ...], MaxLength(4096)]
    # Tied embeddings: the peers of the first and of the last stage all-reduce both sides' gradient in one group.
    fused: Annotated[tuple[RosterEntry, ...], MaxLength(8192)] = ()
    compress: bool = False  # use the run's gradient codec in this all-reduce


@message(kind="preparing", priority=Priority.CONTROL)
class Preparing(Message):
    """Progress of a `Prepare`, every few seconds: how much has come, and whom this peer waits for."""

    moved_bytes: Annotated[int, Range(0, 2**60)]  # received from the others of the roster in this attempt
    is_computing: bool  # it is this peer's device that is at work
    waits_for: Annotated[tuple[PeerId, ...], MaxLength(16)] = ()  # some of them
    lacks: Annotated[int, Range(0, 4)] = 0  # what they owe it: `reduce.all_reduce.Lacks`


@message(kind="prepared", priority=Priority.CONTROL)
class Prepared(Message):
    """The reduced sum is at hand: its squared norm and digest."""

    squared_norm: Annotated[float, Range(0.0, 1e100), AllowNonFinite()]  # not finite: training diverged
    digest: Digest
    basis: Digest = ""  # from the last stage, when the subspace moves at this step: of the new basis
    share: Digest = ""  # of this peer's own part of the sum, before it knows whether that is checked
    ranges: Annotated[bytes, MaxLength(16 * 64)] = b""  # where there is one owner for each range: digests of their sums


@message(kind="unprepared", priority=Priority.CONTROL)
class Unprepared(Message):
    """The books do not balance here, or the all-reduce failed."""

    missing: Annotated[bytes, MaxLength(4 * MIB)]  # microbatches the roster names and the ledger lacks
    suspects: Annotated[tuple[PeerId, ...], MaxLength(4096)]  # peers that did not deliver their shares
    reason: Text
    refused_by: Annotated[tuple[PeerId, ...], MaxLength(16)] = ()  # they took no share; may have given up the attempt


@message(kind="reduce_share", priority=Priority.ALL_REDUCE)
class ReduceShare(Message):
    """Reduce-scatter: a share of one piece of the sum, to its owner. Answer: `ReducedPiece`, when all shares are in."""

    run: RunId
    term: Term
    stage: StageIndex
    step: Step
    attempt: Attempt
    piece: Annotated[int, Range(0, 2**31)]
    values: Annotated[Blob, MaxLength(32 * MIB)]  # empty from a peer that has no work in this step
    lane: Annotated[int, Range(0, 2)] = 0  # which all-reduce of an attempt: `reduce.all_reduce.Lane`
    part: Annotated[int, Range(-1, 4095)] = -1  # from one owner to another: its group's sum of this part of the piece


@message(kind="reduced_piece", priority=Priority.ALL_REDUCE)
class ReducedPiece(Message):
    """All-gather: the reduced piece, the same bytes for every member."""

    values: Annotated[Blob, MaxLength(32 * MIB)]


@message(kind="apply", priority=Priority.CONTROL)
class Apply(Message):
    """The decision, already in the journal: apply the prepared sum. Answer: `Applied`."""

    run: RunId
    term: Term
    step: Step
    digest: Digest  # of the stage's reduced sum
    scale: float
    learning_rate: float
    snapshot: bool  # keep a copy of the state after this step for a checkpoint
    basis: Digest = ""  # the subspace moves at this step, to the basis with this digest
    basis_donors: Annotated[tuple[PeerId, ...], MaxLength(64)] = ()  # peers that have it


@message(kind="applied", priority=Priority.CONTROL)
class Applied(Message):
    """The state after the step."""

    step: Step
    state_digest: Digest


@message(kind="fetch_basis", priority=Priority.CONTROL)
class FetchBasis(Message):
    """The basis to which the subspace moves when `step` is applied. Answer: `Basis`."""

    run: RunId
    step: Step


@message(kind="basis", priority=Priority.STATE)
class Basis(Message):
    """U, row by row, fp32."""

    values: Annotated[Blob, MaxLength(256 * MIB)]


@message(kind="fetch_state", priority=Priority.STATE)
class FetchState(Message):
    """One chunk of a snapshot. Answer: `StateChunk`."""

    run: RunId
    stage: StageIndex
    step: Step
    chunk: Annotated[int, Range(0, 2**31)]


@message(kind="state_chunk", priority=Priority.STATE)
class StateChunk(Message):
    """Bytes of a state."""

    values: Annotated[Blob, MaxLength(8 * MIB)]


@message(kind="fetch_digests", priority=Priority.CONTROL)
class FetchDigests(Message):
    """The digests of all chunks of a state. Answer: `ChunkDigests`."""

    run: RunId
    stage: StageIndex
    step: Step


@message(kind="chunk_digests", priority=Priority.STATE)
class ChunkDigests(Message):
    """SHA-256 of every chunk, one after the other; together they hash to the state's digest."""

    basis_epoch: Step
    digests: Annotated[Blob, MaxLength(16 * MIB)]


@message(kind="fetch_seals", priority=Priority.CONTROL)
class FetchSeals(Message):
    """What a peer has received and sent for these microbatches, sealed before it can know which are checked.
    Answer: `Seals`."""

    run: RunId
    term: Term
    stage: StageIndex
    step: Step
    microbatches: Annotated[bytes, MaxLength(4 * MIB)]  # uint32, little endian


@message(kind="seals", priority=Priority.CONTROL)
class Seals(Message):
    """One seal (`chain/seals.py`) for each microbatch that was asked for; zeros for one that is not there."""

    seals: Annotated[Blob, MaxLength(64 * MIB)]
    losses: Annotated[bytes, MaxLength(8 * MIB)] = b""  # from the last stage, which alone knows them: float64


class Way(StrEnum):
    """Which way a tensor was sent."""

    FORWARD = "forward"  # to the next stage
    BACKWARD = "backward"


@message(kind="fetch_proof", priority=Priority.CONTROL)
class FetchProof(Message):
    """To a peer that has received another tensor than its neighbour says that it sent: who has signed it?
    Answer: `Proof`."""

    run: RunId
    term: Term
    stage: StageIndex
    step: Step
    microbatch: MicrobatchIndex
    way: Way


@message(kind="proof", priority=Priority.CONTROL)
class Proof(Message):
    """The sender's signature, as it came with the tensor."""

    signer: PeerId
    signature: Signature


class Kept(StrEnum):
    """Which tensor of a ledger's entry is wanted."""

    OUTPUT = "output"  # what was sent to the next stage
    SENT_GRADIENT = "sent-gradient"  # what was sent to the stage before


@message(kind="fetch_kept", priority=Priority.CONTROL)
class FetchKept(Message):
    """From a peer that checks another one, to that one's neighbours: a tensor that they keep. Answer: `KeptTensor`."""

    run: RunId
    term: Term
    stage: StageIndex  # of the peer that is asked
    step: Step
    microbatch: MicrobatchIndex
    round: Round
    kept: Kept


@message(kind="kept_tensor", priority=Priority.ALL_REDUCE)
class KeptTensor(Message):
    """The bytes as they have travelled."""

    values: Annotated[Blob, MaxLength(256 * MIB)]


@dataclass(frozen=True, slots=True)
class Case:
    """One microbatch that is checked, and where its tensors are: never at the peer that is checked."""

    microbatch: MicrobatchIndex
    round: Round
    before: PeerId  # has the input; empty on stage 0
    input: SealDigest
    after: PeerId  # has the gradient of the output; empty on the last stage
    gradient: SealDigest


@message(kind="check", priority=Priority.CONTROL)
class Check(Message):
    """From the coordinator: compute what another peer of your stage has computed. Answer: `Checked`."""

    run: RunId
    term: Term
    stage: StageIndex
    step: Step
    cases: Annotated[tuple[Case, ...], MaxLength(MAX_CHECKED)]
    tokens: Annotated[Blob, MaxLength(16 * MIB)]  # of all cases, one after the other
    adds_up: bool  # their gradients are added up, too


@message(kind="checked", priority=Priority.CONTROL)
class Checked(Message):
    """What the checker has computed."""

    seals: Annotated[bytes, MaxLength(MAX_CHECKED * 64)]  # of what it would have sent
    share: Digest  # of the sum of all cases' gradients; empty if it was not asked for


@message(kind="leave", priority=Priority.CONTROL)
class Leave(Message):
    """The run is over, or this peer is not wanted any more."""

    run: RunId
    term: Term
    reason: Text


@message(kind="resync", priority=Priority.CONTROL)
class Resync(Message):
    """This peer's state is not its stage's: it takes no more work until it has fetched the state again."""

    run: RunId
    term: Term
    reason: Text


@message(kind="acknowledged", priority=Priority.CONTROL)
class Acknowledged(Message):
    """Nothing more to say."""

    note: Text


MESSAGES = Registry(
    Work,
    Done,
    Progress,
    StealRequest,
    StealReply,
    Replay,
    Heartbeat,
    Verdict,
    FetchReceipt,
    ReceiptIssued,
    DialBack,
    DialedBack,
    MeasureLine,
    LineMeasured,
    SeekStage,
    StageFound,
    AskMove,
    MoveAnswered,
    Enrol,
    Enrolled,
    FetchRun,
    RunOffer,
    Prepare,
    Preparing,
    Prepared,
    Unprepared,
    ReduceShare,
    ReducedPiece,
    Apply,
    Applied,
    FetchBasis,
    Basis,
    FetchState,
    StateChunk,
    FetchDigests,
    ChunkDigests,
    FetchSeals,
    Seals,
    FetchProof,
    Proof,
    FetchKept,
    KeptTensor,
    Check,
    Checked,
    Leave,
    Resync,
    Acknowledged,
)
