"""`identify`: learns which of a model's heads retrieve.

L layers, K KV heads, B prompts, T tokens.
"""

import contextlib
import dataclasses
import functools
import json
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kvjax._version import __version__
from kvjax.allocation import check_count
from kvjax.duo.distillation import LayeredModel, distillation
from kvjax.duo.job import JobState, open_checkpoints
from kvjax.duo.passkeys import Example, PasskeyPrompts
from kvjax.duo.recipe import Recipe
from kvjax.files import write_together
from kvjax.head_pattern import HeadPattern
from kvjax.model import check_model
from kvjax.prompts import Tokenizer
from kvjax.shipped_patterns import model_sizes
from kvjax.state import ModelSpec

#: The file beside a pattern that tells how it was learned.
TRAINING = "training.json"


class Progress(NamedTuple):
    """A step that has been done.

    Attributes:
        step: how many have been done.
        steps: how many there will be.
        length: tokens of the step's prompts.
        loss: the distillation loss.
        regulariser: the mean of |alpha|, unweighted.
        over_half: share of heads whose alpha is over 0.5.
        seconds_left: until the end, by the time that the steps of this run took.
    """

    step: int
    steps: int
    length: int
    loss: float
    regulariser: float
    over_half: float
    seconds_left: float


class Identification(NamedTuple):
    """What has been learned.

    Attributes:
        pattern: alpha of every head.
        model: whose heads they are.
        recipe: how.
        losses: [steps], the distillation loss at each step.
        regularisers: [steps], the mean of |alpha| at each step.
        seconds: that the steps took, those before a resumption included.
    """

    pattern: HeadPattern
    model: ModelSpec
    recipe: Recipe
    losses: np.ndarray
    regularisers: np.ndarray
    seconds: float

    def save(self, folder: str | pathlib.Path) -> None:
        """Writes the pattern in the published format, and beside it `training.json`: how it was learned.

        All together: an older pattern there stays whole until this one is.
        """
        # Single steps differ by their prompts.
        last = max(self.recipe.steps // 10, 1)
        about = {
            "model": model_sizes(self.model),
            "dtype": self.model.dtype,
            "recipe": dataclasses.asdict(self.recipe),
            "seconds": round(self.seconds, 1),
            f"mean_loss_of_last_{last}_steps": round(float(self.losses[-last:].mean()), 6),
            f"mean_alpha_of_last_{last}_steps": round(float(self.regularisers[-last:].mean()), 6),
            "kvjax": __version__,
        }
        write_together(folder, self.pattern.files | {TRAINING: json.dumps(about, indent=1) + "\n"})


def identify(
    params: LayeredModel,
    tokenizer: Tokenizer,
    *,
    recipe: Recipe | None = None,
    haystack: str | None = None,
    checkpoints: str | pathlib.Path | None = None,
    checkpoint_every: int = 20,
    mesh: jax.sharding.Mesh | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
) -> Identification:
    """Learns which KV heads need the full cache, by DuoAttention's optimisation (arXiv 2410.10819).

    Every head's output is alpha of full attention and 1 - alpha of streaming attention; the alphas are trained so
    that the model reproduces passkeys from a long text as it does with full attention, while their mean is held
    down. The model stays as it is.

    Args:
        params: the model, in float32 or bfloat16.
        tokenizer: of the model; its chat template is used if it has one.
        recipe: the settings; `Recipe()` by default.
        haystack: plain text to hide passkeys in; Python's documentation by default.
        checkpoints: a folder; a job that was stopped goes on from there, to the alphas that it would have given.
        checkpoint_every: steps between two checkpoints.
        mesh: devices to spread a batch over; `batch_size` must be a multiple of their number. The one that holds
            `params` by default.
        report: called after each step.

    Raises:
        ValueError: prompts longer than the model can read or too short for the passkeys, a model that cannot be
            run layer by layer, or checkpoints of another job.
        FloatingPointError: a loss or a derivative that is not finite.
        ImportError: Optax or Orbax is not installed.
    """
    recipe = Recipe() if recipe is None else recipe
    check_count("checkpoint_every", checkpoint_every, at_least=1, unit="step")
    model = _check_layered(params)
    recipe.check_positions(model.spec.max_positions)
    prompts = PasskeyPrompts(tokenizer, haystack=haystack, passkeys=recipe.passkeys, size=recipe.passkey_size)
    prompts.example(recipe.min_length, np.random.default_rng(recipe.seed))  # Raises where it does not fit.
    if mesh is not None:
        if recipe.batch_size % mesh.size:
            raise ValueError(
                f"`batch_size` must be a multiple of the {mesh.size} devices of `mesh`, got {recipe.batch_size}."
            )
        # Without types of axes, whatever the caller's has: the compiler spreads the work, not the types.
        mesh = jax.sharding.Mesh(mesh.devices, mesh.axis_names)
        model = jax.device_put(model, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    first = JobState.first(recipe, model.spec)
    job = contextlib.nullcontext()
    if checkpoints is not None:
        job = open_checkpoints(checkpoints, recipe, model.spec, prompts)
    with job as saved:
        state = first if saved is None else saved.restore(first)
        watch = _Watch(recipe)
        while state.step < recipe.steps:
            state, progress = _step(state, model, recipe, prompts, mesh, watch)
            if saved is not None and (state.step % checkpoint_every == 0 or state.step == recipe.steps):
                saved.save(state)
            report(progress)
    pattern = HeadPattern.of(state.alphas, sinks=recipe.sinks, recent=recipe.recent)
    losses, regularisers = state.losses.T
    return Identification(pattern, model.spec, recipe, losses, regularisers, state.seconds)


def _check_layered(params: object) -> LayeredModel:
    model = check_model(params)
    if isinstance(model, LayeredModel):
        return model
    raise ValueError(
        "`params` must be a model that can be run layer by layer, with `embed`, `layers` and `norm` as "
        f"`kvjax_models.Llama` has them; got {type(params).__name__}."
    )


def _step(
    state: JobState,
    model: LayeredModel,
    recipe: Recipe,
    prompts: PasskeyPrompts,
    mesh: jax.sharding.Mesh | None,
    watch: "_Watch",
) -> tuple[JobState, Progress]:
    started = time.perf_counter()
    examples = recipe.batch(state.step, prompts)
    together = 1 if mesh is None else mesh.size
    parts = [examples[first : first + together] for first in range(0, len(examples), together)]
    results = [_loss_and_gradient(part, state.alphas, model, recipe, mesh) for part in parts]
    loss = float(np.mean([loss for loss, _ in results]))
    gradient = np.mean([gradient for _, gradient in results], axis=0)
    length = len(examples[0].tokens)
    if not (np.isfinite(loss) and np.isfinite(gradient).all()):
        raise FloatingPointError(
            f"the loss of step {state.step + 1} is {loss}, with {np.isfinite(gradient).mean():.0%} of its derivatives "
            f"finite, for prompts of {length} tokens: the model's arithmetic overflows or its parameters are not "
            "finite. Try it in float32."
        )
    alphas, optimizer = jax.tree.map(np.asarray, _updated(state.alphas, gradient, state.optimizer, recipe))
    losses = state.losses.copy()
    losses[state.step] = loss, np.abs(state.alphas).mean()
    seconds = time.perf_counter() - started
    watch.add(length, seconds)
    state = JobState(state.step + 1, alphas, optimizer, losses, state.seconds + seconds)
    regulariser, over_half = float(np.abs(alphas).mean()), float((alphas > 0.5).mean())
    return state, Progress(
        state.step, recipe.steps, length, loss, regulariser, over_half, watch.seconds_left(state.step)
    )


def _loss_and_gradient(
    examples: list[Example],
    alphas: Float[np.ndarray, "L K"],
    model: LayeredModel,
    recipe: Recipe,
    mesh: jax.sharding.Mesh | None,
) -> tuple[float, Float[np.ndarray, "L K"]]:
    tokens, labels = (np.stack(x) for x in zip(*examples, strict=True))
    if mesh is not None:
        # Every device takes a row.
        rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(mesh.axis_names))
        tokens, labels = jax.device_put((tokens, labels), rows)
    loss, gradient = distillation(
        model, jnp.asarray(alphas), jnp.asarray(tokens), jnp.asarray(labels), recipe.streaming
    )
    return float(loss), np.asarray(gradient)


@functools.partial(jax.jit, static_argnames="recipe")
def _updated(
    alphas: Float[Array, "L K"], gradient: Float[Array, "L K"], optimizer: Any, recipe: Recipe
) -> tuple[Float[Array, "L K"], Any]:
    """The next alphas, in [0, 1], and the optimizer's next state."""
    # The mean of |alpha| is what 0.05 fits; the paper writes a sum, its code takes the mean.
    gradient += recipe.regularisation * jnp.sign(alphas) / alphas.size
    # Optax computes with integer counts and floats together.
    with jax.numpy_dtype_promotion("standard"):
        change, optimizer = recipe.optimizer().update(gradient, optimizer, alphas)
    return jnp.clip(alphas + jnp.asarray(change), 0.0, 1.0), optimizer


class _Watch:
    """Tells how long the rest will take, from the time that each length has taken."""

    def __init__(self, recipe: Recipe):
        self._recipe = recipe
        self._seconds: dict[int, list[float]] = {}

    def add(self, length: int, seconds: float) -> None:
        self._seconds.setdefault(length, []).append(seconds)

    def seconds_left(self, step: int) -> float:
        # The median: the first step of a length compiles.
        taken = {length: statistics.median(seconds) for length, seconds in self._seconds.items()}
        a_token = sum(taken.values()) / sum(taken)
        lengths = map(self._recipe.length, range(step, self._recipe.steps))
        return sum(taken.get(length, length * a_token) for length in lengths)
