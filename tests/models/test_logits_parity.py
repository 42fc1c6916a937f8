"""Logits equal Hugging Face's on the same weights, whatever the model's variant."""

import numpy as np
import pytest

import kvjax_models

VARIANTS = ["attention_bias", "mlp_bias", "rope_linear", "rope_llama3", "tied_embeddings"]


@pytest.mark.parametrize("seed", [0, 1])
def test_tiny_models_give_the_logits_of_hugging_face(seed, parity, dense_logits):
    stored = np.load(parity / f"tiny_seed{seed}" / "kvpress.npz")
    model = kvjax_models.load(parity / f"tiny_seed{seed}").params
    np.testing.assert_allclose(dense_logits(model, stored["prompt"]), stored["full_logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_give_the_logits_of_hugging_face(variant, parity, dense_logits):
    stored = np.load(parity / f"variant_{variant}" / "logits.npz")
    model = kvjax_models.load(parity / f"variant_{variant}").params
    np.testing.assert_allclose(dense_logits(model, stored["prompt"]), stored["logits"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", ["attention_bias", "mlp_bias", "tied_embeddings"])
def test_variants_give_the_same_logits_from_gguf(variant, parity, dense_logits, write_gguf, tmp_path):
    stored = np.load(parity / f"variant_{variant}" / "logits.npz")
    file = write_gguf(parity / f"variant_{variant}", tmp_path / "model.gguf")
    model = kvjax_models.load(file).params
    np.testing.assert_allclose(dense_logits(model, stored["prompt"]), stored["logits"], rtol=0, atol=1e-4)


def test_linear_rope_scaling_is_read_from_gguf(parity, dense_logits, write_gguf, tmp_path):
    def scale(writer):
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_rope_scaling_factor(4.0)

    stored = np.load(parity / "variant_rope_linear" / "logits.npz")
    file = write_gguf(parity / "variant_rope_linear", tmp_path / "model.gguf", change=scale)
    model = kvjax_models.load(file).params
    np.testing.assert_allclose(dense_logits(model, stored["prompt"]), stored["logits"], rtol=0, atol=1e-4)


def test_llama3_rope_scaling_is_recovered_from_the_factors_in_gguf(parity, dense_logits, write_gguf, tmp_path):
    wavelengths = 2 * np.pi * 500000.0 ** (np.arange(0, 16, 2) / 16)
    ramp = np.clip((64 / wavelengths - 1) / (4 - 1), 0, 1)
    factors = 1 / ((1 - ramp) / 8 + ramp)
    stored = np.load(parity / "variant_rope_llama3" / "logits.npz")
    file = write_gguf(parity / "variant_rope_llama3", tmp_path / "model.gguf", rope_factors=factors)
    model = kvjax_models.load(file).params
    np.testing.assert_allclose(dense_logits(model, stored["prompt"]), stored["logits"], rtol=0, atol=1e-4)
