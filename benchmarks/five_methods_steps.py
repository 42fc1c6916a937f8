"""Decoding steps of the five methods, against the full cache with as many slots and at full length."""

import json
import pathlib
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from five_methods_settings import FULL, LENGTHS, contenders
from step_times import loop_seconds, random_cache

import kvjax
import kvjax_models
from kvjax.statistics import kept_tokens

#: Steps of a round, and the room for them.
STEPS = 16


class Timed(NamedTuple):
    """A round of a contestant.

    Attributes:
        length: tokens that the full cache holds.
        round: its number.
        name: the contender's, or `full_of(slots)`.
        seconds: of a step.
        slots: of a KV head, the mean.
        kept: tokens of a KV head before the first step, the mean.
        bytes: of the cache.
    """

    length: int
    round: int
    name: str
    seconds: float
    slots: float
    kept: float
    bytes: int


def full_of(slots: float) -> str:
    """What records call the full cache with so many slots."""
    return f"Full of {round(slots)} slots"


def slots_of(cache: kvjax.Cache) -> float:
    """Slots of a KV head, the mean."""
    return float(np.mean([spec.slots for spec in cache.specs]))


def caches_of(model: kvjax.ModelSpec, length: int) -> dict[str, kvjax.Cache]:
    """The contenders' caches of a length, and full ones with as many slots, room for the answer included."""
    caches = {
        one.name: random_cache(model, one.policy(model, length), length, room=STEPS) for one in contenders(length)
    }
    for slots in sorted({round(slots_of(cache)) for name, cache in caches.items() if name != FULL.name}):
        caches[full_of(slots)] = random_cache(model, kvjax.Full(), slots - STEPS, room=STEPS)
    return caches


def run_rounds(params: kvjax_models.Llama, out: pathlib.Path, *, rounds: int) -> None:
    """Does the rounds that are missing; in each, all contestants of a length take their steps in turn."""
    for length in LENGTHS:
        done = len({record.round for record in read(out) if record.length == length})
        if done >= rounds:
            continue
        caches = caches_of(params.spec, length)
        logits = jnp.zeros((1, params.spec.vocab_size), jnp.float32)
        for cache in caches.values():
            # Compiles.
            loop_seconds(params, logits, cache, steps=STEPS)
        for round_ in range(done, rounds):
            seconds = {name: loop_seconds(params, logits, cache, steps=STEPS) / STEPS for name, cache in caches.items()}
            append(out, [timed(caches[name], length, round_, name, seconds[name]) for name in caches])
            print(
                f"{length} tokens, round {round_}: " + ", ".join(f"{t * 1e3:.1f}" for t in seconds.values()), flush=True
            )


def timed(cache: kvjax.Cache, length: int, round_: int, name: str, seconds: float) -> Timed:
    """The record of a round."""
    return Timed(length, round_, name, seconds, slots_of(cache), kept_tokens(cache), kvjax.cache_bytes(cache))


def append(path: pathlib.Path, records: list[Timed]) -> None:
    """Adds a whole round at once."""
    with path.open("a") as file:
        file.write("".join(json.dumps(record._asdict()) + "\n" for record in records))


def read(path: pathlib.Path) -> list[Timed]:
    """All rounds; none where there is no file."""
    return [Timed(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def one_of(records: list[Timed], name: str, length: int) -> Timed | None:
    """A record of a contestant, for its sizes."""
    return next((record for record in records if (record.name, record.length) == (name, length)), None)


def ratio(records: list[Timed], name: str, base: str, length: int) -> float | None:
    """A step's time over another's in the same round, the median of the rounds."""
    mine, theirs = (_by_round(records, who, length) for who in (name, base))
    both = mine.keys() & theirs.keys()
    return statistics.median(mine[round_] / theirs[round_] for round_ in both) if both else None


def overheads(records: list[Timed], name: str, length: int) -> tuple[float, float] | None:
    """A step's time over that of the full cache with as many slots, and of the full cache at full length."""
    mine = one_of(records, name, length)
    if mine is None:
        return None
    same, full = (ratio(records, name, base, length) for base in (full_of(mine.slots), FULL.name))
    return None if same is None or full is None else (same, full)


def _by_round(records: list[Timed], name: str, length: int) -> Mapping[int, float]:
    return {r.round: r.seconds for r in records if (r.name, r.length) == (name, length)}
