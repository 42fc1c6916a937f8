"""What is to be measured: settings that are checked before anything runs."""

import dataclasses
import hashlib
import zlib
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from kvjax.allocation import check_count
from kvjax.evaluation.contenders import Contender
from kvjax.evaluation.task import Task
from kvjax.evaluation.tasks import TASKS

#: "aware": the question is in the prompt that is compressed. "agnostic": it comes when the text is compressed.
Mode = Literal["aware", "agnostic"]
MODES: tuple[Mode, ...] = get_args(Mode)

#: The task that has no answers: how well a text is foretold.
PERPLEXITY = "perplexity"
TASK_NAMES = (*TASKS, PERPLEXITY)


class Case(NamedTuple):
    """An example to be made.

    Attributes:
        task: its name.
        length: tokens of its prompt.
        depth: where the answer lies; None where the task has no such place.
        sample: its number among those of one task, length and depth.
    """

    task: str
    length: int
    depth: float | None
    sample: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """What is compared on what.

    Attributes:
        contenders: policies at budgets, by `contenders(policies, budgets)`.
        lengths: tokens of the prompts, chat template and question included.
        depths: where tasks with one place put the answer, from 0 to 1.
        tasks: names out of `TASK_NAMES`, or tasks with settings of their own.
        modes: ways to ask.
        samples: examples for each task, length and depth; of a task without a place, as many for each depth.
        seed: of all examples.
        text: what perplexity is measured on; Python's documentation by default.
        batch_size: prompts that go in together; by default as many as there are depths, so that no batch is filled up.
    """

    contenders: tuple[Contender, ...]
    lengths: tuple[int, ...] = (1000, 2000)
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    tasks: tuple[str | Task, ...] = TASK_NAMES
    modes: tuple[Mode, ...] = MODES
    samples: int = 1
    seed: int = 0
    text: str | None = None
    batch_size: int = 5

    def __post_init__(self) -> None:
        for name in ("lengths", "depths", "tasks", "modes"):
            values = tuple(dict.fromkeys(getattr(self, name)))
            if not values:
                raise ValueError(f"`{name}` must have at least one value, got none.")
            object.__setattr__(self, name, values)
        check_count("samples", self.samples, at_least=1, unit="example")
        check_count("batch_size", self.batch_size, at_least=1, unit="prompt")
        check_count("seed", self.seed, at_least=0)
        for length in self.lengths:
            check_count("lengths", length, at_least=1)
        for depth in self.depths:
            if not 0.0 <= depth <= 1.0:
                raise ValueError(f"`depths` must be from 0 to 1, got {depth}.")
        for task in self.tasks:
            if not isinstance(task, Task) and task not in TASK_NAMES:
                raise ValueError(f"`tasks` must be among {', '.join(TASK_NAMES)}, got {task!r}.")
        for mode in self.modes:
            if mode not in MODES:
                raise ValueError(f"`modes` must be among {', '.join(MODES)}, got {mode!r}.")
        if self.text is not None and not self.text.strip():
            raise ValueError("`text` must be a text of words, got none.")
        for contender in self.contenders:
            if isinstance(contender.budget, int) and contender.budget > min(self.lengths):
                raise ValueError(
                    f"`budgets` must not be above the shortest of `lengths`, {min(self.lengths)}, got "
                    f"{contender.budget}: nothing would be compressed."
                )

    def check_positions(self, most: int) -> None:
        """Raises a ValueError if a prompt would be longer than the `most` tokens that a model can read."""
        if max(self.lengths) > most:
            raise ValueError(
                f"`lengths` must not be over the {most} tokens that the model can read, got {max(self.lengths)}."
            )

    @property
    def named_tasks(self) -> dict[str, Task | None]:
        """The tasks by name; None for perplexity."""
        tasks = (task if isinstance(task, Task) else TASKS.get(task) for task in self.tasks)
        return {PERPLEXITY if task is None else task.name: task for task in tasks}

    def cases(self, length: int) -> list[Case]:
        """All examples of a length, in order."""
        cases = []
        for name, task in self.named_tasks.items():
            if task is not None and task.has_depth:
                cases += [Case(name, length, depth, sample) for depth in self.depths for sample in range(self.samples)]
            else:
                cases += [Case(name, length, None, sample) for sample in range(len(self.depths) * self.samples)]
        return cases

    def seed_of(self, case: Case) -> int:
        """The seed of an example: of examples that differ, different ones."""
        depth = -1 if case.depth is None else round(case.depth * 1e6)
        parts = [self.seed, zlib.crc32(case.task.encode()), case.length, depth + 1, case.sample]
        return int(np.random.SeedSequence(parts).generate_state(1)[0])

    def describe(self) -> dict[str, Any]:
        """All settings, in a form that JSON holds: runs with the same can go on in one folder."""
        return {
            "policies": [_described(contender) for contender in self.contenders],
            "lengths": list(self.lengths),
            "depths": list(self.depths),
            "tasks": [PERPLEXITY if task is None else repr(task) for task in self.named_tasks.values()],
            "modes": list(self.modes),
            "samples": self.samples,
            "seed": self.seed,
            "text": None if self.text is None else hashlib.sha256(self.text.encode()).hexdigest()[:16],
            "batch_size": self.batch_size,
        }


def _described(contender: Contender) -> dict[str, Any]:
    make = contender.make
    settings = repr(make) if not callable(make) else getattr(make, "__qualname__", repr(make))
    return {"name": contender.name, "budget": contender.budget, "settings": settings}
