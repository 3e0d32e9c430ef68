"""Errors of links and calls. Everything that `Link.call` and `Node.call` raise derives from `NetError`."""

from __future__ import annotations

from enum import StrEnum

from swarmtrain.errors import ExitCode
from swarmtrain.p2p.errors import NetError
from swarmtrain.wire.frames import RefusalPayload


class LinkClosed(NetError):
    """The link ended before the answer arrived.

    `request_sent` is False if no byte of the request was written: the peer cannot have begun it.
    """

    error_id = "ST-LINK-CLOSED"

    def __init__(self, message: str, *, request_sent: bool = True, fix: str = "") -> None:
        super().__init__(message, fix=fix)
        self.request_sent = request_sent


class PeerSilent(LinkClosed):
    """The peer has sent nothing for several keepalive intervals."""

    error_id = "ST-PEER-SILENT"


class LinkRefused(LinkClosed):
    """The other end takes no link with this one: this end is excluded from its run."""

    error_id = "ST-LINK-REFUSED"
    exit_code = ExitCode.REFUSED


class Violation(StrEnum):
    """The rule that the other end broke; also the label of its counter."""

    BAD_MAGIC = "bad-magic"  # the bytes do not begin a frame of this protocol
    WRONG_VERSION = "wrong-version"
    BAD_HEADER = "bad-header"  # the header's own checksum, its type or its length is wrong
    BAD_CHECKSUM = "bad-checksum"
    BAD_CONTROL = "bad-control"  # a control frame whose payload does not parse
    NO_HELLO = "no-hello"
    UNKNOWN_KIND = "unknown-kind"
    TOO_LARGE = "too-large"  # a message above the limit of its kind or of the link
    UNKNOWN_CALL = "unknown-call"
    OUT_OF_ORDER = "out-of-order"  # a frame that is not allowed in the state of its call
    OVER_CREDIT = "over-credit"  # more bytes than the receiver has granted
    NOT_READING = "not-reading"  # the peer sends requests and does not read the answers
    NO_PROOF = "no-proof"  # the other end does not have the run's secret
    BAD_CERTIFICATE = "bad-certificate"  # not of this run, of this peer, or in force
    STALLED = "stalled"  # a message was begun and not finished within its deadline


class ProtocolViolation(LinkClosed):
    """The other end broke the protocol, and this end closed the link."""

    error_id = "ST-PROTOCOL"

    def __init__(self, violation: Violation, detail: str, *, request_sent: bool = True) -> None:
        super().__init__(f"protocol violation ({violation.value}): {detail}", request_sent=request_sent)
        self.violation = violation
        self.detail = detail


class CallTimeout(NetError):
    """The deadline of a call passed without a final answer. The peer has been told to stop (CANCEL)."""

    error_id = "ST-CALL-TIMEOUT"


class MalformedAnswer(NetError):
    """The answer arrived complete but breaks the schema of its kind, or is of another kind than expected."""

    error_id = "ST-CALL-ANSWER"


class CallRefused(NetError):
    """The peer answered with a typed refusal.

    `code` is a refusal code. BUSY may carry a time to wait; a redirect carries the peer to call instead.
    """

    error_id = "ST-CALL-REFUSED"
    exit_code = ExitCode.REFUSED

    def __init__(
        self,
        code: str,
        text: str = "",
        *,
        retry_after_s: float = 0.0,
        redirect_to: str = "",
        stage: int | None = None,
    ) -> None:
        super().__init__(f"refused ({code}): {text}" if text else f"refused ({code})")
        self.code, self.text, self.retry_after_s = code, text, retry_after_s
        self.redirect_to, self.stage = redirect_to, stage

    @classmethod
    def of(cls, payload: RefusalPayload) -> CallRefused:
        """The error for a refusal that was received."""
        return cls(
            payload.code,
            payload.text,
            retry_after_s=payload.retry_after_s,
            redirect_to=payload.redirect_to,
            stage=payload.stage,
        )

    @property
    def payload(self) -> RefusalPayload:
        """The refusal as it was received."""
        return RefusalPayload(self.code, self.text, self.retry_after_s, self.redirect_to, self.stage)


class RefusalCode(StrEnum):
    """The codes that the link layer itself uses. Handlers may raise others."""

    BUSY = "busy"  # too many calls at once; try again after retry_after_s
    INTERNAL = "internal"  # the handler failed; the traceback is in its log
    MALFORMED = "malformed"  # the request arrived complete but breaks its schema
    CANCELLED = "cancelled"  # the answer to a cancel
    CLOSING = "closing"  # the peer takes no new calls
    EXCLUDED = "excluded"  # of a GOODBYE: the peer takes no link with this end


class Refusal(Exception):
    """Raised by a handler to answer its call with a typed refusal.

    `redirect_to` names the peer that takes the call instead; `stage` names the stage that could not serve it.
    """

    def __init__(
        self, code: str, text: str = "", retry_after_s: float = 0.0, *, redirect_to: str = "", stage: int | None = None
    ) -> None:
        super().__init__(f"{code}: {text}" if text else str(code))
        self.code, self.text, self.retry_after_s = str(code), text, retry_after_s
        self.redirect_to, self.stage = redirect_to, stage

    @classmethod
    def of(cls, payload: RefusalPayload) -> Refusal:
        """The refusal that passes another peer's refusal on."""
        return cls(
            payload.code, payload.text, payload.retry_after_s, redirect_to=payload.redirect_to, stage=payload.stage
        )

    @property
    def payload(self) -> RefusalPayload:
        """The refusal as it is sent."""
        return RefusalPayload(self.code, self.text, self.retry_after_s, self.redirect_to, self.stage)
