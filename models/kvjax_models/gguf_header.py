"""Parses the header of a GGUF file: the key-value pairs, and where each tensor lies.

The gguf package's own reader makes several NumPy views for each of a tokenizer's 100,000 strings: it takes
2 s for a small model.
"""

import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

_MAGIC = b"GGUF"
_STRING, _ARRAY = 8, 9
# GGUF's value type: NumPy's; strings and arrays apart.
_SCALARS = {
    number: np.dtype(name)
    for number, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
        7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip


class TensorEntry(NamedTuple):
    """Where a tensor lies.

    Attributes:
        shape: in NumPy's order: matrices are [outputs, inputs].
        type_number: ggml's number of its type.
        start: first byte, from the beginning of the file.
    """

    shape: tuple[int, ...]
    type_number: int
    start: int


class GGUFHeader(NamedTuple):
    """What a GGUF file says before its tensors.

    Attributes:
        metadata: the key-value pairs; arrays are lists.
        tensors: by name.
    """

    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]


def read_header(content: memoryview, *, file: pathlib.Path) -> GGUFHeader:
    """Parses the header.

    Args:
        content: the whole file, mapped or read.
        file: its name, for messages.

    Raises:
        ValueError: `content` is no little-endian GGUF file of version 2 or 3, or is cut short.
    """
    cursor = _Cursor(content, file)
    if cursor.take(4) != _MAGIC:
        raise ValueError(f"{file} is not a GGUF file: it does not begin with 'GGUF'.")
    version = cursor.number("<u4")
    if version not in (2, 3):
        raise ValueError(f"{file} must be a little-endian GGUF file of version 2 or 3, got version {version}.")
    tensor_count, pair_count = cursor.number("<u8"), cursor.number("<u8")
    metadata: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("<u4"), key=key)
    entries = {}
    for _ in range(tensor_count):
        name, dimensions = cursor.string(), cursor.number("<u4")
        shape = tuple(cursor.number("<u8") for _ in range(dimensions))[::-1]
        entries[name] = TensorEntry(shape, cursor.number("<u4"), cursor.number("<u8"))
    alignment = metadata.get("general.alignment", 32)
    data = -(-cursor.position // alignment) * alignment
    return GGUFHeader(metadata, {name: e._replace(start=e.start + data) for name, e in entries.items()})


class _Cursor:
    """Reads values one after another."""

    def __init__(self, content: memoryview, file: pathlib.Path):
        self.content, self.file, self.position = content, file, 0

    def take(self, size: int) -> bytes:
        end = self.position + size
        if end > len(self.content):
            raise ValueError(f"{self.file} is cut short: its header ends at byte {len(self.content)}.")
        taken = bytes(self.content[self.position : end])
        self.position = end
        return taken

    def number(self, dtype: str) -> int:
        return int.from_bytes(self.take(int(dtype[-1])), "little")

    def string(self) -> str:
        (size,) = struct.unpack("<Q", self.take(8))
        # Some tokenizers hold pieces of characters.
        return self.take(size).decode("utf-8", errors="replace")

    def value(self, kind: int, *, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key)
        return self._scalars(kind, 1, key=key)[0]

    def _array(self, key: str) -> Any:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self._array(key) for _ in range(count)]
        return self._scalars(kind, count, key=key)

    def _strings(self, count: int) -> list[str]:
        """`string`, as fast as Python goes: a vocabulary has a hundred thousand."""
        content, position, strings = self.content, self.position, []
        for _ in range(count):
            start = position + 8
            position = start + int.from_bytes(content[start - 8 : start], "little")
            strings.append(str(content[start:position], "utf-8", "replace"))
        if position > len(content):
            self.take(position - self.position)
        self.position = position
        return strings

    def _scalars(self, kind: int, count: int, *, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"{self.file}: the value of {key!r} has the unknown type {kind}.")
        dtype = _SCALARS[kind]
        return np.frombuffer(self.take(dtype.itemsize * count), dtype).tolist()
