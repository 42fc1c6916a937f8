"""`evaluate`: measures what policies at budgets still know of long prompts."""

import pathlib
import platform
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from kvjax._version import __version__
from kvjax.evaluation.experiment import Experiment
from kvjax.evaluation.programs import drop_programs_if_many
from kvjax.evaluation.records import Folder, Record, described, record_key
from kvjax.evaluation.runner import Runner, Wanted
from kvjax.evaluation.summary import Summary, measured_sizes, summarised
from kvjax.evaluation.table import markdown
from kvjax.evaluation.units import Unit, make_units
from kvjax.files import write_text
from kvjax.model import Model, check_model
from kvjax.prompts import Tokenizer
from kvjax.steps import dtype_name

TABLE = "table.md"


class Progress(NamedTuple):
    """How far a run is.

    Attributes:
        done: answers that are there, those of earlier runs included.
        total: answers that there will be.
        label: the contender that answered last.
        length: tokens of its prompts.
        seconds_left: by the time that the answers of this run took.
    """

    done: int
    total: int
    label: str
    length: int
    seconds_left: float


def evaluate(
    params: Model,
    tokenizer: Tokenizer,
    experiment: Experiment,
    *,
    out: str | pathlib.Path,
    model_name: str = "model",
    cache_dtype: object = None,
    command: Sequence[str] = (),
    report: Callable[[Progress], None] = lambda progress: None,
) -> Summary:
    """Runs every task with every policy at every budget, and writes results, a manifest and a table to a folder.

    One prefill serves all policies and budgets that attend to a prompt in full, asked both ways. Answers are the best
    token each time. A run that was stopped goes on in its folder where it was, to the same table.

    Args:
        params: the model.
        tokenizer: of the model; its chat template is used if it has one.
        experiment: what is compared on what.
        out: the folder: results.jsonl, manifest.json, table.md.
        model_name: for the manifest; runs of one folder have the same.
        cache_dtype: of cached keys and values; the model's by default.
        command: for the manifest.
        report: called after each policy's answers to a batch.

    Raises:
        ValueError: prompts longer than the model can read or too short for a task, a budget that a policy cannot
            have, or a folder of another run.
    """
    model = check_model(params)
    experiment.check_positions(model.spec.max_positions)
    about = described(experiment, model=model_name) | {
        "spec": repr(model.spec),
        "cache_dtype": dtype_name(cache_dtype) or model.spec.dtype,
    }
    units = make_units(experiment, tokenizer)
    _check_budgets(experiment, units.units, model)
    folder = Folder(out, about)
    environment = _environment(command)
    folder.write_manifest(**environment, finished=False)
    runner = Runner(model, tokenizer, experiment, units, cache_dtype=cache_dtype)
    watch = _Watch(report, experiment, runner, units.units, folder)
    for unit in units.units:
        missing = _missing(experiment, runner, unit, folder)
        if missing:
            for records in runner.run(unit, missing):
                folder.add(records)
                watch.tell(records)
                drop_programs_if_many()
    summary = summarised(list(folder.records.values()), experiment)
    write_text(folder.path / TABLE, markdown(summary, model_name=model_name))
    folder.write_manifest(
        **environment, finished=True, seconds_since_it_went_on=watch.seconds, measured=measured_sizes(summary)
    )
    return summary


def _check_budgets(experiment: Experiment, units: Sequence[Unit], model: Model) -> None:
    """Raises a ValueError if a policy cannot have its budget of some prompt, before anything has run."""
    for contender in experiment.contenders:
        for unit in units:
            shortest = min(len(item.parts.context) for item in unit.items)
            contender.policy(model.spec, unit.items[0].case.length).check_lengths(np.asarray([shortest]))


def _missing(experiment: Experiment, runner: Runner, unit: Unit, folder: Folder) -> list[Wanted]:
    """What has not been run on all examples of a unit."""
    return [
        Wanted(contender, mode)
        for contender in experiment.contenders
        for mode in runner.modes(unit)
        if any(record_key(contender, mode, item.case) not in folder.records for item in unit.items)
    ]


def _environment(command: Sequence[str]) -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "versions": {"kvjax": __version__, "jax": jax.__version__, "python": platform.python_version()},
        "device": f"{len(jax.devices())} x {device.device_kind} ({device.platform})",
        "command": list(command) or sys.argv,
    }


class _Watch:
    """Tells how far a run is."""

    def __init__(
        self,
        report: Callable[[Progress], None],
        experiment: Experiment,
        runner: Runner,
        units: Sequence[Unit],
        folder: Folder,
    ):
        self._report, self._folder = report, folder
        self._total = sum(len(unit.items) * len(runner.modes(unit)) * len(experiment.contenders) for unit in units)
        self._first, self._started = len(folder.records), time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the run began or went on."""
        return round(time.monotonic() - self._started, 1)

    def tell(self, records: list[Record]) -> None:
        """Reports the records that came last."""
        done = len(self._folder.records)
        left = (self._total - done) * self.seconds / max(done - self._first, 1)
        record = records[0]
        label = record.policy if record.budget is None else f"{record.policy}, {record.budget}"
        self._report(Progress(done, self._total, label, record.length, left))
