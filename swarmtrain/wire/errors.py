"""What can be wrong with received bytes, or with a message before it is sent."""

from __future__ import annotations

from swarmtrain.errors import ExitCode, SwarmtrainError


class WireError(SwarmtrainError):
    """Bytes that are not a message, or a message that breaks its own schema. Base of all errors of `wire`."""

    error_id = "ST-WIRE"
    exit_code = ExitCode.INTERNAL


class MalformedMessage(WireError):
    """Bytes that do not parse as a message at all."""

    error_id = "ST-WIRE-MALFORMED"


class TruncatedMessage(WireError):
    """The bytes end before the message does."""

    error_id = "ST-WIRE-TRUNCATED"


class ExtraBytes(WireError):
    """The message ends before the bytes do."""

    error_id = "ST-WIRE-EXTRA"


class UnknownKind(WireError):
    """A message kind that this end does not know."""

    error_id = "ST-WIRE-KIND"


class WrongVersion(WireError):
    """The other end speaks another version of the protocol, or another shape of this message."""

    error_id = "ST-WIRE-VERSION"
    exit_code = ExitCode.TOO_OLD


class MissingField(WireError):
    """A field of the schema is not there."""

    error_id = "ST-WIRE-MISSING"


class UnknownField(WireError):
    """There are more fields than the schema has."""

    error_id = "ST-WIRE-UNKNOWN-FIELD"


class WrongType(WireError):
    """A field holds a value of another type than the schema says."""

    error_id = "ST-WIRE-TYPE"


class OutOfRange(WireError):
    """A number outside its range, or not finite; bytes of a length that they cannot have."""

    error_id = "ST-WIRE-RANGE"


class TooLong(WireError):
    """A text, byte string, tuple, dictionary or blob that exceeds its limit."""

    error_id = "ST-WIRE-LENGTH"


class BadFrame(WireError):
    """A frame header or a control frame that cannot be right."""

    error_id = "ST-WIRE-FRAME"
