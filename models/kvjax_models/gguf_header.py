"""Parses the header of a GGUF file: the key-value pairs, and where each tensor lies.

The gguf package's own reader makes several NumPy views for each of a tokenizer's 100,000 strings: it takes
2 s for a small model.

Every count and length is held against the bytes that are left before anything is made of it.
"""

import itertools
import pathlib
import struct
from typing import Any, NamedTuple

import numpy as np

from kvjax.fields import Fields, shown

_MAGIC = b"GGUF"
_BOOL, _STRING, _ARRAY = 7, 8, 9
# GGUF's value type: NumPy's; strings and arrays apart.
_SCALARS = {
    number: np.dtype(name)
    for number, name in {
        0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4",
        7: "<u1", 10: "<u8", 11: "<i8", 12: "<f8",
    }.items()
}  # fmt: skip

#: Most dimensions that a tensor has, ggml's own limit.
_DIMENSIONS = 4
_LENGTH = struct.Struct("<Q")
#: Fewest bytes of a string and of an array within an array: their lengths, and the type of entries.
_STRING_BYTES, _ARRAY_BYTES = 8, 12
#: How deep arrays may lie in arrays; no known key has any.
_DEPTH = 4


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
        ValueError: `content` is no little-endian GGUF file of version 2 or 3, is cut short, or holds a key or a
            tensor twice.
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
        if key in metadata:
            raise ValueError(f"{file} holds the key {shown(key)} twice.")
        metadata[key] = cursor.value(cursor.number("<u4"), key=key)
    entries: dict[str, TensorEntry] = {}
    for _ in range(tensor_count):
        name = cursor.string()
        if name in entries:
            raise ValueError(f"{file} holds the tensor {shown(name)} twice.")
        entries[name] = cursor.entry(name)
    return GGUFHeader(metadata, _placed(entries, metadata, end=cursor.position, file=file))


def _placed(
    entries: dict[str, TensorEntry], metadata: dict[str, Any], *, end: int, file: pathlib.Path
) -> dict[str, TensorEntry]:
    """Counts the tensors' starts from the beginning of the file; their data begins at the first multiple after `end`.

    Raises:
        ValueError: the alignment is no power of two, or a tensor does not begin at a multiple of it.
    """
    fields = Fields(metadata, source=file)
    alignment = fields.integer("general.alignment", 32, at_least=1, at_most=1 << 30)
    if alignment & (alignment - 1):
        fields.fail("general.alignment", "must be a power of two")
    for name, entry in entries.items():
        if entry.start % alignment:
            raise ValueError(
                f"{file}: the tensor {shown(name)} must begin at a multiple of {alignment} bytes, got {entry.start}."
            )
    data = -(-end // alignment) * alignment
    return {name: entry._replace(start=entry.start + data) for name, entry in entries.items()}


class _Cursor:
    """Reads values one after another."""

    def __init__(self, content: memoryview, file: pathlib.Path):
        self.content, self.file, self.position = content, file, 0

    def need(self, size: int) -> None:
        """Raises a ValueError unless `size` bytes are left."""
        if self.position + size > len(self.content):
            raise ValueError(f"{self.file} is cut short: its header ends at byte {len(self.content)}.")

    def take(self, size: int) -> bytes:
        self.need(size)
        taken = bytes(self.content[self.position : self.position + size])
        self.position += size
        return taken

    def number(self, dtype: str) -> int:
        return int.from_bytes(self.take(int(dtype[-1])), "little")

    def string(self) -> str:
        # Some tokenizers hold pieces of characters.
        return self.take(self.number("<u8")).decode("utf-8", errors="replace")

    def entry(self, name: str) -> TensorEntry:
        dimensions = self.number("<u4")
        if dimensions > _DIMENSIONS:
            raise ValueError(
                f"{self.file}: the tensor {shown(name)} must have {_DIMENSIONS} dimensions at most, got {dimensions}."
            )
        shape = tuple(self.number("<u8") for _ in range(dimensions))[::-1]
        return TensorEntry(shape, self.number("<u4"), self.number("<u8"))

    def value(self, kind: int, *, key: str) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(key, depth=1)
        return self._scalars(kind, 1, key=key)[0]

    def _array(self, key: str, *, depth: int) -> Any:
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            return self._strings(count)
        if kind != _ARRAY:
            return self._scalars(kind, count, key=key)
        if depth == _DEPTH:
            raise ValueError(f"{self.file}: the value of {shown(key)} has arrays in arrays, deeper than {_DEPTH}.")
        self.need(_ARRAY_BYTES * count)
        return [self._array(key, depth=depth + 1) for _ in range(count)]

    def _strings(self, count: int) -> list[str]:
        """`string`, as fast as Python goes: a vocabulary has a hundred thousand."""
        self.need(_STRING_BYTES * count)
        content, position, strings = self.content, self.position, []
        for _ in range(count):
            start = position + _STRING_BYTES
            if start > len(content):
                break
            position = start + _LENGTH.unpack_from(content, position)[0]
            strings.append(str(content[start:position], "utf-8", "replace"))
        self.need(position - self.position + _STRING_BYTES * (count - len(strings)))
        self.position = position
        return strings

    def _scalars(self, kind: int, count: int, *, key: str) -> list[Any]:
        if kind not in _SCALARS:
            raise ValueError(f"{self.file}: the value of {shown(key)} has the unknown type {kind}.")
        dtype = _SCALARS[kind]
        values = np.frombuffer(self.take(dtype.itemsize * count), dtype)
        if kind != _BOOL:
            return values.tolist()
        if values.size and values.max() > 1:
            raise ValueError(f"{self.file}: the value of {shown(key)} must be false or true, got {values.max()}.")
        return values.astype(bool).tolist()


def check_apart(ends: dict[str, int], entries: dict[str, TensorEntry], *, file: pathlib.Path) -> None:
    """Raises a ValueError where two tensors share bytes.

    Args:
        ends: the byte after each tensor's last one.
        entries: where they begin.
        file: for the message.
    """
    ordered = sorted((entries[name].start, ends[name], name) for name in ends if ends[name] > entries[name].start)
    for (_, end, before), (start, _, name) in itertools.pairwise(ordered):
        if start < end:
            raise ValueError(f"{file}: the tensors {shown(before)} and {shown(name)} overlap at byte {start}.")
