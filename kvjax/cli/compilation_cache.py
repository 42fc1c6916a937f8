"""Keeps what XLA has compiled in the user's cache folder, so that the next run need not."""

import os
import pathlib
import sys

from kvjax.files import check_writable


def use_compilation_cache() -> None:
    """Switches JAX's persistent compilation cache on; what the user has set for it stays."""
    import jax

    try:
        folder = cache_folder() / "xla"
    except RuntimeError:
        return  # The user has no home.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            check_writable(folder, argument="XDG_CACHE_HOME")
        except (OSError, ValueError):
            return  # A cache that cannot be written only costs time.
    settings = {
        "jax_compilation_cache_dir": str(folder),
        # The many small programs of a run take as long as the few large ones.
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    for name, value in settings.items():
        if name.upper() not in os.environ:
            jax.config.update(name, value)


def cache_folder() -> pathlib.Path:
    """Kvjax's folder among the user's caches."""
    # The specification has others passed over: they would lie wherever the command is run.
    if os.path.isabs(os.environ.get("XDG_CACHE_HOME", "")):
        root = pathlib.Path(os.environ["XDG_CACHE_HOME"])
    elif sys.platform == "win32" and "LOCALAPPDATA" in os.environ:
        root = pathlib.Path(os.environ["LOCALAPPDATA"])
    elif sys.platform == "darwin":
        root = pathlib.Path.home() / "Library" / "Caches"
    else:
        root = pathlib.Path.home() / ".cache"
    return root / "kvjax"
