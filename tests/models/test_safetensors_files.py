"""Safetensors checkpoints: whole and sharded, and what is said of damaged ones."""

import json
import shutil

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax_models
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


def test_an_index_without_a_map_is_named(folder):
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json must be JSON with a 'weight_map'"):
        kvjax_models.load(folder)
