"""What a codec is, as plain data; `str()` of a spec is its canonical name (see names.py)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

CAST_FORMATS = ("fp32", "fp16", "bf16", "raw")
QUANT_BITS = (2, 3, 4, 6, 8)
VALUE_FORMATS = ("fp32", "fp16", "bf16", "int8")
FACTOR_FORMATS = ("fp32", "fp16", "bf16")
KEY_FORMATS = ("fp32", "fp16", "bf16", "quant8")
DEFAULT_GROUP = 128
MAX_GROUP = 65_528
MAX_RANK = 4096


@dataclass(frozen=True, slots=True)
class CastSpec:
    """Every number, in one number format."""

    format: str

    def __str__(self) -> str:
        return self.format


@dataclass(frozen=True, slots=True)
class QuantSpec:
    """Symmetric uniform quantization with one bf16 scale per `group` consecutive values."""

    bits: int
    group: int = DEFAULT_GROUP

    def __str__(self) -> str:
        return _join(f"quant{self.bits}", {"group": self.group} if self.group != DEFAULT_GROUP else {})


@dataclass(frozen=True, slots=True)
class MinMaxSpec:
    """Uniform quantization between the minimum and the maximum of the whole tensor."""

    bits: int

    def __str__(self) -> str:
        return f"minmax{self.bits}"


@dataclass(frozen=True, slots=True)
class TopKSpec:
    """The `percent` largest magnitudes of each row (last axis)."""

    percent: Fraction
    separate: bool = False
    values: str = "fp16"

    def kept_per_row(self, width: int) -> int:
        """How many of `width` values are kept: the nearest whole number (halves up), at least one."""
        if width == 0:
            return 0
        return max(1, int(self.percent * width / 100 + Fraction(1, 2)))

    def __str__(self) -> str:
        name = f"topk{_decimal(self.percent)}" + ("-separate" if self.separate else "")
        return _join(name, {"values": self.values} if self.values != "fp16" else {})


@dataclass(frozen=True, slots=True)
class LowRankSpec:
    """Two factors of rank `rank`, found by one power iteration from the sender's previous one."""

    rank: int
    factors: str = "fp16"

    def __str__(self) -> str:
        return _join(f"lowrank{self.rank}", {"factors": self.factors} if self.factors != "fp16" else {})


@dataclass(frozen=True, slots=True)
class FeedbackSpec:
    """Error feedback at the sender. Over low rank it is called lazy error propagation (`-lep`)."""

    inner: QuantSpec | TopKSpec | LowRankSpec
    carry: bool = False

    def __str__(self) -> str:
        name, options = _split(str(self.inner))
        name = f"{name}-lep" if isinstance(self.inner, LowRankSpec) else f"ef-{name}"
        return _join(name, options | ({"carry": ""} if self.carry else {}))


@dataclass(frozen=True, slots=True)
class EF21Spec:
    """Differences to the estimate that both ends of a link hold."""

    inner: QuantSpec | TopKSpec

    def __str__(self) -> str:
        return f"ef21-{self.inner}"


@dataclass(frozen=True, slots=True)
class AQSGDSpec:
    """Differences to what both ends hold of the same training sample; first visits go in the `key` format."""

    inner: QuantSpec | TopKSpec
    key: str = "fp16"

    def __str__(self) -> str:
        name, options = _split(f"aqsgd-{self.inner}")
        return _join(name, options | ({"key": self.key} if self.key != "fp16" else {}))


@dataclass(frozen=True, slots=True)
class CriticalSpec:
    """`inner` for messages that their receiver would wait for, fp32 for the others."""

    inner: LossySpec

    def __str__(self) -> str:
        name, options = _split(str(self.inner))
        return _join(name, options | {"critical": ""})


LossySpec = QuantSpec | MinMaxSpec | TopKSpec | LowRankSpec | FeedbackSpec
CodecSpec = CastSpec | LossySpec | EF21Spec | AQSGDSpec | CriticalSpec


@dataclass(frozen=True, slots=True)
class CodecPair:
    """What a boundary does in each direction."""

    forward: CodecSpec
    backward: CodecSpec

    def __str__(self) -> str:
        return f"{self.forward}/{self.backward}"


def sends_mask(spec: CodecSpec) -> bool:
    """True if the codec's forward messages come with a mask for the backward ones."""
    inner = spec.inner if isinstance(spec, FeedbackSpec) else spec
    return isinstance(inner, TopKSpec) and not inner.separate


def reuses_mask(spec: CodecSpec) -> bool:
    """True if the codec's backward messages need the forward mask."""
    inner = spec.inner if isinstance(spec, CriticalSpec) else spec
    return isinstance(inner, TopKSpec) and not inner.separate


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Name and options of a canonical name."""
    name, _, tail = text.partition(":")
    items = (item.partition("=") for item in tail.split(",") if item)
    return name, {key: value for key, _, value in items}


def _join(name: str, options: dict[str, object] | dict[str, str] | dict[str, int]) -> str:
    tail = ",".join(f"{key}={value}" if value != "" else key for key, value in options.items())
    return f"{name}:{tail}" if tail else name


def _decimal(percent: Fraction) -> str:
    return f"{float(percent):.2f}".rstrip("0").rstrip(".")
