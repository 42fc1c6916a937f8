"""What the Mosaic TPU kernels share: the layout of arrays, and the interpreter."""

from typing import Any

from jax.experimental.pallas import tpu as pltpu

#: Numbers of 32 bits in a register's row, and its rows.
LANES, SUBLANES = 128, 8


def round_up(x: int, multiple: int) -> int:
    """The next multiple of a number."""
    return -(-x // multiple) * multiple


def interpreter(interpret: bool, **options: Any) -> pltpu.InterpretParams | bool:
    """The `interpret` argument of `pl.pallas_call`: an interpreter that finds data races, or none."""
    return pltpu.InterpretParams(detect_races=True, **options) if interpret else False
