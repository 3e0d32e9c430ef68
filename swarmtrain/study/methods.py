"""Names of methods: text that describes what a study compares, and becomes a manifest.

    dense  subspace  projected  learned  matched     boundary kinds; a number is the width k, as in subspace16
    subspace8-tracked50-rate2                        with the subspace moved every 50 steps, at this boundary.track_rate
    projected4-lr0.5  dense-steps60                  with half the learning rate; with a schedule of 60 steps
    subspace8-muon0.02  dense-adamw4e-3              with this optimizer, at this learning rate
    subspace8-lowrank100  dense-int8                 gradients reduced with this codec
    subspace8-lowrank100-replicas2                   … of two peers in each stage
    dense-rounded  subspace8-signs-rounded           computed in bf16; with a token table of signs
    fp16  quant4  topk10  ef21-topk10  lowrank8-lep  codecs (docs/codecs.md), on a dense boundary
    quant4/quant8                                    forward and backward apart
    subspace+quant8  learned16+quant4/quant8         a codec on another boundary
    lowrank4-lep:critical@4                          messages are critical in every fourth step only

`matched` is the subspace with boundary.match_parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from swarmtrain.boundary import codec_pair
from swarmtrain.codec import parse_pair
from swarmtrain.codec.errors import CodecSpecError
from swarmtrain.errors import UsageError
from swarmtrain.reduce.coding import gradient_spec
from swarmtrain.run.manifest import OPTIMIZER_KINDS, Manifest, parse_manifest

_KIND = re.compile(r"(dense|subspace|projected|learned|matched)(\d{1,5})?((?:-[a-z]+(?:[0-9.]+(?:e-\d)?)?)*)", re.ASCII)
_CHANGE = re.compile(
    r"-(?:(tracked|steps|replicas|bf|int|topk|powersgd|lowrank)(\d{1,6})"
    r"|(rate|lr|muon|adamw)(\d{1,4}(?:\.\d{1,6})?(?:e-\d)?)|(signs|rounded)(?![a-z0-9.])())",
    re.ASCII,
)
_REDUCE_CODECS = ("bf", "int", "topk", "powersgd", "lowrank")  # before their number
_MAX_REPLICAS = 64
_EVERY = re.compile(r"(.*:(?:.*,)?critical)@(\d{1,6})", re.ASCII)
_OPTION = re.compile(r"(carry|critical(@\d+)?|(group|values|factors|key)=[a-z0-9]+)", re.ASCII)
_ALLOWED = (
    "a method is dense, subspace, projected, learned or matched (a number after it is k; -trackedN moves the subspace "
    "every N steps, -rateX that far; -lrX multiplies the learning rate, -stepsN trains N steps, -muonX and -adamwX "
    "train with that optimizer at the learning rate X, -int8, -topkN, -powersgdN, -lowrankN reduce gradients with that "
    "codec, -replicasN with N peers in each stage; -rounded computes in bf16, -signs has that token table), a codec as "
    "in quant4 or quant4/quant8, or both joined by +; a codec with :critical may end in @N"
)


@dataclass(frozen=True)
class Method:
    """One column of the comparison."""

    name: str
    kind: str  # of the boundary
    k: int | None  # None: as in the manifest
    track_every: int
    track_rate: float | None  # None: as in the manifest
    optimizer: str | None  # None: as in the manifest
    learning_rate: float | None  # None: as in the manifest
    lr_factor: float  # times that learning rate
    steps: int | None  # None: as in the manifest
    reduce_codec: str | None  # None: as in the manifest
    num_replicas: int  # peers in each stage
    match_parameters: bool
    table: str | None  # None: as in the manifest
    precision: str | None  # None: as in the manifest
    forward: str
    backward: str
    critical_every: int  # one in this number of steps has critical messages

    @property
    def file_name(self) -> str:
        """The name as part of a file name."""
        return (
            self.name.replace("/", "_per_")
            .replace(":", "_")
            .replace(",", "_")
            .replace("=", "_")
            .replace("@", "_every_")
        )

    def applied_to(self, manifest: Manifest, *, seed: int) -> Manifest:
        """The run that this method stands for. Checked as every manifest is: errors name the key."""
        boundary = replace(
            manifest.boundary,
            kind=self.kind,
            k=manifest.boundary.k if self.k is None else self.k,
            track_every=self.track_every,
            track_rate=manifest.boundary.track_rate if self.track_rate is None else self.track_rate,
            match_parameters=self.match_parameters,
            table=self.table or manifest.boundary.table,
        )
        optimizer, schedule = manifest.optimizer, manifest.schedule
        rate = optimizer.learning_rate if self.learning_rate is None else self.learning_rate
        kind = optimizer.kind if self.optimizer is None else self.optimizer
        changed = replace(
            manifest,
            optimizer=replace(optimizer, kind=kind, learning_rate=rate * self.lr_factor),
            schedule=replace(schedule, steps=schedule.steps if self.steps is None else self.steps),
            run=replace(manifest.run, seed=seed),
            boundary=boundary,
            model=replace(manifest.model, precision=self.precision or manifest.model.precision),
            wire=replace(manifest.wire, forward=self.forward, backward=self.backward),
            reduce=replace(manifest.reduce, codec=self.reduce_codec or manifest.reduce.codec),
            # A checkpoint makes codecs forget what they hold (so that a resumed run equals an uninterrupted one).
            checkpoint=replace(manifest.checkpoint, every=0),
        )
        checked = parse_manifest(changed.canonical())
        codec_pair(checked)
        gradient_spec(checked)
        return checked


def parse_method(text: str) -> Method:
    """The method that `text` names; UsageError with what is allowed."""
    name = text.strip()
    scheduled = _EVERY.fullmatch(name)
    head, plus, tail = (scheduled[1] if scheduled else name).partition("+")
    kind = _KIND.fullmatch(head)
    if kind is None and plus:
        raise UsageError(f"method {text!r}: {head!r} is not a boundary kind", fix=_ALLOWED)
    codec = tail if kind is not None else head
    if plus and not tail:
        raise UsageError(f"method {text!r}: a codec is missing after +", fix=_ALLOWED)
    try:
        pair = parse_pair(codec or "fp32")
    except CodecSpecError as error:
        raise UsageError(f"method {text!r}: {error}", fix=_ALLOWED) from error
    boundary, width, tail = kind.groups() if kind is not None else ("dense", None, "")
    changes = _changes(text, tail)
    if boundary == "dense" and (width or "tracked" in changes or "signs" in changes):
        raise UsageError(f"method {text!r}: dense has neither a width, a subspace nor a token table", fix=_ALLOWED)
    if "rate" in changes and "tracked" not in changes:
        raise UsageError(f"method {text!r}: -rate is that of -tracked, which is missing", fix=_ALLOWED)
    optimizers = [word for word in OPTIMIZER_KINDS if word in changes]
    if len(optimizers) > 1:
        raise UsageError(f"method {text!r}: a method has one optimizer", fix=_ALLOWED)
    optimizer = optimizers[0] if optimizers else None
    reduce_codecs = [f"{word}{changes[word]:.0f}" for word in _REDUCE_CODECS if word in changes]
    if len(reduce_codecs) > 1:
        raise UsageError(f"method {text!r}: a method has one gradient codec", fix=_ALLOWED)
    num_replicas = int(changes.get("replicas", 1))
    if not 1 <= num_replicas <= _MAX_REPLICAS:
        raise UsageError(f"method {text!r}: -replicas takes 1 to {_MAX_REPLICAS}", fix=_ALLOWED)
    every = int(scheduled[2]) if scheduled else 1
    if every < 1:
        raise UsageError(f"method {text!r}: @ counts steps from 1", fix=_ALLOWED)
    return Method(
        name=name,
        kind="subspace" if boundary == "matched" else boundary,
        k=int(width) if width else None,
        track_every=int(changes.get("tracked", 0)),
        track_rate=changes.get("rate"),
        optimizer=optimizer,
        learning_rate=changes[optimizer] if optimizer else None,
        lr_factor=changes.get("lr", 1.0),
        steps=int(changes["steps"]) if "steps" in changes else None,
        reduce_codec=reduce_codecs[0] if reduce_codecs else None,
        num_replicas=num_replicas,
        match_parameters=boundary == "matched",
        table="signs" if "signs" in changes else None,
        precision="bf16" if "rounded" in changes else None,
        forward=str(pair.forward),
        backward=str(pair.backward),
        critical_every=every,
    )


def _changes(text: str, tail: str) -> dict[str, float]:
    """The settings in the suffixes of a boundary kind."""
    found: dict[str, float] = {}
    position = 0
    while position < len(tail):
        change = _CHANGE.match(tail, position)
        if change is None:
            raise UsageError(f"method {text!r}: {tail[position:]!r} is not known", fix=_ALLOWED)
        word, number = next((change[i], change[i + 1]) for i in (1, 3, 5) if change[i])
        if word in found:
            raise UsageError(f"method {text!r}: -{word} is given twice", fix=_ALLOWED)
        found[word] = float(number or 1)
        position = change.end()
    return found


def parse_methods(text: str) -> list[Method]:
    """A list joined by commas."""
    methods: list[Method] = []
    for item in _split(text):
        method = parse_method(item)
        if method.name in {known.name for known in methods}:
            raise UsageError(f"method {method.name!r} is given twice")
        methods.append(method)
    if not methods:
        raise UsageError("no method is given", fix=_ALLOWED)
    return methods


def _split(text: str) -> list[str]:
    """The items. A comma also joins the options of a codec: an option after a comma belongs to the item before."""
    items: list[str] = []
    for piece in text.split(","):
        is_option = _OPTION.fullmatch(piece.strip()) is not None
        if is_option and items and ":" in items[-1]:
            items[-1] += f",{piece.strip()}"
        elif piece.strip():
            items.append(piece.strip())
    return items
