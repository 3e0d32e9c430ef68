"""What can go wrong between a tensor and its bytes. Each error says whether asking again can help."""

from __future__ import annotations

from swarmtrain.errors import ExitCode, SwarmtrainError


class CodecError(SwarmtrainError):
    """Base of all codec errors."""

    error_id = "ST-CODEC"
    exit_code = ExitCode.INTERNAL


class CodecSpecError(CodecError):
    """A codec name that does not parse, or parameters out of range. The message says what is allowed."""

    error_id = "ST-CODEC-SPEC"
    exit_code = ExitCode.USAGE


class CorruptPayload(CodecError):
    """Bytes that no encoder wrote: cut, flipped, over the caller's limits, or inconsistent. Ask for the same bytes."""

    error_id = "ST-CODEC-CORRUPT"


class UnknownCodec(CodecError):
    """An intact payload of a codec or format version that this build does not know."""

    error_id = "ST-CODEC-UNKNOWN"
    exit_code = ExitCode.TOO_OLD


class NonFiniteTensor(CodecError):
    """The tensor holds NaN or infinity, or does not fit the number format. Nothing was encoded, no state changed."""

    error_id = "ST-CODEC-NONFINITE"
    exit_code = ExitCode.DIVERGED


class NeedAux(CodecError):
    """The payload refers to a forward mask that is missing or another one. Ask for it inline (`inline_aux`)."""

    error_id = "ST-CODEC-AUX"

    def __init__(self, digest: bytes, message: str = "") -> None:
        super().__init__(
            message or f"this message needs the forward mask {digest.hex() or '(none given)'}",
            fix="ask the sender for the message with its mask inline",
        )
        self.digest = digest


class NeedKeyframe(CodecError):
    """The payload is a change to a state that this side does not hold. Abort the message and encode it again."""

    error_id = "ST-CODEC-KEYFRAME"

    def __init__(self, wanted: bytes, message: str = "") -> None:
        super().__init__(
            message or f"this message builds on the state {wanted.hex()}, which is not held here",
            fix="abort the message and encode it again: the next one is a key-frame",
        )
        self.wanted = wanted
