"""The real model with its full cache solves the tasks; a small window does not."""

import pytest

import kvjax
from kvjax.evaluation import TASKS, Experiment, contenders, evaluate

pytestmark = pytest.mark.smollm2


def test_the_full_cache_solves_the_tasks_at_short_length(smollm2, tmp_path):
    experiment = Experiment(
        contenders=contenders({"window": kvjax.StreamingLLM(budget=40)}, ()),
        lengths=(360,),
        depths=(0.4,),
        tasks=tuple(TASKS),
        modes=("aware",),
        batch_size=7,
    )
    summary = evaluate(smollm2.params, smollm2.tokenizer, experiment, out=tmp_path)
    full, window = experiment.contenders

    def score(contender, **wanted):
        estimate = summary.score(contender, mode="aware", **wanted)
        assert estimate is not None
        return estimate.mean

    scores = {task: score(full, task=task) for task in TASKS}
    assert {task: mean for task, mean in scores.items() if mean < 0.3} == {}
    assert score(full) > 0.7 > 0.3 > score(window)
