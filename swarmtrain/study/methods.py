"""Method names: what the study compares, as a text that becomes a manifest.

    dense  subspace  projected  learned  matched     boundary kinds; a number is the width k, as in subspace16
    subspace8-tracked50                              with the subspace moved every 50 steps
    fp16  quant4  topk10  ef21-topk10  lowrank8-lep  codecs (docs/codecs.md), on a dense boundary
    quant4/quant8                                    forward and backward apart
    subspace+quant8  learned16+quant4/quant8         a codec on another boundary

`matched` is the subspace with boundary.match_parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from swarmtrain.boundary import codec_pair
from swarmtrain.codec import parse_pair
from swarmtrain.codec.errors import CodecSpecError
from swarmtrain.errors import UsageError
from swarmtrain.run.manifest import Manifest, parse_manifest

_KIND = re.compile(r"(dense|subspace|projected|learned|matched)(\d{1,5})?(?:-tracked(\d{1,6}))?", re.ASCII)
_ALLOWED = (
    "a method is dense, subspace, projected, learned or matched (a number after it is k; -trackedN moves the subspace "
    "every N steps), a codec as in quant4 or quant4/quant8, or both joined by +"
)


@dataclass(frozen=True)
class Method:
    """One column of the comparison."""

    name: str
    kind: str  # of the boundary
    k: int | None  # None: as in the manifest
    track_every: int
    match_parameters: bool
    forward: str
    backward: str

    @property
    def file_name(self) -> str:
        """The name, fit for a file."""
        return self.name.replace("/", "_per_").replace(":", "_").replace(",", "_").replace("=", "_")

    def applied_to(self, manifest: Manifest, *, seed: int) -> Manifest:
        """The run that this method stands for. Checked as every manifest is: errors name the key."""
        boundary = replace(
            manifest.boundary,
            kind=self.kind,
            k=manifest.boundary.k if self.k is None else self.k,
            track_every=self.track_every,
            match_parameters=self.match_parameters,
        )
        changed = replace(
            manifest,
            run=replace(manifest.run, seed=seed),
            boundary=boundary,
            wire=replace(manifest.wire, forward=self.forward, backward=self.backward),
            # A checkpoint makes codecs forget what they hold (so that a resumed run equals an uninterrupted one).
            checkpoint=replace(manifest.checkpoint, every=0),
        )
        checked = parse_manifest(changed.canonical())
        codec_pair(checked)
        return checked


def parse_method(text: str) -> Method:
    """The method that `text` names. Raises UsageError that says what is allowed."""
    head, plus, tail = text.strip().partition("+")
    kind = _KIND.fullmatch(head)
    if kind is None and plus:
        raise UsageError(f"method {text!r}: {head!r} is no boundary kind", fix=_ALLOWED)
    codec = tail if kind is not None else head
    if plus and not tail:
        raise UsageError(f"method {text!r}: a codec is missing after +", fix=_ALLOWED)
    try:
        pair = parse_pair(codec or "fp32")
    except CodecSpecError as error:
        raise UsageError(f"method {text!r}: {error}", fix=_ALLOWED) from error
    name, width, tracked = kind.groups() if kind is not None else ("dense", None, None)
    if name == "dense" and (width or tracked):
        raise UsageError(f"method {text!r}: dense has neither a width nor a subspace", fix=_ALLOWED)
    return Method(
        name=text.strip(),
        kind="subspace" if name == "matched" else name,
        k=int(width) if width else None,
        track_every=int(tracked) if tracked else 0,
        match_parameters=name == "matched",
        forward=str(pair.forward),
        backward=str(pair.backward),
    )


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
        is_option = re.fullmatch(r"(carry|critical|(group|values|factors|key)=[a-z0-9]+)", piece.strip()) is not None
        if is_option and items and ":" in items[-1]:
            items[-1] += f",{piece.strip()}"
        elif piece.strip():
            items.append(piece.strip())
    return items
