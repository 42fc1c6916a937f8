"""A long job's state, and its checkpoints."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from kvjax.duo.passkeys import PasskeyPrompts
from kvjax.duo.recipe import Recipe
from kvjax.extras import extra
from kvjax.fields import Fields
from kvjax.files import check_writable, is_free, read_json, reading, write_json
from kvjax.state import ModelSpec

_ABOUT, _STEPS = "job.json", "steps"


class JobState(NamedTuple):
    """All that must be kept for a job to go on as if it had not stopped; NumPy arrays, which belong to no device.

    There is no state of the data: a step's prompts follow from its number and the seed.

    Attributes:
        step: steps that have been done.
        alphas: of each layer and KV head.
        optimizer: Optax's state.
        losses: [steps, 2], distillation loss and regulariser of each step done, NaN for those to come.
        seconds: that the steps took.
    """

    step: int
    alphas: Float[np.ndarray, "L K"]
    optimizer: Any
    losses: np.ndarray
    seconds: float

    @classmethod
    def first(cls, recipe: Recipe, model: ModelSpec) -> "JobState":
        """The state before the first step: every head is full."""
        alphas = np.ones((model.num_layers, model.num_kv_heads), np.float32)
        optimizer = jax.tree.map(np.asarray, recipe.optimizer().init(alphas))
        return cls(0, alphas, optimizer, np.full((recipe.steps, 2), np.nan, np.float32), 0.0)


class Checkpoints:
    """Orbax checkpoints of a job in a folder; the last two are kept.

    Args:
        manager: Orbax's.
    """

    def __init__(self, manager: Any):
        self._manager = manager

    def restore(self, first: JobState) -> JobState:
        """The latest state, or `first` where there is none."""
        step = self._manager.latest_step()
        if step is None:
            return first
        wanted = _arrays(first)
        with reading(f"{self._manager.directory}/{step}", what="a checkpoint of this job"):
            arrays = self._manager.restore(step, args=orbax_checkpoint().args.StandardRestore(wanted))
        leaves = [arrays[name] for name in wanted if name.startswith("optimizer.")]
        optimizer = jax.tree.unflatten(jax.tree.structure(first.optimizer), leaves)
        return JobState(step, arrays["alphas"], optimizer, arrays["losses"], float(arrays["seconds"]))

    def save(self, state: JobState) -> None:
        """Writes a state; a kill in between leaves the one before."""
        self._manager.save(state.step, args=orbax_checkpoint().args.StandardSave(_arrays(state)))
        self._manager.wait_until_finished()


@contextlib.contextmanager
def open_checkpoints(
    path: str | pathlib.Path, recipe: Recipe, model: ModelSpec, prompts: PasskeyPrompts
) -> Iterator[Checkpoints]:
    """The checkpoints in a folder, which is made if it is not there.

    Raises:
        ValueError: the folder belongs to a job with another recipe, model or text, or holds something else.
        ImportError: Orbax is not installed.
    """
    orbax = orbax_checkpoint()
    folder = pathlib.Path(path).absolute()
    about = {"recipe": dataclasses.asdict(recipe), "model": repr(model), "text": prompts.digest}
    file = folder / _ABOUT
    check_recipe(folder, recipe)
    if file.exists():
        _check_same(Fields(read_json(file), source=file), {name: about[name] for name in ("model", "text")}, folder)
    else:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(file, about)
    options = orbax.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=False)
    with orbax.CheckpointManager(folder / _STEPS, options=options) as manager:
        yield Checkpoints(manager)


def check_recipe(path: str | pathlib.Path, recipe: Recipe) -> None:
    """Raises a ValueError unless a job with this recipe can begin in a folder, or go on there."""
    folder = pathlib.Path(path).absolute()
    check_writable(folder, argument="checkpoints")
    file = folder / _ABOUT
    if not file.exists():
        if not is_free(folder):
            raise ValueError(
                f"`checkpoints` must be a job's folder or an empty one, got {folder}, which holds other things."
            )
        return
    saved = Fields(read_json(file), source=file).nested("recipe")
    for name, value in dataclasses.asdict(recipe).items():
        there = saved.take(name, None)
        if there != value:
            raise ValueError(
                f"`checkpoints` belongs to a job with `{name}` {there}, not {value}: go on with that, or take another "
                f"folder than {folder}."
            )


def _check_same(saved: Fields, asked: dict[str, Any], folder: pathlib.Path) -> None:
    for name, value in asked.items():
        if saved.text(name) != value:
            raise ValueError(f"`checkpoints` belongs to a job with another {name}: {folder}.")


def orbax_checkpoint() -> Any:
    """Orbax, or an ImportError that says what to install."""
    with extra("train", purpose="Checkpoints of a job"):
        import orbax.checkpoint
    return orbax.checkpoint


def _arrays(state: JobState) -> dict[str, Any]:
    leaves = {f"optimizer.{index}": leaf for index, leaf in enumerate(jax.tree.leaves(state.optimizer))}
    return {"alphas": state.alphas, **leaves, "losses": state.losses, "seconds": np.asarray(state.seconds)}
