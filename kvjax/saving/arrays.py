"""Arrays one behind another in a file, each with a digest of its bytes."""

import hashlib
import math
import pathlib
import stat
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax.files import reading

#: Bytes that are written or read at once.
_CHUNK = 16 * 1024 * 1024
_WHAT = "the arrays of a saved cache"


class StoredArray(NamedTuple):
    """What is known of an array in a file.

    Attributes:
        name: what it is.
        shape: its sizes.
        dtype: the name of its type.
        digest: SHA-256 of its bytes, in hexadecimal.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    digest: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) * jax.numpy.dtype(self.dtype).itemsize


def write_arrays(file: pathlib.Path, arrays: Iterable[tuple[str, jax.Array]]) -> list[StoredArray]:
    """Writes arrays with their names; the host's memory holds one at a time."""
    stored = []
    with file.open("wb") as stream:
        for name, array in arrays:
            digest = hashlib.sha256()
            for chunk in _chunks(np.ascontiguousarray(array)):
                digest.update(chunk)
                stream.write(chunk)
            stored.append(StoredArray(name, array.shape, array.dtype.name, digest.hexdigest()))
    return stored


def read_arrays(file: pathlib.Path, stored: Sequence[StoredArray]) -> Iterator[np.ndarray]:
    """The arrays of a file, in order; nothing is made before the file is known to have as many bytes.

    Raises:
        ValueError: the file cannot be read, has another size, or an array's bytes are not those that were written.
    """
    with reading(file, what=_WHAT):
        status, expected = file.stat(), sum(array.size for array in stored)
        # A named pipe would wait for a writer for ever.
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file.")
        if status.st_size != expected:
            raise ValueError(f"it has {status.st_size:,} bytes, not {expected:,}.")
        stream = file.open("rb")
    with stream:
        for about in stored:
            with reading(file, what=_WHAT):
                array = _read(stream, about)
            yield array


def _read(stream: Any, about: StoredArray) -> np.ndarray:
    array, digest = np.empty(about.shape, jax.numpy.dtype(about.dtype)), hashlib.sha256()
    for chunk in _chunks(array):
        if stream.readinto(chunk) != len(chunk):
            raise ValueError(f"it ends within `{about.name}`.")
        digest.update(chunk)
    if digest.hexdigest() != about.digest:
        raise ValueError(f"the bytes of `{about.name}` are not those that were written.")
    return array


def _chunks(array: np.ndarray) -> Iterator[memoryview]:
    """The bytes of a contiguous array, without a copy; written into where they are written to."""
    content = memoryview(array.reshape(-1).view(np.uint8))
    for first in range(0, len(content), _CHUNK):
        yield content[first : first + _CHUNK]
