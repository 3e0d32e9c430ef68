"""What a signed receipt proves, and what nobody can make of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from swarmtrain.chain.receipt import (
    EARLIER,
    MAX_BODY,
    MAX_DAYS,
    Receipt,
    ReceiptError,
    bounded_days,
    check_receipt,
    newest,
    read_receipt,
    sign_receipt,
)
from swarmtrain.p2p.identity import RunKey

KEY, OTHER = RunKey(bytes(32)), RunKey(bytes([1]) * 32)
RECEIPT = Receipt(
    run="run",
    run_name="nano",
    peer="12D3KooWpeer",
    name="anna",
    term=2,
    step=10,
    chain="c" * 64,
    issued_at=1e9,
    microbatches=30,
    tokens=3000,
    seconds=12.5,
    whole=120,
    stages={"0": 20, "2": 10},
    days={"2026-11-18": 25, "2026-11-19": 5},
)


def saved(path: Path, receipt: Receipt = RECEIPT, key: RunKey = KEY) -> Path:
    sign_receipt(receipt, key).save(path)
    return path


def test_a_receipt_can_be_checked_by_everybody_who_has_the_invite(tmp_path: Path) -> None:
    found = read_receipt(saved(tmp_path / "receipt"), "run", KEY.public_bytes)
    assert found.receipt == RECEIPT
    assert found.receipt.share == 0.25
    assert (tmp_path / "receipt").stat().st_size < 1000


RAISED: dict[str, Any] = {
    "microbatches": 31,
    "tokens": 3001,
    "seconds": 13.0,
    "peer": "12D3KooWthief",
    "name": "eve",
    "whole": 60,
    "step": 11,
    "term": 3,
    "stages": {"0": 30},
    "days": {"2026-11-19": 30},
}


@pytest.mark.parametrize("field", RAISED)
def test_no_figure_and_no_owner_can_be_changed(tmp_path: Path, field: str) -> None:
    path = saved(tmp_path / "receipt")
    content = json.loads(path.read_text())
    content["receipt"] = replace(RECEIPT, **{field: RAISED[field]}).body()
    path.write_text(json.dumps(content))
    with pytest.raises(ReceiptError, match="not signed by the run's key"):
        read_receipt(path, "run", KEY.public_bytes)


def test_another_key_and_another_run_do_not_count(tmp_path: Path) -> None:
    with pytest.raises(ReceiptError, match="not signed"):
        read_receipt(saved(tmp_path / "receipt", key=OTHER), "run", KEY.public_bytes)
    with pytest.raises(ReceiptError, match="of run other"):
        read_receipt(saved(tmp_path / "receipt", replace(RECEIPT, run="other")), "run", KEY.public_bytes)
    signed = sign_receipt(RECEIPT, KEY)
    with pytest.raises(ReceiptError, match="not signed"):  # what the key has signed as something else is no receipt
        check_receipt(signed.body, KEY.sign(signed.body.encode()), "run", KEY.public_bytes)


def test_shown_twice_or_with_an_old_one_it_counts_once() -> None:
    older = replace(RECEIPT, step=5, microbatches=12)
    before_roll_back = replace(RECEIPT, term=1, step=99, microbatches=500)
    other = replace(RECEIPT, peer="12D3KooWother")
    assert newest([RECEIPT, older, before_roll_back, RECEIPT, other]) == {
        RECEIPT.peer: RECEIPT,
        other.peer: other,
    }


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "no object": lambda _: [],
    "a missing key": lambda found: {key: found[key] for key in found if key != "step"},
    "an unknown key": lambda found: {**found, "more": 1},
    "a negative count": lambda found: {**found, "tokens": -1},
    "a fraction": lambda found: {**found, "microbatches": 30.0},
    "a truth": lambda found: {**found, "step": True},
    "no number": lambda found: {**found, "seconds": float("nan")},
    "endless": lambda found: {**found, "issued_at": float("inf")},
    "a long name": lambda found: {**found, "name": "x" * 65},
    "stages that do not add up": lambda found: {**found, "stages": {"0": 29}},
    "days that do not add up": lambda found: {**found, "days": {"2026-11-19": 31}},
    "more than the whole": lambda found: {**found, "whole": 29},
    "too long": lambda found: {**found, "days": {str(day): 0 for day in range(MAX_BODY)}},
    "nested without end": lambda _: None,
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_signed_and_still_no_receipt_is_refused(fault: str) -> None:
    made = BROKEN[fault](json.loads(RECEIPT.body()))
    body = "[" * 20000 if made is None else json.dumps(made)
    signature = KEY.sign(b"swarmtrain receipt 1\n" + body.encode())
    with pytest.raises(ReceiptError, match="not that of a receipt"):
        check_receipt(body, signature, "run", KEY.public_bytes)
    body = RECEIPT.body()  # control
    check_receipt(body, KEY.sign(b"swarmtrain receipt 1\n" + body.encode()), "run", KEY.public_bytes)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b"\xff", b'{"receipt": 1, "signature": "00"}', b"[" * 20000, b" " * (1 << 20)]
)
def test_a_file_that_is_no_receipt_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "receipt").write_bytes(content)
    with pytest.raises(ReceiptError, match="is not a receipt"):
        read_receipt(tmp_path / "receipt", "run", KEY.public_bytes)


def test_years_of_days_fit_and_still_add_up() -> None:
    days = {f"{year}-{month:02}-{day:02}": 1 for year in (2026, 2027) for month in range(1, 13) for day in range(1, 29)}
    kept = bounded_days(days)
    assert len(kept) == MAX_DAYS + 1
    assert kept[EARLIER] == len(days) - MAX_DAYS
    assert sum(kept.values()) == len(days)
    assert bounded_days({"2026-11-19": 3}) == {"2026-11-19": 3}
    count = 2**40
    stages = {str(stage): count for stage in range(1024)}
    whole = replace(RECEIPT, stages=stages, days={**kept, EARLIER: 0}, microbatches=1024 * count, whole=2**52)
    assert len(whole.body()) < MAX_BODY
