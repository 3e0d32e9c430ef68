"""The checksum is zlib's, whoever computes it."""

from __future__ import annotations

import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmtrain.native import native
from swarmtrain.wire import checksum

BODY = bytes(range(256)) * 600  # 150 KiB


@settings(deadline=None, max_examples=200)
@given(start=st.integers(0, 200), length=st.integers(0, 140_000), crc=st.integers(0, 2**32 - 1))
def test_it_is_zlibs(start: int, length: int, crc: int) -> None:
    data = memoryview(BODY)[start : start + length]
    assert checksum.crc32(data, crc) == zlib.crc32(data, crc)


@pytest.mark.skipif(native() is None, reason="there is no C compiler")
def test_long_data_goes_through_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Marked:
        def crc32(self, data: object, crc: int) -> int:
            return 7

    monkeypatch.setattr(checksum, "native", Marked)
    assert checksum.crc32(memoryview(BODY)) == zlib.crc32(BODY[len(BODY) & ~15 :], 7)
    assert checksum.crc32(memoryview(BODY)[:100]) == zlib.crc32(BODY[:100])


def test_without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "native", lambda: None)
    assert checksum.crc32(memoryview(BODY), 5) == zlib.crc32(BODY, 5)
