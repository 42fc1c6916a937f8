"""Keeps the number of compiled programs within what a process can hold."""

import pathlib

import jax

#: Mappings of memory after which programs are dropped; Linux allows 65,530, and LLVM crashes past them.
_MOST = 30_000


def drop_programs_if_many() -> None:
    """Drops all compiled programs before there are too many; each takes dozens of mappings on a CPU."""
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > _MOST:
        jax.clear_caches()
