"""`swarmtrain credit`: what a peer of this machine has contributed, and whether receipts are genuine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmtrain.cli.credit_text import receipt_lines
from swarmtrain.cli.options import JsonOption, print_json, state_home
from swarmtrain.cli.places import find_invite, running
from swarmtrain.errors import UsageError
from swarmtrain.terminal import say

if TYPE_CHECKING:
    from swarmtrain.chain.receipt import Receipt


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("credit")(credit)


def credit(
    state_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="A peer's state directory; default: all peers of this machine.")
    ] = None,
    verify: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Check a receipt instead, without the run. Repeatable.")
    ] = None,
    invite: Annotated[
        str | None,
        typer.Option(metavar="INVITE", help="With --verify: of the receipts' run; default: as for `swarmtrain join`."),
    ] = None,
    journal: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="With --verify: the coordinator's state directory, to compare with its books."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show what counts as the work of this machine's peers, as the run has signed it; or check receipts.

    Receipts of one peer are never added up: the newest counts. One of work that the run has taken back since then is
    found with --journal only.
    """
    if verify:
        _verify(verify, find_invite(invite), journal, as_json=as_json)
        return
    if invite is not None or journal is not None:
        raise UsageError("--invite and --journal belong to --verify", fix="swarmtrain credit --verify FILE")
    found = _fresh(state_dir) + _kept(state_dir)
    newest = {(receipt["run"], receipt["peer"]): (path, receipt) for path, receipt in sorted(found, key=_age)}
    if not newest:
        raise UsageError("there is no receipt yet", fix="a peer has one soon after its first step")
    for path, receipt in newest.values():
        _show(receipt, str(path), as_json=as_json)


def _age(item: tuple[str, dict[str, Any]]) -> tuple[int, int]:
    return item[1]["term"], item[1]["step"]


def _fresh(state_dir: Path | None) -> list[tuple[str, dict[str, Any]]]:
    """Receipts that running peers ask their coordinators for now. Others are read from their files."""
    from swarmtrain.observe.control import ControlError, ask

    found = []
    for directory in [state_dir] if state_dir is not None else running("peer"):
        try:
            answer = asyncio.run(ask(directory / "control.sock", "credit"))
        except ControlError:
            continue
        if answer["receipt"] is not None:
            found.append((answer["path"], answer["receipt"]))
    return found


def _kept(state_dir: Path | None) -> list[tuple[str, dict[str, Any]]]:
    """Receipts in state directories. Their signature was checked when they were written."""
    from swarmtrain.chain.receipt import ReceiptError, peek_receipt

    found = []
    for path in sorted(_files(state_dir)):
        try:
            found.append((str(path), peek_receipt(path).as_dict()))
        except ReceiptError as error:
            say(f"{path} is left out: {error}")
    return found


def _files(state_dir: Path | None) -> Iterable[Path]:
    if state_dir is not None:
        return state_dir.glob("receipt-*.json")
    places = [*(state_home() / "peers").glob("*"), *running("peer")]
    return {path.resolve() for place in places for path in place.glob("receipt-*.json")}


def _verify(files: list[Path], invite: str, journal: Path | None, *, as_json: bool) -> None:
    """Check signatures; of each peer, show the receipt that counts."""
    from swarmtrain.chain.receipt import newest, read_receipt
    from swarmtrain.run.invite import parse_invite

    run = parse_invite(invite)
    genuine = [read_receipt(path, run.run_id, run.run_key).receipt for path in files]
    counting = newest(genuine)
    if journal is not None:
        _compare(counting.values(), journal)
    for receipt in counting.values():
        note = "compared with the journal" if journal is not None else "signed by the run's key"
        _show(receipt.as_dict(), note, as_json=as_json)
    if len(counting) < len(genuine) and not as_json:
        say(f"{len(genuine) - len(counting)} more of the same peers: older, so they add nothing")


def _compare(receipts: Iterable[Receipt], state_dir: Path) -> None:
    from swarmtrain.audit import check_receipts

    check_receipts(state_dir, receipts)


def _show(receipt: dict[str, Any], note: str, *, as_json: bool) -> None:
    if as_json:
        print_json({**receipt, "note": note})
        return
    for line in receipt_lines(receipt, note):
        say(line, indent="    ")
