"""The five methods, how each is run, and what the papers say of it."""

import dataclasses
from collections.abc import Callable
from typing import Literal, NamedTuple

import kvjax
from kvjax.evaluation import Contender, Experiment

#: "paper": as much as the paper keeps, with its settings. "equal": as much as all others, with kvjax's defaults.
Setting = Literal["paper", "equal"]
SETTINGS: tuple[Setting, ...] = ("paper", "equal")

#: Tokens of the prompts with a needle, and what is kept of them in the equal setting.
PROMPT, KEPT = 2000, 256
#: Cached tokens at which steps are timed.
LENGTHS = (2000, 7680)


class Claims(NamedTuple):
    """What the literature says of a method; "" where it says nothing.

    Attributes:
        retention: of the prompt.
        found: needles found.
        overhead: of a decoding step, at equal slots.
        step: its time over the full cache's.
        memory: bytes over the full cache's.
    """

    retention: str
    found: str
    overhead: str
    step: str = ""
    memory: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Method:
    """A method.

    Attributes:
        name: the policy's.
        unit: who selects what.
        timing: when, and by what.
        share: of the prompt, that the paper keeps; None where `paper` has no budget.
        share_of: where the paper keeps that.
        paper: the policy with the paper's settings, or what makes it, given a budget.
        equal: the same with kvjax's defaults.
        claims: what the literature says.
    """

    name: str
    unit: str
    timing: str
    share: float | None
    share_of: str
    paper: kvjax.Policy | Callable[..., kvjax.Policy]
    equal: Callable[..., kvjax.Policy]
    claims: Claims

    def contender(self, setting: Setting, length: int) -> Contender:
        """The method at its budget of a prompt."""
        name = contender_name(self.name, setting)
        if setting == "equal":
            return Contender(name=name, budget=KEPT * length // PROMPT, make=self.equal)
        budget = None if self.share is None else int(self.share * length)
        return Contender(name=name, budget=budget, make=self.paper)


METHODS = (
    Method(
        name="StreamingLLM",
        unit="all heads alike: the first 4 tokens and the last ones",
        timing="every step, by position",
        share=1 / 64,
        share_of="4 + 1,020 of 65,536 tokens",
        paper=kvjax.StreamingLLM,
        equal=kvjax.StreamingLLM,
        claims=Claims("below 5 %", "near 0 %", "zero"),
    ),
    Method(
        name="H2O",
        unit="each KV head its tokens, half of them the last ones",
        timing="prompt and every step, by the attention of all queries so far",
        share=0.2,
        share_of="20 %, half of it heavy hitters",
        paper=kvjax.H2O.paper,
        equal=kvjax.H2O,
        claims=Claims("20 %", "40 to 70 %", "high"),
    ),
    Method(
        name="SnapKV",
        unit="each KV head its tokens",
        timing="once after the prompt, by the attention of its last 32 queries",
        share=0.08,
        share_of="1,024 tokens of LongBench's prompts, 8 %",
        paper=kvjax.SnapKV.paper,
        equal=kvjax.SnapKV,
        claims=Claims("8 %", "85 to 95 %", "zero"),
    ),
    Method(
        name="PyramidKV",
        unit="each KV head its tokens, more in lower layers",
        timing="once after the prompt, by the attention of its last 8 (equal: 32) queries",
        share=0.12,
        share_of="12 %",
        paper=kvjax.PyramidKV.paper,
        equal=kvjax.PyramidKV,
        claims=Claims("12 %", "85 to 95 %", "zero"),
    ),
    Method(
        name="DuoAttention",
        unit="KV heads: all tokens, or sinks and the last ones",
        timing="before serving, by a learned pattern",
        share=None,
        share_of="half of the heads stream 64 + 256 tokens",
        paper=kvjax.DuoAttention(sparsity=0.5),
        equal=kvjax.DuoAttention,
        claims=Claims("60 %", "95 to 100 %", "zero", step="0.46 (MHA), 0.67 (GQA)", memory="0.39 (MHA), 0.60 (GQA)"),
    ),
)

FULL = Contender(name="Full", budget=None, make=kvjax.Full())


def contender_name(method: str, setting: Setting) -> str:
    """What records call a method in a setting."""
    return f"{method}, {setting}"


def contenders(length: int) -> tuple[Contender, ...]:
    """The full cache, and every method in every setting."""
    return (FULL, *(method.contender(setting, length) for setting in SETTINGS for method in METHODS))


def needle_experiment(samples: int) -> Experiment:
    """One number, or two asked for in turn, at five depths, both asked in both ways."""
    return Experiment(contenders=contenders(PROMPT), lengths=(PROMPT,), tasks=("needle", "multi-turn"), samples=samples)
