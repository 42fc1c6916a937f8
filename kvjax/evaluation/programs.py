"""Keeps the number of compiled programs within what a process can hold."""

import pathlib

import jax

#: The share of the mappings of memory that Linux allows a process after which programs are dropped: what is compiled
#: until the next look must fit into the rest, for LLVM crashes past them.
_SHARE = 0.75


def drop_programs_if_many() -> None:
    """Drops all compiled programs before there are too many; each takes dozens of mappings on a CPU."""
    maps, limit = pathlib.Path("/proc/self/maps"), pathlib.Path("/proc/sys/vm/max_map_count")
    if maps.exists() and limit.exists() and maps.read_bytes().count(b"\n") > _SHARE * int(limit.read_text()):
        jax.clear_caches()
