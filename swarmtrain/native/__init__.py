"""Optional machine code for quant8, checksums, exact sums and shares, built once with the machine's own C compiler.

Python computes the same bits: without a compiler, or with SWARMTRAIN_NATIVE=off, all works, only slower (tests:
codec/test_native_codecs.py, model/test_exact_sums.py, reduce/test_packing.py, wire/test_checksum.py). What was built
lies in the user's cache, named by source, compiler and processor.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path

import numpy
import numpy.typing

log = logging.getLogger(__name__)

# No multiply-add: it would round once where Python rounds twice.
_FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fPIC", "-shared")
_BUILD_S = 60.0

Doubles = numpy.typing.NDArray[numpy.float64]
Floats = numpy.typing.NDArray[numpy.float32]
Codes = numpy.typing.NDArray[numpy.uint8]
Scales = numpy.typing.NDArray[numpy.uint16]
Words = numpy.typing.NDArray[numpy.uint64]
Steps = numpy.typing.NDArray[numpy.int64]


class Native:
    """The loops. Arrays are contiguous; `group` divides the number of numbers."""

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._quantize = library.st_quantize8
        self._quantize.argtypes, self._quantize.restype = [pointer, size, size, pointer, pointer], ctypes.c_int
        self._dequantize = library.st_dequantize8
        self._dequantize.argtypes, self._dequantize.restype = [pointer, size, size, pointer, pointer], None
        self._sums = library.st_sums
        self._sums.argtypes, self._sums.restype = [pointer, size, size, pointer, pointer], None
        real = ctypes.c_double
        self._pack = library.st_pack
        self._pack.argtypes, self._pack.restype = [pointer, size, real, size, pointer], ctypes.c_int
        self._add = library.st_add
        self._add.argtypes, self._add.restype = [pointer, size, size, real, pointer], ctypes.c_int
        self._put = {4: library.st_put_floats, 2: library.st_put_halves}
        for put in self._put.values():
            put.argtypes, put.restype = [pointer, size, real, real, pointer], None
        self._round = library.st_round
        self._round.argtypes, self._round.restype = [pointer, size, real, pointer], ctypes.c_int
        self._crc32 = library.st_crc32
        self._crc32.argtypes, self._crc32.restype = [pointer, size, pointer], ctypes.c_int

    def quantize(self, numbers: Floats, group: int, scales: Scales, codes: Codes) -> bool:
        """Fill `scales` and `codes`; False if a number is NaN or infinite."""
        found = self._quantize(numbers.ctypes.data, numbers.size // group, group, scales.ctypes.data, codes.ctypes.data)
        return bool(found == 0)

    def dequantize(self, codes: Codes, group: int, scales: Scales, numbers: Floats) -> None:
        """Fill `numbers`."""
        self._dequantize(codes.ctypes.data, numbers.size // group, group, scales.ctypes.data, numbers.ctypes.data)

    def sums(self, words: Words, rows: Words, columns: Words) -> None:
        """Fill `rows` with the sums of the rows of `words` (rows, columns), and add up its columns in `columns`."""
        self._sums(words.ctypes.data, *words.shape, rows.ctypes.data, columns.ctypes.data)

    def pack(self, numbers: Doubles, step: float, width: int, packed: Codes) -> int:
        """Fill `packed` with `width` bytes per number; returns how many bytes the largest number needs.

        0 if one is not a whole number of steps. What is in `packed` counts only if it is between 1 and `width`.
        """
        return int(self._pack(numbers.ctypes.data, numbers.size, 1.0 / step, width, packed.ctypes.data))

    def add(self, share: Codes | Doubles, width: int, step: float, total: Steps) -> bool:
        """Add a share of `width` bytes per number (8: doubles); False, and nothing, if a double is off the grid."""
        return bool(self._add(share.ctypes.data, width, total.size, step, total.ctypes.data) == 0)

    def put(self, numbers: int, num_bytes: int, count: int, rounder: float, sign: int, total: int) -> None:
        """Add `count` numbers of 4 bytes (fp32) or 2 (bf16) to doubles, rounded to the grid of `rounder`. Addresses."""
        self._put[num_bytes](numbers, count, rounder, float(sign), total)

    def round(self, total: Steps, step: float, numbers: Floats) -> bool:
        """Fill `numbers` with a total; False if it has left the exact range: then they mean nothing."""
        return bool(self._round(total.ctypes.data, total.size, step, numbers.ctypes.data) == 0)

    def crc32(self, data: Codes, crc: int) -> int | None:
        """zlib's crc32 of a multiple of 16 bytes, at least 64; None if this processor has no fast way."""
        found = ctypes.c_uint32(crc)
        return found.value if self._crc32(data.ctypes.data, data.size, ctypes.byref(found)) else None


@functools.cache
def native() -> Native | None:
    """The loops, or None where they cannot be had."""
    if os.environ.get("SWARMTRAIN_NATIVE", "on") == "off" or sys.byteorder != "little":
        return None
    try:
        found = Native(ctypes.CDLL(str(_library())))
    except (OSError, subprocess.SubprocessError, AttributeError, ValueError) as error:
        log.info("codecs run without machine code: %s", error)
        return None
    return found


def _library() -> Path:
    """The built library; builds it if it is not there. OSError or SubprocessError if that does not work."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise FileNotFoundError("there is no C compiler")
    source = (resources.files("swarmtrain.native") / "loops.c").read_bytes()
    what = b"\0".join([source, compiler.encode(), " ".join(_FLAGS).encode(), processor()])
    directory = cache_directory()
    path = directory / f"loops-{hashlib.sha256(what).hexdigest()[:16]}.so"
    if not path.exists():
        with tempfile.TemporaryDirectory(dir=directory) as work:
            (Path(work) / "loops.c").write_bytes(source)
            command = [compiler, *_FLAGS, "-o", f"{work}/loops.so", f"{work}/loops.c"]
            subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S, stdin=subprocess.DEVNULL)
            os.replace(f"{work}/loops.so", path)
    return path


def cache_directory() -> Path:
    """A directory that only this user can write to: what lies in it is executed. OSError if there is none."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swarmtrain" / "native"
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = base.stat()
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"{base} can be written by others")
    return base


def processor() -> bytes:
    """Names the kind of processor: a home directory may be shared by machines of several kinds."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return f"{platform.node()} {platform.machine()}".encode()
    kinds = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join(sorted(kinds)).encode()
