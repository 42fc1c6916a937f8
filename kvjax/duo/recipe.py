"""How a head pattern is learned: the settings, and what follows from them for each step."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from kvjax.allocation import check_count
from kvjax.duo.mixed_attention import Streaming
from kvjax.duo.passkeys import MOST_PASSKEYS, Example, PasskeyPrompts
from kvjax.extras import extra

if TYPE_CHECKING:
    import optax


#: What is counted.
_UNITS = {
    "steps": "step",
    "min_length": "token",
    "max_length": "token",
    "lengths": "length",
    "batch_size": "prompt",
    "recent": "token",
    "passkeys": "passkey",
    "passkey_size": "word or digit",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of `kvjax.duo.identify`.

    The paper takes 2,000 steps at a learning rate of 0.02, a regularisation of 0.05, prompts up to the longest that
    the model can read, 128 sinks and 256 recent tokens, and ten passkeys of 32 words. The defaults are for a small
    model and short prompts, where the alphas settle sooner.

    Attributes:
        steps: how often the alphas are changed.
        min_length: tokens of the shortest prompts.
        max_length: tokens of the longest ones.
        lengths: how many lengths there are, from the shortest to the longest by equal factors; each is compiled for.
        batch_size: prompts a step, all of one length.
        sinks: tokens from the start that streaming heads see.
        recent: tokens before each one that they see.
        regularisation: weight of the mean of |alpha| beside the distillation loss.
        learning_rate: of Adam, at its highest. The first 20 % of the steps lead up to it from a tenth, and the last
            20 % back.
        passkeys: in each prompt.
        passkey_size: words or digits of each.
        seed: of lengths, texts and passkeys.
    """

    steps: int = 200
    min_length: int = 448
    max_length: int = 1536
    lengths: int = 4
    batch_size: int = 1
    sinks: int = 64
    recent: int = 128
    regularisation: float = 0.1
    learning_rate: float = 0.05
    passkeys: int = 5
    passkey_size: int = 6
    seed: int = 0

    def __post_init__(self) -> None:
        for name, unit in _UNITS.items():
            check_count(name, getattr(self, name), at_least=1, unit=unit)
        check_count("sinks", self.sinks, at_least=0)
        check_count("seed", self.seed, at_least=0)
        if self.passkeys > MOST_PASSKEYS:
            raise ValueError(f"`passkeys` must be from 1 to {MOST_PASSKEYS}, got {self.passkeys}.")
        if self.max_length < self.min_length:
            raise ValueError(
                f"`max_length` must not be under `min_length`, got {self.max_length} and {self.min_length}."
            )
        for name in ("regularisation", "learning_rate"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise ValueError(f"`{name}` must be a positive number, got {getattr(self, name)}.")

    def check_positions(self, most: int) -> None:
        """Raises a ValueError if a prompt would be longer than the `most` tokens that a model can read."""
        if self.max_length > most:
            raise ValueError(
                f"`max_length` must not be over the {most} tokens that the model can read, got {self.max_length}."
            )

    @property
    def streaming(self) -> Streaming:
        """What streaming heads see."""
        return Streaming(self.sinks, self.recent)

    def length(self, step: int) -> int:
        """Tokens of a step's prompts."""
        choices = np.geomspace(self.min_length, self.max_length, self.lengths).round().astype(int)
        return int(np.random.default_rng((self.seed, step)).choice(choices))

    def batch(self, step: int, prompts: PasskeyPrompts) -> list[Example]:
        """A step's prompts; they follow from seed and step alone, whatever ran before."""
        length = self.length(step)
        rngs = [np.random.default_rng((self.seed, step, row)) for row in range(self.batch_size)]
        return [prompts.example(length, rng) for rng in rngs]

    def optimizer(self) -> "optax.GradientTransformation":
        """Adam without decay, under the schedule."""
        with extra("train", purpose="Learning a head pattern"):
            import optax
        ramp, low = max(round(0.2 * self.steps), 1), 0.1 * self.learning_rate
        schedule = optax.schedules.join_schedules(
            [
                optax.schedules.linear_schedule(low, self.learning_rate, ramp),
                optax.schedules.linear_schedule(self.learning_rate, low, ramp, max(self.steps - 2 * ramp, 0)),
            ],
            [ramp],
        )
        return optax.adam(schedule)
