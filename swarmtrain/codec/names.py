"""Codec names: a short text that says everything a codec is, as in manifests and on the command line.

    fp32 fp16 bf16 raw            numbers as they are, in this format; raw (also fp64) keeps the tensor's own
    quant8  quant4:group=64       symmetric, 2, 3, 4, 6 or 8 bits, one scale per group
    minmax4                       between the tensor's smallest and largest value
    topk10  topk2.5:values=int8   this many percent of each row; backward reuses the forward mask
    topk10-separate               backward selects for itself
    lowrank8:factors=fp32         rank 8
    ef-topk10  lowrank8-lep       with the error fed back at the sender; `:carry` keeps it for ever, not two steps
    ef21-topk10                   differences to what the receiver already has; sticky routes only
    aqsgd-quant4:key=quant8       differences to what the receiver has of the same sample; sticky routes only
    …:critical                    only if the receiver would wait for the message, else fp32

Options are joined by commas. `forward/backward` names a pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from swarmtrain.codec.errors import CodecSpecError
from swarmtrain.codec.spec import (
    CAST_FORMATS,
    DEFAULT_GROUP,
    FACTOR_FORMATS,
    KEY_FORMATS,
    MAX_GROUP,
    MAX_RANK,
    QUANT_BITS,
    VALUE_FORMATS,
    AQSGDSpec,
    CastSpec,
    CodecPair,
    CodecSpec,
    CriticalSpec,
    EF21Spec,
    FeedbackSpec,
    LowRankSpec,
    MinMaxSpec,
    QuantSpec,
    TopKSpec,
    reuses_mask,
    sends_mask,
)

ALLOWED = (
    "allowed: fp32, fp16, bf16, raw; quantB and minmaxB with B of 2, 3, 4, 6, 8; topkP and topkP-separate with P "
    "percent; lowrankR and lowrankR-lep; ef-, ef21- or aqsgd- before quantB or topkP. Options after a colon: "
    "group=N (quant), values=fp32|fp16|bf16|int8 (topk), factors=fp32|fp16|bf16 (lowrank), "
    "key=fp32|fp16|bf16|quant8 (aqsgd), carry (ef, lep), critical"
)


def parse_spec(text: str) -> CodecSpec:
    """The codec that `text` names. `str(parse_spec(text))` is its canonical name. Raises CodecSpecError."""
    name, options = _split(text.strip())
    critical = _flag(options, "critical", text)
    spec = _parse_name(name, options, text)
    if options:
        raise _error(text, f"has no option {sorted(options)[0]!r} here")
    if not critical:
        return spec
    if isinstance(spec, CastSpec | EF21Spec | AQSGDSpec | CriticalSpec):
        raise _error(text, "cannot be left out for single messages (critical)")
    return CriticalSpec(spec)


def parse_pair(text: str) -> CodecPair:
    """`forward/backward`, or one name for both directions.

    A single name stands for what its paper does: lowrank compresses gradients only (forward fp32), aqsgd sends
    gradients as quant8, ef-topk keeps its residual for activations and reuses the mask for gradients.
    """
    forward_text, slash, backward_text = text.partition("/")
    forward = parse_spec(forward_text)
    pair = CodecPair(forward, parse_spec(backward_text)) if slash else _default_pair(forward)
    if isinstance(pair.backward, AQSGDSpec):
        raise _error(text, "aqsgd is for activations: the same sample's gradient changes too much between visits")
    if reuses_mask(pair.backward) and not sends_mask(pair.forward):
        raise _error(text, f"the forward direction has no mask that {pair.backward} could reuse: use topkP-separate")
    return pair


def _default_pair(spec: CodecSpec) -> CodecPair:
    plain = spec.inner if isinstance(spec, CriticalSpec) else spec
    inner = plain.inner if isinstance(plain, FeedbackSpec) else plain
    if isinstance(inner, LowRankSpec) or isinstance(spec, CriticalSpec):
        return CodecPair(CastSpec("fp32"), spec)
    if isinstance(spec, AQSGDSpec):
        return CodecPair(spec, QuantSpec(8))
    if isinstance(plain, FeedbackSpec):
        return CodecPair(spec, inner)
    return CodecPair(spec, spec)


def _parse_name(name: str, options: dict[str, str], text: str) -> CodecSpec:
    if name == "fp64":
        name = "raw"
    if name in CAST_FORMATS:
        return CastSpec(name)
    for prefix, build in _PREFIXES.items():
        if name.startswith(prefix):
            return build(name.removeprefix(prefix), options, text)
    if name.endswith("-lep"):
        carry = _flag(options, "carry", text)
        return FeedbackSpec(_parse_lowrank(name.removesuffix("-lep"), options, text), carry)
    if name.startswith("lowrank"):
        return _parse_lowrank(name, options, text)
    if name.startswith("minmax"):
        return MinMaxSpec(_bits(name.removeprefix("minmax"), text))
    return _parse_contraction(name, options, text)


def _parse_feedback(name: str, options: dict[str, str], text: str) -> CodecSpec:
    carry = _flag(options, "carry", text)
    return FeedbackSpec(_parse_contraction(name, options, text), carry)


def _parse_ef21(name: str, options: dict[str, str], text: str) -> CodecSpec:
    return EF21Spec(_without_mask(_parse_contraction(name, options, text)))


def _parse_aqsgd(name: str, options: dict[str, str], text: str) -> CodecSpec:
    key = _choice(options, "key", KEY_FORMATS, "fp16", text)
    return AQSGDSpec(_without_mask(_parse_contraction(name, options, text)), key)


_PREFIXES: dict[str, Callable[[str, dict[str, str], str], CodecSpec]] = {
    "ef-": _parse_feedback,
    "ef21-": _parse_ef21,
    "aqsgd-": _parse_aqsgd,
}


def _parse_contraction(name: str, options: dict[str, str], text: str) -> QuantSpec | TopKSpec:
    """quant or topk: the codecs whose error is never larger than the tensor, which feedback needs."""
    if name.startswith("quant"):
        group = _whole_number(options.pop("group", str(DEFAULT_GROUP)), text)
        if group % 8 or not 8 <= group <= MAX_GROUP:
            raise _error(text, f"the group must be a multiple of 8 between 8 and {MAX_GROUP}")
        return QuantSpec(_bits(name.removeprefix("quant"), text), group)
    if name.startswith("topk"):
        separate = name.endswith("-separate")
        percent = _percent(name.removeprefix("topk").removesuffix("-separate"), text)
        return TopKSpec(percent, separate, _choice(options, "values", VALUE_FORMATS, "fp16", text))
    raise _error(text, "is not a codec")


def _without_mask(spec: QuantSpec | TopKSpec) -> QuantSpec | TopKSpec:
    """A difference has no mask worth reusing; one spelling for both."""
    return replace(spec, separate=False) if isinstance(spec, TopKSpec) else spec


def _parse_lowrank(name: str, options: dict[str, str], text: str) -> LowRankSpec:
    if not name.startswith("lowrank"):
        raise _error(text, "-lep goes with lowrankR")
    rank = _whole_number(name.removeprefix("lowrank"), text)
    if not 1 <= rank <= MAX_RANK:
        raise _error(text, f"the rank must lie between 1 and {MAX_RANK}")
    return LowRankSpec(rank, _choice(options, "factors", FACTOR_FORMATS, "fp16", text))


def _bits(digits: str, text: str) -> int:
    bits = _whole_number(digits, text)
    if bits not in QUANT_BITS:
        raise _error(text, "the bits must be 2, 3, 4, 6 or 8")
    return bits


def _percent(digits: str, text: str) -> Fraction:
    if not re.fullmatch(r"\d{1,3}(\.\d{1,2})?", digits, re.ASCII):
        raise _error(text, "the percentage must be a number such as 10 or 2.5")
    percent = Fraction(digits)
    if not 0 < percent <= 100:
        raise _error(text, "the percentage must lie above 0 and be at most 100")
    return percent


def _whole_number(digits: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,6}", digits, re.ASCII):
        raise _error(text, f"{digits!r} is not a whole number")
    return int(digits)


def _choice(options: dict[str, str], key: str, allowed: tuple[str, ...], default: str, text: str) -> str:
    value = options.pop(key, default)
    if value not in allowed:
        raise _error(text, f"{key} must be one of {', '.join(allowed)}")
    return value


def _flag(options: dict[str, str], key: str, text: str) -> bool:
    value = options.pop(key, None)
    if value:
        raise _error(text, f"{key} takes no value")
    return value is not None


def _split(text: str) -> tuple[str, dict[str, str]]:
    """Name and options of `name:key=value,flag`. Raises CodecSpecError for an option given twice."""
    name, _, tail = text.partition(":")
    options: dict[str, str] = {}
    for item in tail.split(",") if tail else ():
        key, _, value = item.partition("=")
        if key in options:
            raise _error(text, f"the option {key!r} is given twice")
        options[key] = value
    return name, options


def _error(text: str, problem: str) -> CodecSpecError:
    return CodecSpecError(f"codec {text!r}: {problem}", fix=ALLOWED)
