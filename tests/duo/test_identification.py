"""`identify`: finds the head that must retrieve, goes on after a kill to the same alphas, and says what is wrong."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.duo import Recipe, identify

SHORT = Recipe(steps=6, min_length=150, max_length=200, lengths=2, sinks=4, recent=16, passkeys=3, passkey_size=3)


class KilledError(Exception):
    """What stops a job in a test."""


def test_finds_the_one_head_that_must_retrieve(copying_model, words, haystack):
    recipe = dataclasses.replace(SHORT, steps=60, lengths=1, max_length=150, learning_rate=0.1, regularisation=0.003)
    found = identify(copying_model, words, recipe=recipe, haystack=haystack)
    scores = np.asarray(found.pattern.scores)
    assert scores[1, 0] > 0.9
    scores[1, 0] = 0.0
    assert scores.max() < 0.2
    assert (found.pattern.sinks, found.pattern.recent) == (4, 16)


def test_a_killed_job_goes_on_to_the_same_alphas(make_plain, words, haystack, tmp_path):
    model = make_plain("float32")

    def run(**settings):
        return identify(model, words, recipe=SHORT, haystack=haystack, checkpoint_every=2, **settings)

    def killed(progress):
        if progress.step == 5:
            raise KilledError

    whole = run()
    with pytest.raises(KilledError):
        run(checkpoints=tmp_path / "job", report=killed)
    steps = []
    resumed = run(checkpoints=tmp_path / "job", report=lambda progress: steps.append(progress.step))
    assert steps == [5, 6]
    assert resumed.pattern == whole.pattern
    np.testing.assert_array_equal(resumed.losses, whole.losses)
    np.testing.assert_array_equal(resumed.regularisers, whole.regularisers)
    # A finished job gives its result again, without a step.
    assert run(checkpoints=tmp_path / "job", report=killed).pattern == whole.pattern
    other = identify(model, words, recipe=dataclasses.replace(SHORT, seed=1), haystack=haystack)
    assert other.pattern != whole.pattern

    with pytest.raises(ValueError, match="`checkpoints` belongs to a job with `steps` 6, not 7"):
        identify(
            model, words, recipe=dataclasses.replace(SHORT, steps=7), haystack=haystack, checkpoints=tmp_path / "job"
        )
    with pytest.raises(ValueError, match="`checkpoints` belongs to a job with another text"):
        identify(model, words, recipe=SHORT, haystack="Anna walks.", checkpoints=tmp_path / "job")


def test_what_is_saved_reads_as_a_pattern_and_tells_how_it_was_learned(make_plain, words, haystack, tmp_path):
    model = make_plain("float32")
    progress = []
    found = identify(
        model, words, recipe=dataclasses.replace(SHORT, steps=2), haystack=haystack, report=progress.append
    )
    found.save(tmp_path)
    assert kvjax.HeadPattern.load(tmp_path) == found.pattern
    about = json.loads((tmp_path / "training.json").read_text())
    assert about["recipe"]["steps"] == 2
    assert about["model"]["num_kv_heads"] == 2
    assert about["mean_loss_of_last_1_steps"] == pytest.approx(found.losses[-1], abs=1e-6)
    assert [(p.step, p.steps) for p in progress] == [(1, 2), (2, 2)]
    assert progress[-1].regulariser == pytest.approx(np.mean(found.pattern.scores))
    assert progress[-1].seconds_left == 0.0


def test_the_schedule_rises_from_a_tenth_holds_and_falls_back():
    recipe = Recipe(steps=50, learning_rate=0.02)
    optimizer = recipe.optimizer()
    alphas = jnp.ones((1, 1))
    state = optimizer.init(alphas)
    sizes = []
    with jax.numpy_dtype_promotion("standard"):
        for _ in range(50):
            # The first moment over the root of the second is 1 for a constant gradient.
            change, state = optimizer.update(jnp.ones((1, 1)), state, alphas)
            sizes.append(float(-jnp.asarray(change)[0, 0]))
    np.testing.assert_allclose(sizes[0], 0.002, rtol=1e-3)
    np.testing.assert_allclose(sizes[5], 0.011, rtol=1e-3)
    np.testing.assert_allclose(sizes[10:40], 0.02, rtol=1e-3)
    np.testing.assert_allclose(sizes[45], 0.011, rtol=1e-3)
    assert sizes[49] < 0.004


def test_lengths_are_spread_from_the_shortest_to_the_longest():
    recipe = Recipe(min_length=100, max_length=800, lengths=4)
    assert {recipe.length(step) for step in range(100)} == {100, 200, 400, 800}


def test_a_loss_that_is_not_finite_stops_the_job(make_plain, words, haystack):
    model = make_plain("float32")
    model.layers[1] = model.layers[1]._replace(inner=model.layers[1].inner.at[0, 0].set(jnp.nan))
    with pytest.raises(FloatingPointError, match=r"the loss of step 1 is nan.*for prompts of \d+ tokens"):
        identify(model, words, recipe=SHORT, haystack=haystack)


@pytest.mark.usefixtures("no_shape_checks")
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_length": 5000}, r"`max_length` must not be over the 4096 tokens that the model can read, got 5000"),
        ({"min_length": 60}, r"`min_length` must leave room for 3 passkeys.*which take \d+ tokens; got 60"),
        ({"min_length": 300}, "`max_length` must not be under `min_length`, got 200 and 300"),
        ({"steps": 0}, "`steps` must be at least 1"),
        ({"recent": 0}, "`recent` must be at least 1"),
        ({"learning_rate": float("nan")}, "`learning_rate` must be a positive number, got nan"),
        ({"regularisation": -1.0}, "`regularisation` must be a positive number, got -1.0"),
    ],
)
def test_settings_that_cannot_be_are_errors(make_plain, words, haystack, settings, message):
    with pytest.raises(ValueError, match=message):
        identify(make_plain("float32"), words, recipe=dataclasses.replace(SHORT, **settings), haystack=haystack)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_model_without_layers_and_a_folder_with_other_things_are_errors(make_plain, words, haystack, tmp_path):
    model = make_plain("float32")
    parts = {name: getattr(model, name) for name in ("spec", "logits", "embed", "norm")}
    other = type("Other", (), {**parts, "__call__": lambda self, tokens, attend: tokens})()
    with pytest.raises(ValueError, match=r"run layer by layer, with `embed`, `layers` and `norm`.*got Other"):
        identify(other, words, recipe=SHORT)  # pyright: ignore[reportArgumentType]
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="`checkpoints` must be a job's folder or an empty one"):
        identify(model, words, recipe=SHORT, haystack=haystack, checkpoints=tmp_path)


@pytest.mark.usefixtures("no_shape_checks")
def test_a_batch_must_divide_over_the_devices(make_plain, words, haystack):
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    with pytest.raises(ValueError, match="`batch_size` must be a multiple of the 2 devices of `mesh`, got 1"):
        identify(make_plain("float32"), words, recipe=SHORT, haystack=haystack, mesh=mesh)  # pyright: ignore[reportArgumentType]


_TWO_DEVICES = """
import dataclasses, importlib.util, sys
import jax, numpy as np
from kvjax.duo import Recipe, identify
module = importlib.util.spec_from_file_location("conftest", sys.argv[1])
conftest = importlib.util.module_from_spec(module)
module.loader.exec_module(conftest)
model = conftest.make_plain_model("float32")
recipe = Recipe(steps=2, min_length=150, max_length=150, lengths=1, batch_size=4, sinks=4, recent=16,
    passkeys=3, passkey_size=3, regularisation=0.01)
results = []
for mesh in (None, jax.make_mesh((2,), ("data",))):
    text = "Anna walks home. Ben runs to town."
    found = identify(model, conftest.Words(256), recipe=recipe, haystack=text, mesh=mesh)
    results.append((found.losses, np.asarray(found.pattern.scores)))
np.testing.assert_allclose(results[0][0], results[1][0], rtol=1e-4, atol=1e-9)
np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-4)
print("same on", len(jax.devices()), "devices")
"""


def test_two_devices_that_share_a_batch_learn_what_one_does():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    conftest = __file__.replace("test_identification.py", "conftest.py")
    done = subprocess.run(
        [sys.executable, "-c", _TWO_DEVICES, conftest], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stdout == "same on 2 devices\n", done.stderr
