"""Who is compared: policies at budgets."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from kvjax.allocation import budget_tokens, check_budget
from kvjax.policies import DuoAttention, Full, Policy
from kvjax.state import ModelSpec

#: The share of a streaming head's tokens that are sinks, as in DuoAttention's 64 of 320.
_SINK_SHARE = 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contender:
    """A policy at a budget.

    Attributes:
        name: what reports call the policy.
        budget: tokens kept per KV head, or a fraction of the prompt; None where the policy has none.
        make: the policy itself, or what makes it, given the `budget`.
    """

    name: str
    budget: int | float | None
    make: Policy | Callable[..., Policy]

    @property
    def label(self) -> str:
        """Name and budget."""
        return self.name if self.budget is None else f"{self.name}, {self.budget_text}"

    @property
    def budget_text(self) -> str:
        """The budget as it is shown; "" where there is none."""
        if self.budget is None:
            return ""
        return f"{self.budget:,}" if isinstance(self.budget, int) else f"{self.budget:.0%}"

    def policy(self, model: ModelSpec, length: int) -> Policy:
        """The policy for a model and for prompts of so many tokens."""
        if isinstance(self.make, Policy):
            return self.make
        if self.make is DuoAttention:
            assert self.budget is not None
            return duo_at_budget(self.budget, model, length)
        return self.make(budget=self.budget)


def contenders(
    policies: Mapping[str, Policy | Callable[..., Policy]], budgets: Sequence[int | float]
) -> tuple[Contender, ...]:
    """Every policy at every budget, after the full cache, which all are measured against.

    Args:
        policies: by name. One that is a policy already takes no budget and comes once. Others are called with
            `budget=`; the class `DuoAttention` gets the sparsity that meets it (`duo_at_budget`).
        budgets: tokens, or fractions of the prompt.

    Raises:
        ValueError: no policies, no budgets where they are needed, or a budget that a policy cannot have.
    """
    if not policies:
        raise ValueError("`policies` must name at least one policy, got none.")
    made = [Contender(name="full", budget=None, make=Full())]
    for name, make in policies.items():
        if isinstance(make, Policy):
            made.append(Contender(name=name, budget=None, make=make))
        elif make is not Full:
            made += [Contender(name=name, budget=check_budget(budget), make=make) for budget in _checked(budgets)]
    for contender in made:
        if contender.make is not DuoAttention and not isinstance(contender.make, Policy):
            contender.make(budget=contender.budget)  # Raises where the policy cannot have it.
    # The full cache may have been named, by its class or as itself.
    return tuple({(c.name, c.budget): c for c in made if c.name == "full" or not isinstance(c.make, Full)}.values())


def _checked(budgets: Sequence[int | float]) -> Sequence[int | float]:
    if not budgets:
        raise ValueError("`budgets` must have at least one budget, got none.")
    return budgets


def duo_at_budget(budget: int | float, model: ModelSpec, length: int) -> DuoAttention:
    """DuoAttention whose heads keep no more than `budget` tokens of `length` in the mean.

    It has no budget of its own: so many heads stream that the others, which keep everything, leave it. A streaming
    head keeps 64 sinks and 256 recent tokens, or half the budget where that is less.

    Args:
        budget: tokens per KV head, or a fraction of the prompt.
        model: the model; kvjax must have a pattern for it.
        length: of the prompts.
    """
    heads, kept = model.num_layers * model.num_kv_heads, budget_tokens(budget, length)
    ring = min(320, max(kept // 2, 2))
    streaming = math.ceil(heads * (length - kept) / (length - ring)) if length > kept else 0
    sinks = ring // _SINK_SHARE
    duo = DuoAttention(sparsity=streaming / heads, sinks=sinks, recent=ring - sinks)
    return duo.for_model(model)
