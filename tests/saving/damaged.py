"""Saved caches that were damaged: strategies, and what must become of them. Used by whoever damages files of kvjax."""

import json
import pathlib
import shutil
import time
import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import numpy as np

import kvjax
from kvjax.saving.description import digest_of


class Damage(NamedTuple):
    """A change of a folder's files.

    Attributes:
        apply: does it.
        signed: whether the description's digest is made anew: what can be is restored then, not what was.
    """

    apply: Callable[[pathlib.Path], None]
    signed: bool


_EXTREMES = [None, True, -1, 0, 1, 2**31, 2**63, 10**30, 1e308, float("nan"), "", "x" * 5000, [], {}, [[]], "\ud800"]
_SECONDS, _BYTES = 2.0, 500e6


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    """Flips, cuts and insertions anywhere; values of the description that are extreme, gone or nested."""
    if draw(st.booleans()):
        return _of_bytes(
            draw(st.sampled_from(["cache.json", "arrays.bin"])),
            draw(st.sampled_from(["flip", "cut", "insert", "zero"])),
            draw(st.floats(0, 1, exclude_max=True)),
            draw(st.binary(min_size=1, max_size=40)),
        )
    steps = draw(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5))
    change = draw(st.sampled_from(["set", "remove", "add", "nest"]))
    return _of_values(steps, change, draw(st.sampled_from(_EXTREMES)), signed=draw(st.booleans()))


def _of_bytes(name: str, change: str, where: float, added: bytes) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        content = bytearray((folder / name).read_bytes())
        place = int(where * len(content))
        if change == "flip":
            content[place] ^= 1 << added[0] % 8
        elif change == "cut":
            del content[place : place + len(added) ** 2]
        elif change == "insert":
            content[place:place] = added
        else:
            content[place : place + 512] = bytes(len(content[place : place + 512]))
        (folder / name).write_bytes(content)

    return Damage(damage, signed=False)


def _of_values(steps: list[float], change: str, value: object, *, signed: bool) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        about = json.loads((folder / "cache.json").read_text())
        parent: Any = about
        key: Any = None
        for step in steps:
            inside = about if key is None else parent[key]
            if not isinstance(inside, dict | list) or not inside:
                break
            parent, keys = inside, list(inside) if isinstance(inside, dict) else list(range(len(inside)))
            key = keys[int(step * len(keys))]
        if change == "remove":
            del parent[key]
        elif change == "add" and isinstance(parent, dict):
            parent["more"] = value
        elif change == "nest":
            parent[key] = "NESTED"
        else:
            parent[key] = value
        if signed:
            about["digest"] = digest_of({name: value for name, value in about.items() if name != "digest"})
        text = json.dumps(about).replace('"NESTED"', "[" * 50_000 + "]" * 50_000)
        (folder / "cache.json").write_text(text)

    return Damage(damage, signed)


def check_damaged(saved: pathlib.Path, damage: Damage, cache: kvjax.Cache, model: kvjax.Model) -> str:
    """Asserts that what is restored equals what was saved or is a ValueError, soon and within little memory.

    Args:
        saved: the folder of the cache; it stays as it is.
        damage: what is done to a copy.
        cache: what was saved.
        model: whose it is.

    Returns:
        The message, or "" where the cache was restored.
    """
    folder = saved.parent / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    damage.apply(folder)
    started = time.process_time()
    tracemalloc.start()
    try:
        restored = kvjax.restore_cache(folder, model)
    except ValueError as error:
        message = str(error)
    else:
        message = ""
        if not damage.signed:
            assert jax.tree.structure(restored) == jax.tree.structure(cache)
        for mine, theirs in zip(jax.tree.leaves(cache), jax.tree.leaves(restored), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    finally:
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert message == "" or str(folder) in message
    assert time.process_time() - started < _SECONDS
    assert most < _BYTES
    return message
