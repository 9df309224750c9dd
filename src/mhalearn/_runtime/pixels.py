"""A matrix as a small picture, without a drawing library: sign is hue, size is opacity."""

import base64
import struct
import zlib

import numpy as np
from numpy.typing import NDArray

from mhalearn._runtime.types import Float64

# Below zero and above; zero is the page itself, whatever its colour.
NEGATIVE, POSITIVE = (0.16, 0.47, 0.84), (0.85, 0.34, 0.10)
# Steps of opacity on either side of zero: few keep pictures small.
_STEPS = 31


def thin(matrix: Float64, most: int) -> Float64:
    """At most `most` rows and columns: each cell is its block's entry of largest size.

    A mean would draw independent entries as zero, and a difference smaller than it is.
    """
    for axis in (0, 1):
        size = matrix.shape[axis]
        if size > most:
            starts = np.linspace(0, size, most, endpoint=False).astype(int)
            low = np.minimum.reduceat(matrix, starts, axis=axis)
            high = np.maximum.reduceat(matrix, starts, axis=axis)
            matrix = np.where(high >= -low, high, low)
    return matrix


def draw_png(matrix: Float64, limit: float, cell: int) -> bytes:
    """A PNG file of a matrix on the scale -limit .. limit, an entry a square of `cell` pixels.

    Entries that are not finite are drawn as zero.
    """
    shares = np.nan_to_num(matrix / (limit if limit > 0 else 1.0), posinf=0.0, neginf=0.0)
    levels = np.rint(_STEPS * np.clip(shares, -1, 1)).astype(np.int16) + _STEPS
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        (
            _block(b"IHDR", struct.pack(">IIBBBBB", *_size(levels, cell), 8, 3, 0, 0, 0)),
            _block(b"PLTE", _colours().tobytes()),
            _block(b"tRNS", _opacities().tobytes()),
            _block(b"IDAT", zlib.compress(_scanlines(levels.astype(np.uint8), cell), 9)),
            _block(b"IEND", b""),
        )
    )


def as_data_uri(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _size(levels: NDArray[np.int16], cell: int) -> tuple[int, int]:
    """Width and height in pixels."""
    return levels.shape[1] * cell, levels.shape[0] * cell


def _colours() -> NDArray[np.uint8]:
    hues = np.array([NEGATIVE] * _STEPS + [POSITIVE] * (_STEPS + 1))
    return np.rint(255 * hues).astype(np.uint8)


def _opacities() -> NDArray[np.uint8]:
    return np.rint(255 * np.abs(np.arange(-_STEPS, _STEPS + 1)) / _STEPS).astype(np.uint8)


def _scanlines(levels: NDArray[np.uint8], cell: int) -> bytes:
    """Rows of pixels as PNG filters them, so that what repeats is zero: the first line of an entry
    as differences along it (filter 1), the others as differences to the line above (filter 2)."""
    pixels = np.repeat(levels, cell, axis=1)
    along = np.diff(pixels, axis=1, prepend=np.uint8(0))
    above = (b"\x02" + bytes(pixels.shape[1])) * (cell - 1)
    return b"".join(b"\x01" + line.tobytes() + above for line in along)


def _block(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
