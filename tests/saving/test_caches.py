"""A restored cache goes on as if it had never left, or says what is wrong."""

import dataclasses
import json
import os
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
import kvjax_models
from kvjax.saving.description import digest_of

PROMPT = np.random.default_rng(0).integers(0, 512, 60)
POLICIES = {
    "full": kvjax.Full(),
    "streaming_llm": kvjax.StreamingLLM(budget=16),
    "h2o": kvjax.H2O(budget=16),
    "pyramidkv": kvjax.PyramidKV(budget=24, window=4),
    "ada_kv": kvjax.AdaKV(budget=24, window=4),
    "duo": kvjax.DuoAttention(pattern=kvjax.HeadPattern.of([[0.1, 0.9]] * 4), sinks=2, recent=6),
}


@pytest.mark.parametrize(
    ("policy", "dtype"),
    [*((policy, "float32") for policy in POLICIES), *((policy, "bfloat16") for policy in POLICIES if policy != "duo")],
)
def test_a_restored_cache_continues_bit_for_bit_without_being_told_its_policy(tiny, tmp_path, policy, dtype):
    logits, cache = kvjax.prefill(tiny, PROMPT, policy=POLICIES[policy], max_new_tokens=4, cache_dtype=dtype)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    _, cache = kvjax.decode(tiny, cache, token)
    kvjax.save_cache(tmp_path / "cache", cache, tiny)
    assert sorted(os.listdir(tmp_path)) == ["cache"]
    restored = kvjax.restore_cache(tmp_path / "cache", tiny)
    assert jax.tree.structure(restored) == jax.tree.structure(cache)
    for before, after in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
        assert before.dtype == after.dtype
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    expected, _ = kvjax.decode(tiny, cache, token)
    actual, _ = kvjax.decode(tiny, restored, token)
    np.testing.assert_array_equal(expected, actual)


@pytest.fixture
def saved(saved_once, tmp_path):
    return shutil.copytree(saved_once, tmp_path / "cache")


def change(folder, edit, *, sign=True):
    """Edits the description, and its digest with it, as a program of somebody else's would."""
    about = json.loads((folder / "cache.json").read_text())
    edit(about)
    if sign:
        about["digest"] = digest_of({name: value for name, value in about.items() if name != "digest"})
    (folder / "cache.json").write_text(json.dumps(about))


def test_rejects_another_policy(tiny, saved):
    other = dataclasses.replace(POLICIES["h2o"], sinks=2)
    with pytest.raises(ValueError, match=r"cache.json was saved with another policy: H2O\(sinks=4\), not H2O\(sinks=2"):
        kvjax.restore_cache(saved, tiny, policy=other)
    with pytest.raises(ValueError, match=r"another policy: H2O\(budget=16.*, not TOVA\(budget=16"):
        kvjax.restore_cache(saved, tiny, policy=kvjax.TOVA(budget=16))


@pytest.mark.usefixtures("no_shape_checks")
def test_numbers_of_numpy_are_the_same_settings(tiny, saved, h2o_cache, tmp_path):
    cache = h2o_cache
    policy = kvjax.H2O(budget=16, sinks=np.int64(4))  # pyright: ignore[reportArgumentType]
    assert kvjax.restore_cache(saved, tiny, policy=policy).policy == POLICIES["h2o"]
    # A setting of NumPy's goes into the shapes, too.
    odd = dataclasses.replace(cache.specs[0], kept=tuple(map(np.int64, cache.specs[0].kept)))
    specs = (odd, *cache.specs[1:])
    again = kvjax.Cache(cache.layers, cache.next_position, policy=policy, specs=specs, room=4)
    kvjax.save_cache(tmp_path / "again", again, tiny)
    assert jax.tree.structure(kvjax.restore_cache(tmp_path / "again", tiny)) == jax.tree.structure(cache)


def test_rejects_another_model(tiny, saved, parity):
    with pytest.raises(ValueError, match=r"another model: `num_layers` is 4, not 3"):
        kvjax.restore_cache(saved, kvjax_models.load(parity / "tiny_seed1").params)
    rope = dataclasses.replace(tiny.spec.rope, theta=5000.0)
    with pytest.raises(ValueError, match=r"another model: `rope` is Rope\(theta=.*, not Rope\(theta=5000"):
        kvjax.restore_cache(saved, _with_spec(tiny, rope=rope))
    with pytest.raises(ValueError, match=r"another model: `num_query_heads` is 8, not 4"):
        kvjax.restore_cache(saved, _with_spec(tiny, num_query_heads=4))


class _Model:
    """A model whose spec alone is another."""

    def __init__(self, model, spec):
        self.model, self.spec = model, spec

    def __call__(self, tokens, attend):
        return self.model(tokens, attend)

    def logits(self, hidden):
        return self.model.logits(hidden)


jax.tree_util.register_pytree_node(_Model, lambda m: ((m.model,), m.spec), lambda spec, model: _Model(*model, spec))


def _with_spec(model, **changes):
    return _Model(model, dataclasses.replace(model.spec, **changes))


def test_one_changed_weight_is_another_model_and_other_stop_tokens_are_not(tiny, h2o_cache, tmp_path):
    model = _with_spec(tiny)
    kvjax.save_cache(tmp_path / "cache", h2o_cache, model)
    same = _with_spec(tiny, stop_tokens=(7,), max_positions=99)
    assert kvjax.restore_cache(tmp_path / "cache", same).model.stop_tokens == (7,)
    leaves, tree = jax.tree.flatten(model)
    middle = leaves[len(leaves) // 2]
    place = tuple(size // 2 for size in middle.shape)
    leaves[len(leaves) // 2] = middle.at[place].set(jnp.nextafter(middle[place], jnp.float32(9)))
    with pytest.raises(ValueError, match="another model: its sizes are the same, its weights are not"):
        kvjax.restore_cache(tmp_path / "cache", jax.tree.unflatten(tree, leaves))


def test_a_cache_is_saved_with_its_own_model_only(tiny, h2o_cache, tmp_path):
    with pytest.raises(ValueError, match="`cache` is of another model: `vocab_size` is 512, not 9"):
        kvjax.save_cache(tmp_path / "cache", h2o_cache, _with_spec(tiny, vocab_size=9))
    assert not list(tmp_path.iterdir())


def test_rejects_another_dtype(tiny, saved):
    with pytest.raises(ValueError, match="another dtype: float32, not bfloat16"):
        kvjax.restore_cache(saved, tiny, policy=POLICIES["h2o"], cache_dtype=jnp.bfloat16)


def test_rejects_a_folder_that_is_no_cache(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"must be a folder that `kvjax.save_cache` wrote"):
        kvjax.restore_cache(tmp_path, tiny, policy=kvjax.Full())


def _set(path, value):
    def edit(about):
        *parents, last = path
        for key in parents:
            about = about[key]
        about[last] = value

    return edit


def _without(path):
    def edit(about):
        *parents, last = path
        for key in parents:
            about = about[key]
        del about[last]

    return edit


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_without(["format"]), "is of a kvjax whose format had no version yet"),
        (_set(["format"], 2), "`format` must be 1, which this kvjax reads, got 2"),
        (_without(["room"]), "`room` is missing"),
        (_set(["room"], -1), "`room` must be from 1 to"),
        (_set(["mood"], 1), "`mood` is no field of a saved cache"),
        (_set(["layers", 1, "mood"], 1), r"`layers\[1\]`: `mood` is no field of a saved cache"),
        (_set(["layers", 1, "slots"], [-16, 16]), r"`layers\[1\]`: `slots` must be a list of integers from 1"),
        (_set(["layers", 1, "slots"], [16]), r"`layers\[1\]`: `slots` must have a number for each of the 2 KV heads"),
        (_set(["layers", 1, "kept"], [99, 99]), r"`layers\[1\]`: `kept` must not be over `slots`"),
        (_set(["layers", 1, "slots"], [16, 99]), r"`arrays\[5\]`: `shape` must be \[1, 115, 32\], got \[1, 32, 32\]"),
        (_set(["layers"], []), "`layers` must be of 4, got 0"),
        (_set(["layers"], {}), "`layers` must be a list of objects"),
        (_set(["rows"], 10**12), r"`arrays\[0\]`: `shape` must be|`rows` must be from 1"),
        (_without(["arrays", 3]), r"`arrays\[3\]`: `name` must be '0.lengths', got '0.scores'"),
        (_without(["arrays", -1]), "`arrays` lacks|is not the arrays of a saved cache"),
        (_set(["arrays", 0, "dtype"], "float32"), r"`arrays\[0\]`: `dtype` must be one of 'int32'"),
        (_set(["policy"], 3), "`policy` is no policy"),
        (_set(["policy", "class"], "kvjax.Best"), "policy that is not kvjax's own, Best"),
        (_set(["policy", "class"], "os.system"), r"policy that is not kvjax's own, os.system.*give it as `policy`"),
        (_set(["policy", "class"], ["x"]), "`policy`"),
        (_set(["policy", "fields", "sinks"], -4), "`sinks` must not be negative|sinks"),
        (_set(["policy", "fields", "mood"], 1), "`policy`: kvjax.H2O has no setting 'mood'"),
        (_set(["model", "head_dim"], True), "`head_dim` must be an integer"),
        (_set(["model", "rope"], [[]]), "another model: `rope` is"),
        (_set(["digest"], "0"), "`digest` must be that of the other fields"),
    ],
)
def test_a_description_that_cannot_be_names_its_file_and_field(tiny, saved, edit, message):
    change(saved, edit, sign=message[1:7] != "digest")
    with pytest.raises(ValueError, match=message) as raised:
        kvjax.restore_cache(saved, tiny)
    assert str(saved) in str(raised.value)


def test_an_unsigned_change_is_noticed(tiny, saved):
    change(saved, _set(["layers", 0, "max_length"], 61), sign=False)
    with pytest.raises(ValueError, match="`digest` must be that of the other fields: something has changed"):
        kvjax.restore_cache(saved, tiny)


def test_a_flipped_byte_a_cut_and_missing_arrays_are_noticed(tiny, saved):
    file = saved / "arrays.bin"
    content = file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 1
    for damaged, message in [
        (bytes(flipped), r"arrays.bin is not .*: the bytes of `\d\.\w+` are not those that were written"),
        (content[:-1], rf"arrays.bin is not .*: it has {len(content) - 1:,} bytes, not {len(content):,}"),
        (content + b"x", "arrays.bin is not"),
        (b"", "arrays.bin is not"),
    ]:
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=message):
            kvjax.restore_cache(saved, tiny)
    file.unlink()
    with pytest.raises(ValueError, match=r"arrays.bin is not .*: No such file"):
        kvjax.restore_cache(saved, tiny)
    os.mkfifo(file)
    with pytest.raises(ValueError, match=r"arrays.bin is not .*: it is no regular file"):
        kvjax.restore_cache(saved, tiny)


def test_slots_that_a_kernel_must_not_read_are_refused(tiny, h2o_cache, tmp_path):
    layers = list(h2o_cache.layers)
    layers[2] = layers[2]._replace(lengths=layers[2].lengths + 99)
    specs, policy = h2o_cache.specs, h2o_cache.policy
    wrong = kvjax.Cache(tuple(layers), h2o_cache.next_position, policy=policy, specs=specs, room=4)
    kvjax.save_cache(tmp_path / "cache", wrong, tiny)
    with pytest.raises(ValueError, match=r"arrays.bin: `2.lengths` must be from 0 to each head's slots"):
        kvjax.restore_cache(tmp_path / "cache", tiny)


def test_does_not_overwrite(tiny, h2o_cache, saved):
    with pytest.raises(ValueError, match="must be a new or empty folder"):
        kvjax.save_cache(saved, h2o_cache, tiny)


def test_a_failed_save_leaves_nothing_and_can_be_tried_again(tiny, h2o_cache, tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            kvjax.save_cache(tmp_path / "cache", h2o_cache, tiny)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not os.listdir(tmp_path)
    kvjax.save_cache(tmp_path / "cache", h2o_cache, tiny)
    kvjax.restore_cache(tmp_path / "cache", tiny)
