"""The tasks: a module each."""

from kvjax.evaluation.task import Task
from kvjax.evaluation.tasks.common_words import CommonWords
from kvjax.evaluation.tasks.frequent_words import FrequentWords
from kvjax.evaluation.tasks.needle_multi_key import MultiKeyNeedle
from kvjax.evaluation.tasks.needle_multi_query import MultiQueryNeedle
from kvjax.evaluation.tasks.needle_multi_turn import MultiTurnNeedle
from kvjax.evaluation.tasks.needle_multi_value import MultiValueNeedle
from kvjax.evaluation.tasks.needle_single import SingleNeedle
from kvjax.evaluation.tasks.variable_tracking import VariableTracking

#: Every task with its default settings, by name.
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        SingleNeedle(),
        MultiKeyNeedle(),
        MultiValueNeedle(),
        MultiQueryNeedle(),
        MultiTurnNeedle(),
        VariableTracking(),
        CommonWords(),
        FrequentWords(),
    )
}

__all__ = [
    "TASKS",
    "CommonWords",
    "FrequentWords",
    "MultiKeyNeedle",
    "MultiQueryNeedle",
    "MultiTurnNeedle",
    "MultiValueNeedle",
    "SingleNeedle",
    "VariableTracking",
]
