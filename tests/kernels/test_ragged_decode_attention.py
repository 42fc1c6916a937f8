"""One query token a row over segments of any length, against softmax in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax_kernels import join_rows, ragged_decode_attention, split_rows, write_split

# Nothing, one token, around a block of 128, and full.
LENGTHS = np.asarray([[0, 1, 127], [128, 129, 256]], np.int32)
EQUAL, UNEQUAL, MIXED = (256, 256, 256), (3, 300, 129), (300, 129, 300)
LIMITS = {"float32": 1e-5, "bfloat16": 1e-2}

attend = jax.jit(
    ragged_decode_attention, static_argnames=("segments", "scale", "sinks", "token_attention", "implementation")
)


@functools.cache
def arrays(head_dim: int, group: int, segments: tuple[int, ...], dtype: str = "float32") -> dict[str, jax.Array]:
    """Two rows of everything that the kernel takes."""
    heads, slots = len(segments), sum(segments)
    shapes = {
        "query": (2, group * heads, head_dim),
        "kv": (2, slots, 2 * head_dim),
        "sink_query": (2, group * heads, head_dim),
        "own_key": (2, heads, head_dim),
        "own_value": (2, heads, head_dim),
    }
    keys = jax.random.split(jax.random.key(head_dim + group), len(shapes))
    return {
        name: jax.random.normal(key, shape).astype(dtype)
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def some(given: dict[str, jax.Array], *names: str) -> dict:
    """The named ones of the arrays, and how many sinks a second query is for."""
    chosen: dict = {name: given[name] for name in ("query", "kv", *names)}
    return chosen | ({"sinks": 4} if "sink_query" in names else {})


def poisoned(kv: jax.Array, starts: np.ndarray, lengths: np.ndarray) -> jax.Array:
    """NaN in every slot that no head holds."""
    slots = np.arange(kv.shape[1])
    held = ((slots >= starts[..., None]) & (slots < (starts + lengths)[..., None])).any(1)
    return jnp.where(jnp.asarray(held)[..., None], kv, jnp.nan).astype(kv.dtype)


def whole(kv: jax.Array, segments: tuple[int, ...]) -> jax.Array:
    """Rows of key and value, as they are."""
    del segments
    return kv


def fixed_starts(segments: tuple[int, ...]) -> np.ndarray:
    """The first slot of each head, the same in both rows."""
    return np.tile(np.cumsum([0, *segments[:-1]]), (2, 1)).astype(np.int32)


def expected(starts, lengths, query, kv, *, scale=None, sink_query=None, sinks=0, own_key=None, own_value=None):
    """The four results, a token at a time."""
    query, kv, sink_query, own_key, own_value = (
        np.asarray(np.nan if x is None else x, np.float64) for x in (query, kv, sink_query, own_key, own_value)
    )
    batch, heads, head_dim = query.shape
    group = heads // lengths.shape[1]
    output, log_sum_exp = np.zeros(query.shape), np.full((batch, heads), np.float64(np.float32(-1e30)))
    attention, own_attention = np.zeros(kv.shape[:2]), np.zeros(lengths.shape)
    scale = head_dim**-0.5 if scale is None else scale
    for row in range(batch):
        for head in range(heads):
            kv_head = head // group
            start, length = starts[row, kv_head], lengths[row, kv_head]
            scores, values = [], []
            for slot in range(length):
                asks = sink_query if slot < sinks else query
                scores.append(asks[row, head] @ kv[row, start + slot, :head_dim] * scale)
                values.append(kv[row, start + slot, head_dim:])
            if own_key.ndim:
                scores.append(query[row, head] @ own_key[row, kv_head] * scale)
                values.append(own_value[row, kv_head])
            if scores:
                total = np.exp(scores).sum()
                log_sum_exp[row, head] = np.log(total)
                weights = np.exp(scores) / total
                attention[row, start : start + length] += weights[:length]
                own_attention[row, kv_head] += weights[length:].sum()
                output[row, head] = weights @ np.asarray(values)
    return output, log_sum_exp, attention, own_attention


def assert_equal_to(result, reference, dtype="float32"):
    for name, actual, wanted in zip(result._fields, result, reference, strict=True):
        largest = np.abs(np.asarray(actual, np.float64) - wanted).max()
        assert largest <= LIMITS[dtype], f"{name}: the largest difference is {largest:.1e}"


SINKS, OWN = ("sink_query",), ("own_key", "own_value")


@pytest.mark.parametrize("layout", [whole, split_rows])
@pytest.mark.parametrize("segments", [EQUAL, UNEQUAL, MIXED])
@pytest.mark.parametrize(
    ("head_dim", "group", "names"),
    [(16, 1, ()), (16, 1, SINKS + OWN), (32, 3, OWN), (64, 7, SINKS + OWN), (80, 4, SINKS), (128, 8, OWN)],
)
def test_every_head_and_row_has_a_length_of_its_own(head_dim, group, segments, names, layout):
    given = some(arrays(head_dim, group, segments), *names)
    starts, lengths = fixed_starts(segments), np.minimum(LENGTHS, segments)
    wanted = expected(starts, lengths, **given)
    given["kv"] = layout(poisoned(given["kv"], starts, lengths), segments)
    assert_equal_to(attend(lengths=lengths, segments=segments, token_attention=True, **given), wanted)


@pytest.mark.parametrize(("head_dim", "group", "names"), [(16, 1, ()), (64, 3, OWN), (128, 4, OWN)])
def test_every_row_may_have_starts_of_its_own(head_dim, group, names):
    given = some(arrays(head_dim, group, EQUAL), *names)
    # Heads lie in any order, with gaps or none between them; one is empty.
    starts = np.asarray([[700, 700, 0], [30, 640, 511]], np.int32)
    lengths = np.asarray([[0, 68, 600], [480, 128, 129]], np.int32)
    wanted = expected(starts, lengths, **given)
    given["kv"] = poisoned(given["kv"], starts, lengths)
    assert_equal_to(attend(lengths=lengths, starts=starts, token_attention=True, **given), wanted)


@pytest.mark.parametrize("names", [(), SINKS, OWN, SINKS + OWN])
def test_the_reference_is_textbook_attention(names):
    given = some(arrays(16, 3, UNEQUAL), *names)
    starts, lengths = fixed_starts(UNEQUAL), np.minimum(LENGTHS, UNEQUAL)
    wanted = expected(starts, lengths, **given)
    given["kv"] = poisoned(given["kv"], starts, lengths)
    settings = {"token_attention": True, "implementation": "reference"}
    segmented = ragged_decode_attention(lengths=jnp.asarray(lengths), segments=UNEQUAL, **settings, **given)
    assert_equal_to(segmented, wanted)
    if "sink_query" not in names:
        started = ragged_decode_attention(lengths=jnp.asarray(lengths), starts=jnp.asarray(starts), **settings, **given)
        assert_equal_to(started, wanted)


@pytest.mark.parametrize("layout", [whole, split_rows])
@pytest.mark.parametrize("segments", [EQUAL, UNEQUAL])
@pytest.mark.parametrize(("head_dim", "group"), [(64, 3), (128, 8)])
def test_bfloat16_stays_close_to_its_inputs_in_float64(head_dim, group, segments, layout):
    given = some(arrays(head_dim, group, segments, "bfloat16"), *SINKS, *OWN)
    starts, lengths = fixed_starts(segments), np.minimum(LENGTHS, segments)
    wanted = expected(starts, lengths, **given)
    given["kv"] = layout(poisoned(given["kv"], starts, lengths), segments)
    result = attend(lengths=lengths, segments=segments, token_attention=True, **given)
    assert {x.dtype for x in result} == {jnp.dtype("float32")}
    assert_equal_to(result, wanted, "bfloat16")


@pytest.mark.parametrize("layout", [whole, split_rows])
def test_a_bfloat16_cache_takes_float32_queries(layout):
    given = some(arrays(64, 3, EQUAL), *OWN)
    rows = given.pop("kv").astype(jnp.bfloat16)
    result = attend(kv=layout(rows, EQUAL), lengths=LENGTHS, segments=EQUAL, token_attention=True, **given)
    assert_equal_to(result, expected(fixed_starts(EQUAL), LENGTHS, kv=rows, **given), "bfloat16")


@pytest.mark.parametrize("segments", [EQUAL, UNEQUAL, MIXED])
def test_split_rows_are_put_together_as_they_were(segments):
    rows = arrays(16, 3, segments)["kv"]
    apart = split_rows(rows, segments)
    np.testing.assert_array_equal(join_rows(apart, segments), rows)
    for head, (start, slots) in enumerate(zip(fixed_starts(segments)[0], segments, strict=True)):
        group = list(dict.fromkeys(segments)).index(slots)
        place = [h for h, size in enumerate(segments) if size == slots].index(head)
        mine = np.asarray(rows[:, start : start + slots])
        np.testing.assert_array_equal(apart.keys[group][:, place], mine[..., :16].swapaxes(1, 2))
        np.testing.assert_array_equal(apart.values[group][:, place], mine[..., 16:])


@pytest.mark.parametrize("segments", [EQUAL, UNEQUAL, MIXED])
def test_a_token_is_written_where_it_belongs_and_nowhere_else(segments):
    given = arrays(16, 3, segments)
    slots = jnp.asarray([[2, -1, 128], [0, 5, segments[2]]], jnp.int32)
    written = write_split(split_rows(given["kv"], segments), segments, slots, given["own_key"], given["own_value"])
    wanted = np.array(given["kv"])
    for row, head in ((0, 0), (0, 2), (1, 0), (1, 1)):
        place = fixed_starts(segments)[0, head] + int(slots[row, head])
        wanted[row, place] = np.concatenate([given["own_key"][row, head], given["own_value"][row, head]])
    np.testing.assert_array_equal(join_rows(written, segments), wanted)


def test_the_reference_reads_split_rows_and_the_kernels_do_not():
    given = some(arrays(16, 3, MIXED), *SINKS, *OWN)
    lengths = np.minimum(LENGTHS, MIXED)
    wanted = expected(fixed_starts(MIXED), lengths, **given)
    given["kv"] = split_rows(given["kv"], MIXED)
    settings = {"lengths": jnp.asarray(lengths), "segments": MIXED, "token_attention": True}
    assert_equal_to(ragged_decode_attention(implementation="reference", **settings, **given), wanted)
    for kernel in ("tpu-interpret", "gpu-interpret"):
        with pytest.raises(NotImplementedError, match="cannot do this: it reads rows of key and value"):
            ragged_decode_attention(implementation=kernel, **settings, **given)


@pytest.mark.usefixtures("no_shape_checks")
def test_rows_that_are_split_by_other_segments_are_an_error():
    given = some(arrays(16, 3, EQUAL))
    given["kv"] = split_rows(given["kv"], EQUAL)
    with pytest.raises(ValueError, match=r"`kv` must be split by `segments`, \(300, 129, 300\), got arrays of"):
        ragged_decode_attention(lengths=jnp.asarray(LENGTHS), segments=MIXED, **given)
    with pytest.raises(ValueError, match="`kv` that is split needs `segments`, got `starts`"):
        ragged_decode_attention(lengths=jnp.asarray(LENGTHS), starts=jnp.zeros((2, 3), jnp.int32), **given)


def test_scores_take_the_given_scale():
    given = some(arrays(16, 3, EQUAL), *OWN)
    result = attend(lengths=LENGTHS, segments=EQUAL, scale=0.7, token_attention=True, **given)
    assert_equal_to(result, expected(fixed_starts(EQUAL), LENGTHS, scale=0.7, **given))


def test_large_scores_do_not_overflow():
    given = some(arrays(16, 3, EQUAL))
    # Scores of thousands: the best token gets everything.
    result = attend(given["query"] * 3000, given["kv"], LENGTHS, segments=EQUAL)
    assert np.isfinite(result.output).all()
    keys = np.asarray(given["kv"]).reshape(2, 3, 256, 32)
    scores = np.einsum("bkgd,bksd->bkgs", np.asarray(given["query"]).reshape(2, 3, 3, 16), keys[..., :16])
    scores = np.where(np.arange(256) < LENGTHS[:, :, None, None], scores, -np.inf)
    best = np.take_along_axis(keys[..., 16:], scores.argmax(-1)[..., None], axis=2).reshape(2, 9, 16)
    np.testing.assert_allclose(result.output[1], best[1], atol=1e-5)


def test_a_token_alone_attends_to_itself():
    given = some(arrays(16, 3, EQUAL), *OWN)
    given["kv"] = jnp.full_like(given["kv"], jnp.nan)
    result = attend(lengths=np.zeros((2, 3), np.int32), segments=EQUAL, token_attention=True, **given)
    np.testing.assert_allclose(result.output, jnp.repeat(given["own_value"], 3, axis=1), rtol=1e-6)
    np.testing.assert_allclose(result.own_attention, 3.0, rtol=1e-6)
    np.testing.assert_array_equal(result.token_attention, 0.0)


def test_token_attention_is_given_only_when_asked_for():
    result = attend(lengths=LENGTHS, segments=EQUAL, **some(arrays(16, 1, EQUAL)))
    assert result.token_attention is None
    assert result.own_attention is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv": (2, 768, 24)}, r"`kv` rows must hold key and value, 2 \* 16 wide, got 24"),
        ({"segments": (256, 256)}, r"`segments` must add up to the 768 slots of `kv`, got \(256, 256\)"),
        ({"lengths": (2, 2)}, r"`lengths` must be \[2, 3\], got \[2, 2\]"),
        ({"lengths": (1, 3)}, r"`lengths` must be \[2, 3\], got \[1, 3\]"),
        ({"query": (2, 4, 16)}, r"4 query heads do not group over 3 KV heads"),
        ({"segments": None}, r"one of `segments` and `starts` must be given, got both or neither"),
        ({"starts": (2, 3)}, r"one of `segments` and `starts` must be given, got both or neither"),
        ({"segments": None, "starts": (2, 3), "sink_query": (2, 3, 16), "sinks": 4}, r"`sink_query` needs `segments`"),
        ({"own_key": (2, 3, 16)}, r"`own_key` and `own_value` go together"),
        ({"sinks": 4}, r"`sink_query` and `sinks` go together, got sinks = 4"),
        ({"sink_query": (2, 3, 16)}, r"`sink_query` and `sinks` go together, got sinks = 0"),
        ({"implementation": "magic"}, r"`implementation` must be one of reference, xla, .* got 'magic'"),
    ],
)
@pytest.mark.usefixtures("no_shape_checks")
def test_says_which_argument_does_not_fit(change, message):
    arguments = {"query": (2, 3, 16), "kv": (2, 768, 32), "lengths": (2, 3), "segments": EQUAL, **change}
    for name in arguments.keys() - {"segments", "sinks", "implementation"}:
        arguments[name] = jnp.zeros(arguments[name], jnp.int32 if name in ("lengths", "starts") else jnp.float32)
    with pytest.raises(ValueError, match=message):
        ragged_decode_attention(**arguments)
