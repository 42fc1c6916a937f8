"""Caches on disk: saved whole or not at all, restored bit for bit or refused."""

from kvjax.saving.caches import restore_cache, save_cache

__all__ = ["restore_cache", "save_cache"]
