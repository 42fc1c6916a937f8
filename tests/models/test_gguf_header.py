"""Headers of GGUF files: what they claim is held against the bytes that are there."""

import pathlib
import struct

import pytest

from kvjax_models.gguf_files import open_gguf
from kvjax_models.gguf_header import read_header

FILE = pathlib.Path("model.gguf")
UINT8, UINT32, BOOL, STRING, ARRAY, F32 = 0, 4, 7, 8, 9, 0


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def pair(key, kind, value):
    return text(key) + struct.pack("<I", kind) + value


def tensor(name, shape, start, kind=F32):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, start)


def header(pairs=(), tensors=()):
    return b"".join((b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(pairs)), *pairs, *tensors))


CUT = r"model.gguf is cut short: its header ends at byte"
CLAIMS = {
    "strings": (header([pair("a", ARRAY, struct.pack("<IQ", STRING, 1 << 62))]), CUT),
    "bytes": (header([pair("a", ARRAY, struct.pack("<IQ", UINT8, 1 << 62))]), CUT),
    "arrays": (header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1 << 62))]), CUT),
    "a string among strings": (header([pair("a", ARRAY, struct.pack("<IQQQ", STRING, 2, 1 << 63, 0))]), CUT),
    "a string": (header([pair("a", STRING, struct.pack("<Q", 1 << 63))]), CUT),
    "pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 62), CUT),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 62, 0), CUT),
    "depth": (header([pair("a", ARRAY, struct.pack("<IQ", ARRAY, 1) * 20_000)]), r"'a' has arrays in arrays, deeper"),
    "a flag": (header([pair("a", BOOL, b"\2")]), r"the value of 'a' must be false or true, got 2"),
    "a type": (header([pair("a", 13, b"")]), r"the value of 'a' has the unknown type 13"),
    "dimensions": (
        header((), [text("w") + struct.pack("<I", 2**32 - 1)]),
        r"'w' must have 4 dimensions at most, got 42",
    ),
    "a key twice": (header([pair("a", BOOL, b"\1")] * 2), r"model.gguf holds the key 'a' twice"),
    "a tensor twice": (header((), [tensor("w", [4], 0)] * 2), r"model.gguf holds the tensor 'w' twice"),
    "a start": (header((), [tensor("w", [4], 4)]), r"'w' must begin at a multiple of 32 bytes, got 4"),
    **{
        f"alignment {alignment}": (
            header([pair("general.alignment", UINT32, struct.pack("<I", alignment))]),
            rf"`general.alignment` must be .*, got {alignment}",
        )
        for alignment in (0, 48, 2**31)
    },
}


@pytest.mark.parametrize(("content", "message"), CLAIMS.values(), ids=CLAIMS.keys())
def test_a_claim_that_the_bytes_contradict_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        read_header(memoryview(content), file=FILE)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([tensor("w", [1 << 32, 1 << 32], 0)], r"cut short: the tensor 'w' ends at byte 737869762948382065"),
        ([tensor("w", [32, 1 << 62], 0, kind=8)], r"cut short: the tensor 'w' ends at byte 1567973246265311"),
        ([tensor("w", [4], 2**64 - 32)], r"cut short: the tensor 'w' ends at byte 184467440737095517"),
        ([tensor("w", [], 0)], r"'w' of shape \(\) has no whole F32 blocks"),
        ([tensor("w", [0, 4], 0)], r"'w' of shape \(4, 0\) has no whole F32 blocks"),
        ([tensor("v", [16], 0), tensor("w", [4], 32)], r"the tensors 'v' and 'w' overlap at byte"),
        ([tensor("w", [4], 0, kind=999)], r"'w' must be one of F32, .*got type 999"),
    ],
)
def test_a_tensor_that_cannot_lie_there_is_refused(tensors, message, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(header([pair("general.architecture", STRING, text("llama"))], tensors) + bytes(1024))
    with pytest.raises(ValueError, match=rf"model.gguf.*{message}"):
        open_gguf(file)


def test_nested_and_empty_arrays_are_read():
    inner = struct.pack("<IQ", UINT8, 2) + b"\1\2" + struct.pack("<IQ", STRING, 0)
    pairs = [
        pair("a", ARRAY, struct.pack("<IQ", ARRAY, 2) + inner),
        pair("b", ARRAY, struct.pack("<IQ", BOOL, 1) + b"\1"),
    ]
    assert read_header(memoryview(header(pairs)), file=FILE).metadata == {"a": [[1, 2], []], "b": [True]}
