"""A receipt: what a run has counted as one peer's work, signed by the run's key, to be checked without the run.

A receipt says how things stood after `step` applied steps of one history, which the chain hash of the journal names.
Receipts of one peer are never added up: the newest counts, and it is the one of the greatest (term, step). A term
begins with every roll-back, so a receipt of work that was taken back is older than every receipt of after it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swarmtrain.data.files import atomic_write
from swarmtrain.errors import ExitCode, SwarmtrainError
from swarmtrain.p2p.identity import RunKey, verify

MAX_BODY = 32 * 1024  # characters
MAX_DAYS = 400  # named one by one; what was done before them is one figure
EARLIER = "earlier"
_PREFIX = b"swarmtrain receipt 1\n"
_MAX_COUNT = 2**53
_MAX_FILE_BYTES = 2 * MAX_BODY
_TEXTS = {"run": 64, "run_name": 256, "peer": 128, "name": 64, "chain": 64}
_COUNTS = ("term", "step", "microbatches", "tokens", "whole")


class ReceiptError(SwarmtrainError):
    """A receipt is damaged, altered, of another run, or contradicts the journal."""

    error_id = "ST-RECEIPT"
    exit_code = ExitCode.FILES


@dataclass(frozen=True)
class Receipt:
    """What counts as one peer's own after `step` applied steps."""

    run: str
    run_name: str
    peer: str
    name: str
    term: int
    step: int
    chain: str  # of the journal, after `step` steps: which history this is about
    issued_at: float
    microbatches: int
    tokens: int
    seconds: float  # of the steps in which it had a part
    whole: int  # microbatches of all peers, over all stages
    stages: Mapping[str, int]
    days: Mapping[str, int]  # UTC dates, and EARLIER

    @property
    def share(self) -> float:
        """Of the run's work."""
        return self.microbatches / self.whole if self.whole else 0.0

    @property
    def age(self) -> tuple[int, int]:
        """The greater one of two receipts of a peer is the one that counts."""
        return self.term, self.step

    def body(self) -> str:
        """What is signed: one form for the same content."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))

    def as_dict(self) -> dict[str, Any]:
        """For a program."""
        return {**asdict(self), "share": self.share}


@dataclass(frozen=True)
class SignedReceipt:
    """A receipt with the signature of its run's key."""

    receipt: Receipt
    body: str
    signature: bytes

    def save(self, path: Path) -> None:
        """Write it, or leave the file as it was."""
        content = {"receipt": self.body, "signature": self.signature.hex()}
        atomic_write(path, f"{json.dumps(content)}\n".encode())


def sign_receipt(receipt: Receipt, key: RunKey) -> SignedReceipt:
    """The receipt, signed."""
    body = receipt.body()
    return SignedReceipt(receipt, body, key.sign(_PREFIX + body.encode()))


def check_receipt(body: str, signature: bytes, run: str, run_key: bytes) -> SignedReceipt:
    """A receipt that this run has signed. ReceiptError for anything else."""
    if not verify(run_key, signature, _PREFIX + body.encode(errors="replace")):
        raise ReceiptError(
            "it is not signed by the run's key", fix="check the file, and that the invite is of the same run"
        )
    receipt = _parse(body)
    if receipt.run != run:
        raise ReceiptError(f"it is of run {receipt.run}, not of {run}", fix="take the invite of that run")
    return SignedReceipt(receipt, body, signature)


def read_receipt(path: Path, run: str, run_key: bytes) -> SignedReceipt:
    """The receipt in a file that `save` wrote, checked."""
    return check_receipt(*_read(path), run, run_key)


def peek_receipt(path: Path) -> Receipt:
    """The receipt in a file of this machine's own: whoever wrote it has checked it."""
    return _parse(_read(path)[0])


def _read(path: Path) -> tuple[str, bytes]:
    """(body, signature) of a file."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        content = json.loads(raw if len(raw) <= _MAX_FILE_BYTES else b"")
        body, signature = content["receipt"], bytes.fromhex(content["signature"])
    except OSError as error:
        raise ReceiptError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ReceiptError(f"{path} is not a receipt", fix="a peer keeps it in its state directory") from error
    if not isinstance(body, str):
        raise ReceiptError(f"{path} is not a receipt", fix="a peer keeps it in its state directory")
    return body, signature


def newest(receipts: Iterable[Receipt]) -> dict[str, Receipt]:
    """Of each peer the receipt that counts, however often and in whatever order they are shown."""
    found: dict[str, Receipt] = {}
    for receipt in receipts:
        known = found.get(receipt.peer)
        if known is None or receipt.age > known.age:
            found[receipt.peer] = receipt
    return found


def bounded_days(days: Mapping[str, int]) -> dict[str, int]:
    """The newest days; those before them in one figure."""
    ordered = sorted(days)
    old, kept = ordered[:-MAX_DAYS], ordered[-MAX_DAYS:]
    result = {day: days[day] for day in kept}
    return {EARLIER: sum(days[day] for day in old), **result} if old else result


def _parse(body: str) -> Receipt:
    """A signed body; still checked: a key may have signed by another version's rules."""
    problem = ReceiptError("its content is not that of a receipt", fix="it may be of another version of swarmtrain")
    if len(body) > MAX_BODY:
        raise problem
    try:
        found = json.loads(body)
        receipt = Receipt(**found)
    except (ValueError, TypeError, RecursionError) as error:
        raise problem from error
    is_sound = (
        all(isinstance(found[key], str) and len(found[key]) <= limit for key, limit in _TEXTS.items())
        and all(_is_count(found[key]) for key in _COUNTS)
        and all(
            isinstance(found[key], int | float) and 0 <= found[key] < _MAX_COUNT for key in ("issued_at", "seconds")
        )
        and all(_adds_up(found[key], receipt.microbatches) for key in ("stages", "days"))
        and receipt.microbatches <= receipt.whole
    )
    if not is_sound:
        raise problem
    return receipt


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_COUNT


def _adds_up(parts: object, whole: int) -> bool:
    return isinstance(parts, dict) and all(map(_is_count, parts.values())) and sum(parts.values()) == whole
