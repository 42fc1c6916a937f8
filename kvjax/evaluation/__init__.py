"""Tasks that show what a compressed cache still knows, and what policies at budgets make of them."""

from kvjax.evaluation.contenders import Contender, contenders, duo_at_budget
from kvjax.evaluation.evaluating import Progress, evaluate
from kvjax.evaluation.experiment import MODES, TASK_NAMES, Case, Experiment
from kvjax.evaluation.needle import Needle, needle
from kvjax.evaluation.prompt_parts import PromptParts, fitted, prompt_parts
from kvjax.evaluation.records import Record, read_records
from kvjax.evaluation.scoring import string_match_all, string_match_part
from kvjax.evaluation.shared_prefill import SharedPrefill, shared_prefill
from kvjax.evaluation.summary import Estimate, Summary, summarised, wilson
from kvjax.evaluation.task import Example, Task, Turn
from kvjax.evaluation.tasks import TASKS

__all__ = [
    "MODES",
    "TASKS",
    "TASK_NAMES",
    "Case",
    "Contender",
    "Estimate",
    "Example",
    "Experiment",
    "Needle",
    "Progress",
    "PromptParts",
    "Record",
    "SharedPrefill",
    "Summary",
    "Task",
    "Turn",
    "contenders",
    "duo_at_budget",
    "evaluate",
    "fitted",
    "needle",
    "prompt_parts",
    "read_records",
    "shared_prefill",
    "string_match_all",
    "string_match_part",
    "summarised",
    "wilson",
]
