"""GGUF checkpoints in every type of tensor, and what is said of damaged ones."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax_models
from kvjax_models.gguf_files import dequantized
from kvjax_models.gguf_header import read_header
from kvjax_models.weights import parameters


@pytest.fixture(scope="module")
def tiny(parity):
    return parity / "tiny_seed0"


@pytest.fixture(scope="module")
def original(tiny):
    return parameters(kvjax_models.load(tiny).params)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_each_type_gives_the_weights_that_were_quantised(kind, tiny, original, write_gguf, tmp_path):
    number = gguf.GGMLQuantizationType[kind]
    loaded = kvjax_models.load(write_gguf(tiny, tmp_path / "tiny.gguf", kind), "float32")
    arrays = parameters(loaded.params)
    assert arrays.keys() == original.keys()
    for path, expected in original.items():
        expected = np.asarray(expected)
        if expected.ndim == 2:
            rows = np.ascontiguousarray(expected.T if path[-1] == "kernel" else expected)
            rows = gguf.dequantize(gguf.quantize(rows, number), number)
            expected = rows.T if path[-1] == "kernel" else rows
        np.testing.assert_array_equal(np.asarray(arrays[path]), expected, err_msg=str(path))


@pytest.mark.parametrize(
    ("kind", "dtype"), [("F32", "float32"), ("F16", "float32"), ("BF16", "bfloat16"), ("Q8_0", "float32")]
)
def test_the_dtype_is_the_files(kind, dtype, tiny, write_gguf, tmp_path):
    model = kvjax_models.load(write_gguf(tiny, tmp_path / "tiny.gguf", kind)).params
    assert {array.dtype for array in parameters(model).values()} == {jnp.dtype(dtype)}


def test_a_quantised_file_loads_as_bfloat16_where_asked(tiny, write_gguf, tmp_path):
    model = kvjax_models.load(write_gguf(tiny, tmp_path / "tiny.gguf", "Q8_0"), jnp.bfloat16).params
    assert {array.dtype for array in parameters(model).values()} == {jnp.dtype("bfloat16")}


def q4_k(block):
    """One block of 256 values, decoded as ggml's C code does."""
    scale, smallest = (float(x) for x in np.frombuffer(block[:4].tobytes(), "<f2"))
    packed, quants = block[4:16].astype(int), block[16:].astype(int)
    values = []
    for group in range(8):
        if group < 4:
            d, m = packed[group] & 63, packed[group + 4] & 63
        else:
            d = (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4
            m = (packed[group + 4] >> 4) | (packed[group] >> 6) << 4
        half = quants[32 * (group // 2) : 32 * (group // 2) + 32]
        nibbles = half >> 4 if group % 2 else half & 15
        values.extend(scale * d * nibbles - smallest * m)
    return values


def q6_k(block):
    """One block of 256 values, decoded as ggml's C code does."""
    low, high = block[:128].astype(int), block[128:192].astype(int)
    scales, scale = block[192:208].view(np.int8).astype(int), float(block[208:].view("<f2")[0])
    values = np.zeros(256)
    for half in range(2):
        for place in range(32):
            for quarter in range(4):
                nibble = low[64 * half + 32 * (quarter % 2) + place] >> (4 * (quarter // 2)) & 15
                two_bits = high[32 * half + place] >> (2 * quarter) & 3
                index = 128 * half + 32 * quarter + place
                values[index] = scale * scales[index // 16] * ((nibble | two_bits << 4) - 32)
    return values


@pytest.mark.parametrize(
    ("kind", "size", "decode", "scales"), [("Q4_K", 144, q4_k, (0, 4)), ("Q6_K", 210, q6_k, (208, 210))]
)
def test_the_k_types_are_decoded_as_ggml_does(kind, size, decode, scales):
    blocks = np.random.default_rng(0).integers(0, 256, (3, 2, size), np.uint8)
    first, last = scales
    blocks[..., first:last] = np.array([0.01, 0.02], "<f2").view(np.uint8)[: last - first]
    values = dequantized(blocks.reshape(3, -1), kind)
    expected = [[value for block in row for value in decode(block)] for row in blocks]
    np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-6)


def test_other_types_are_refused_by_tensor_and_type(tiny, write_gguf, tmp_path):
    file = write_gguf(tiny, tmp_path / "tiny.gguf", "Q5_0")
    with pytest.raises(ValueError, match=r"tiny.gguf: the tensor '.*weight' must be one of F32.*got type Q5_0"):
        kvjax_models.load(file)


def test_a_file_cut_short_is_named_with_the_tensor(tiny, write_gguf, tmp_path):
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"tiny.gguf is cut short: the tensor '.*' ends at byte"):
        kvjax_models.load(file)


def test_a_header_cut_short_is_named(tiny, write_gguf, tmp_path):
    file = write_gguf(tiny, tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ValueError, match=r"tiny.gguf is cut short: its header ends at byte 200"):
        kvjax_models.load(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"PK\x03\x04 and more", "does not begin with 'GGUF'"),
        (b"GGUF\x00\x00\x00\x03 and more", "version 2 or 3, got version 50331648"),
    ],
)
def test_a_file_that_is_no_gguf_is_named(content, message, tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=f"model.gguf .*{message}"):
        kvjax_models.load(file)


def test_a_missing_tensor_is_named(tiny, write_gguf, tmp_path):
    def deepen(writer):
        writer.add_uint32("llama.attention.key_length", 16)
        writer.kv_data[0]["llama.block_count"].value = 5

    file = write_gguf(tiny, tmp_path / "tiny.gguf", change=deepen)
    with pytest.raises(ValueError, match=r"tiny.gguf lacks the tensor 'blk.4.attn_k.weight' and 8 more"):
        kvjax_models.load(file)


def test_a_misshapen_tensor_is_named(tiny, write_gguf, tmp_path):
    def widen(writer):
        writer.kv_data[0]["llama.feed_forward_length"].value = 256

    file = write_gguf(tiny, tmp_path / "tiny.gguf", change=widen)
    with pytest.raises(ValueError, match=r"tiny.gguf: the tensor '.*ffn_.*' must be .*256.*, got \(128, 128\)"):
        kvjax_models.load(file)


def test_a_refused_configuration_is_named_with_its_file(tiny, write_gguf, tmp_path):
    file = write_gguf(tiny, tmp_path / "tiny.gguf", change=lambda writer: writer.add_expert_count(4))
    with pytest.raises(ValueError, match=r"tiny.gguf: `llama.expert_count` must be 0, got 4"):
        kvjax_models.load(file)


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1"])
def test_a_weight_or_scale_that_is_not_finite_is_named(kind, tiny, write_gguf, tmp_path):
    file = write_gguf(tiny, tmp_path / "tiny.gguf", kind)
    entry = read_header(memoryview(file.read_bytes()), file=file).tensors["blk.1.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    # -inf in float16, scales included; no number in bfloat16 and float32.
    content[entry.start : entry.start + 4] = b"\xff" * 4 if kind in ("F32", "BF16") else b"\x00\xfc" * 2
    file.write_bytes(content)
    message = r"tiny.gguf: the tensor 'blk.1.ffn_up.weight' must hold finite numbers, got (-inf|nan)"
    with pytest.raises(ValueError, match=message):
        kvjax_models.load(file)
