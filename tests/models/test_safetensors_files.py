"""Safetensors checkpoints: whole and sharded, and what is said of damaged ones."""

import json
import resource
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax_models
from kvjax_models.config import LARGEST_SIZES
from kvjax_models.weights import parameters

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"


@pytest.fixture
def folder(parity, tmp_path):
    """A copy of the tiny model, to be damaged."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(parity / "tiny_seed0" / name, tmp_path)
    return tmp_path


@pytest.fixture
def tensors(folder):
    return load_file(folder / "model.safetensors")


@pytest.fixture
def store(folder):
    return lambda tensors: save_file(tensors, folder / "model.safetensors")


def shard(folder, tensors):
    """Splits the checkpoint in two files and an index."""
    names = sorted(tensors)
    halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, half in halves.items():
        save_file({name: tensors[name] for name in half}, folder / file)
    weight_map = {name: file for file, half in halves.items() for name in half}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "model.safetensors").unlink()


def assert_equal(model, other):
    ours, theirs = parameters(model), parameters(other)
    assert ours.keys() == theirs.keys()
    for path, array in ours.items():
        np.testing.assert_array_equal(np.asarray(array), np.asarray(theirs[path]), err_msg=str(path))


def test_kernels_are_the_stored_matrices_transposed(folder, tensors):
    model = kvjax_models.load(folder).params
    np.testing.assert_array_equal(model.layers[0].q_proj.kernel[...], tensors[Q_PROJ].T)
    np.testing.assert_array_equal(model.embedding[...], tensors["model.embed_tokens.weight"])
    assert {array.dtype for array in parameters(model).values()} == {jnp.dtype("float32")}


def test_shards_load_as_the_whole(folder, tensors, parity):
    shard(folder, tensors)
    assert_equal(kvjax_models.load(folder).params, kvjax_models.load(parity / "tiny_seed0").params)


def test_no_tokenizer_file_means_no_tokenizer(folder):
    loaded = kvjax_models.load(str(folder))
    assert loaded.tokenizer is None
    assert loaded.chat_template is None


def test_bfloat16_is_kept(folder, tensors, store):
    store({name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()})
    model = kvjax_models.load(folder).params
    assert {array.dtype for array in parameters(model).values()} == {jnp.dtype("bfloat16")}
    assert model.spec.dtype == "bfloat16"
    expected = tensors[Q_PROJ].T.astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(np.asarray(model.layers[0].q_proj.kernel[...]), expected)


def test_float16_becomes_float32(folder, tensors, store):
    store({name: values.astype(np.float16) for name, values in tensors.items()})
    kernel = kvjax_models.load(folder).params.layers[0].q_proj.kernel[...]
    np.testing.assert_array_equal(kernel, tensors[Q_PROJ].T.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16])
def test_a_dtype_that_is_asked_for_is_given(folder, dtype):
    model = kvjax_models.load(folder, dtype).params
    assert {array.dtype for array in parameters(model).values()} == {jnp.dtype("bfloat16")}


@pytest.mark.parametrize("dtype", ["float16", "int8", "nonsense"])
def test_other_dtypes_are_refused(folder, dtype):
    with pytest.raises(ValueError, match=f"`dtype` must be float32, bfloat16 or None, got '{dtype}'"):
        kvjax_models.load(folder, dtype)


def test_rotary_frequencies_are_surplus_without_harm(folder, tensors, store):
    store(tensors | {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)})
    kvjax_models.load(folder)


def test_an_output_matrix_beside_tied_embeddings_is_ignored(parity, tmp_path):
    shutil.copy(parity / "variant_tied_embeddings" / "config.json", tmp_path)
    tensors = load_file(parity / "variant_tied_embeddings" / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    assert kvjax_models.load(tmp_path).params.lm_head is None


def test_the_end_tokens_for_generation_are_read(folder):
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    assert kvjax_models.load(folder).config.eos_token_ids == (2, 3)


def test_a_missing_tensor_is_named(folder, tensors, store):
    store({name: values for name, values in tensors.items() if name != Q_PROJ})
    with pytest.raises(ValueError, match=rf"{folder} lacks the tensor '{Q_PROJ}', which its configuration"):
        kvjax_models.load(folder)


def test_a_surplus_tensor_is_named(folder, tensors, store):
    store(tensors | {"model.layers.0.self_attn.q_norm.weight": np.ones(16, np.float32)})
    with pytest.raises(ValueError, match=r"model.safetensors holds the tensor .*q_norm.weight', which"):
        kvjax_models.load(folder)


def test_a_layer_too_many_is_surplus(folder):
    config = json.loads((folder / "config.json").read_text()) | {"num_hidden_layers": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"holds the tensor 'model.layers.3.* and 8 more, which"):
        kvjax_models.load(folder)


def test_a_misshapen_tensor_is_named(folder, tensors, store):
    store(tensors | {Q_PROJ: np.ones((64, 128), np.float32)})
    message = rf"model.safetensors: the tensor '{Q_PROJ}' must be \(128, 128\) .*, got \(64, 128\)"
    with pytest.raises(ValueError, match=message):
        kvjax_models.load(folder)


def test_a_tensor_of_another_type_is_named(folder, tensors, store):
    store(tensors | {Q_PROJ: np.ones((128, 128), np.int8)})
    with pytest.raises(ValueError, match=rf"the tensor '{Q_PROJ}' must be F32, F16 or BF16, got I8"):
        kvjax_models.load(folder)


def test_a_file_cut_short_is_named_with_the_tensor(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    # The file is laid out in the order of the names; only its last tensor, model.norm.weight, is after this.
    message = r"model.safetensors is not a whole .* the tensor 'model.layers.3.self_attn.v_proj.weight'"
    with pytest.raises(ValueError, match=message):
        kvjax_models.load(folder)


@pytest.mark.parametrize("content", [b"", b"rubbish", b"<html>not found</html>"])
def test_a_file_that_is_no_safetensors_is_named(folder, content):
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file"):
        kvjax_models.load(folder)


def test_a_folder_without_weights_is_named(folder):
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=rf"{folder} holds no weights: neither model.safetensors nor"):
        kvjax_models.load(folder)


def test_a_folder_without_configuration_is_named(folder):
    (folder / "config.json").unlink()
    (folder / "weights.gguf").touch()
    with pytest.raises(FileNotFoundError, match=r"holds no config.json. Pass one of .*: weights.gguf"):
        kvjax_models.load(folder)


def test_a_configuration_that_is_no_json_is_named(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json is not JSON"):
        kvjax_models.load(folder)


def test_a_refused_configuration_is_named_with_its_file(folder):
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match=r"config.json: `model_type` must be .*'gpt2'"):
        kvjax_models.load(folder)


def test_a_shard_that_is_not_there_is_named(folder, tensors):
    shard(folder, tensors)
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"model-00002-of-00002.safetensors is not there; .* the tensor"):
        kvjax_models.load(folder)


def test_a_shard_that_lacks_a_tensor_of_the_index_is_named(folder, tensors):
    shard(folder, tensors)
    file = folder / "model-00001-of-00002.safetensors"
    names = sorted(tensors)[::2]
    save_file({name: tensors[name] for name in names[1:]}, file)
    with pytest.raises(ValueError, match=rf"{file} lacks the tensor '{names[0]}', which model.safetensors.index"):
        kvjax_models.load(folder)


BAD_INDEXES = {
    "{}": r"`weight_map` is missing",
    "[]": r"must hold a JSON object, got list",
    '{"weight_map": []}': r"`weight_map` must be an object, got \[\]",
    '{"weight_map": {}}': r"lists no tensors in its `weight_map`",
    '{"weight_map": {"lm_head.weight": null}}': r"`weight_map`: `lm_head.weight` is missing",
    '{"weight_map": {"lm_head.weight": 3}}': r"`weight_map`: `lm_head.weight` must be a string, got 3",
    '{"weight_map": {"w": "../model.safetensors"}}': r"`w` must be a file within the checkpoint's folder, got '\.\./m",
    '{"weight_map": {"w": "a/../../b"}}': r"`w` must be a file within the checkpoint's folder, got",
    '{"weight_map": {"w": "/etc/passwd"}}': r"`w` must be a file within the checkpoint's folder, got '/etc/passwd'",
    '{"weight_map": {"w": "C:\\\\w"}}': r"`w` must be a file within the checkpoint's folder, got",
    f'{{"weight_map": {{"w": "{"x" * 256}"}}}}': r"`w` must be a file within the checkpoint's folder, got",
    f'{{"weight_map": {{"w": "{"x/" * 3000}y"}}}}': r"`w` must be a file within the checkpoint's folder, got",
    '{"weight_map": {"w": ""}}': r"`w` must be a file within the checkpoint's folder, got ''",
    '{"weight_map": {"w": "\\u0000"}}': r"`w` must be a file within the checkpoint's folder, got",
    '{"weight_map": ' + "[" * 100_000: r"is nested too deeply",
}


@pytest.mark.parametrize(("content", "message"), BAD_INDEXES.items(), ids=range(len(BAD_INDEXES)))
def test_an_index_that_cannot_be_followed_is_named(folder, content, message):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=rf"index.json.*{message}"):
        kvjax_models.load(folder)


def test_a_single_file_wins_over_an_index_that_was_left_beside_it(folder, tensors, store):
    shard(folder, {name: values * 0 for name, values in tensors.items()})
    store(tensors)
    np.testing.assert_array_equal(kvjax_models.load(folder).params.layers[0].q_proj.kernel[...], tensors[Q_PROJ].T)


def test_shards_in_folders_load_as_the_whole(folder, tensors, parity):
    shard(folder, tensors)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    for number, name in enumerate(sorted(set(index["weight_map"].values()))):
        (folder / f"part{number}").mkdir()
        shutil.move(folder / name, folder / f"part{number}" / "model.safetensors")
        moved = f"./part{number}/model.safetensors"
        index["weight_map"] = {key: moved if file == name else file for key, file in index["weight_map"].items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(kvjax_models.load(folder).params, kvjax_models.load(parity / "tiny_seed0").params)


def test_a_tensor_in_two_shards_is_named_with_both(folder, tensors):
    shard(folder, tensors)
    file = folder / "model-00002-of-00002.safetensors"
    twice = sorted(tensors)[0]
    save_file(load_file(file) | {twice: tensors[twice]}, file)
    with pytest.raises(ValueError, match=rf"holds the tensor '{twice}', and so does {folder}/model-0000"):
        kvjax_models.load(folder)


def test_an_output_matrix_that_differs_from_tied_embeddings_is_not_passed_over(parity, tmp_path):
    shutil.copy(parity / "variant_tied_embeddings" / "config.json", tmp_path)
    tensors = load_file(parity / "variant_tied_embeddings" / "model.safetensors")
    save_file(tensors | {"lm_head.weight": -tensors["model.embed_tokens.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'.*`tie_word_emb"):
        kvjax_models.load(tmp_path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_a_weight_that_is_not_finite_is_named(folder, tensors, store, value, dtype):
    damaged = np.array(tensors[Q_PROJ], dtype)
    damaged[3, 5] = value
    store(tensors | {Q_PROJ: damaged})
    with pytest.raises(
        ValueError, match=rf"model.safetensors: the tensor '{Q_PROJ}' must hold finite numbers, got {value}"
    ):
        kvjax_models.load(folder)


def test_the_largest_finite_weights_are_finite(folder, tensors, store):
    limits = np.finfo(np.float32)
    tensors[Q_PROJ][0, :4] = limits.max, limits.min, -0.0, limits.smallest_subnormal
    store(tensors)
    kvjax_models.load(folder)


def test_a_header_that_names_a_tensor_twice_is_refused(folder):
    file = folder / "model.safetensors"
    entry = '"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{entry},{entry}}}".encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(ValueError, match=r"model.safetensors is not a whole safetensors file: it names 'a' twice"):
        kvjax_models.load(folder)


@pytest.mark.parametrize("name", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
@pytest.mark.parametrize("large", [False, True])
def test_sizes_that_the_weights_contradict_cost_nothing(folder, name, large):
    size = LARGEST_SIZES[name] + (1 if large else 0)
    change = {"hidden_size": size, "head_dim": 16} if name == "hidden_size" else {name: size}
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    message = rf"config.json: `{name}` must be from 1 to {size - 1}" if large else "tensors, too few|must be .* got"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=message):
        kvjax_models.load(folder)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 100_000
