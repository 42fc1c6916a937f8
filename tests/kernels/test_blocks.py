"""Which tiles of scores plain JAX computes: no more than a CPU's caches hold, and little that nobody sees."""

import jax
import pytest

from kvjax_kernels.blocks import Tile, choose_tile


def causal(heads: int, group: int, length: int) -> Tile:
    """The tile of a prompt's attention."""

    def count(side: int) -> int:
        blocks = -(-length // side)
        return blocks * (blocks + 1) // 2

    return choose_tile(heads, group, length, length, count)


@pytest.fixture(autouse=True)
def cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")


def test_a_long_prompt_has_large_tiles_of_one_head():
    assert causal(3, 3, 4096) == Tile(1, 512, 512)


def test_tiles_are_small_where_large_ones_compute_much_that_nobody_sees():
    assert causal(3, 3, 768) == Tile(3, 256, 256)
    assert choose_tile(3, 3, 4096, 4096, lambda side: 2 * 4096 // side) == Tile(3, 256, 256)


def test_a_short_prompt_is_one_tile():
    assert causal(3, 3, 1) == Tile(3, 1, 1)
    assert causal(3, 3, 300) == Tile(3, 300, 300)


@pytest.mark.parametrize("length", [16, 300, 1000, 4096])
@pytest.mark.parametrize(("heads", "group"), [(1, 64), (7, 3), (12, 1), (15, 3), (40, 4), (40, 8)])
def test_heads_come_in_equal_parts_that_the_caches_hold(heads, group, length):
    tile = causal(heads, group, length)
    scores = tile.heads * group * tile.queries * tile.keys
    assert heads % tile.heads == 0
    assert scores <= 2**20 or tile == Tile(1, 256, 256)
    larger = [number for number in range(tile.heads + 1, heads + 1) if heads % number == 0]
    assert not larger or scores // tile.heads * larger[0] > 2**20


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_other_platforms_take_all_heads_at_once(platform, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    assert causal(40, 8, 4096) == Tile(40, 256, 256)
    assert causal(40, 8, 100) == Tile(40, 100, 100)
