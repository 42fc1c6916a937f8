"""Tasks that show what a compressed cache still knows."""

from kvjax.evaluation.needle import Needle, needle

__all__ = ["Needle", "needle"]
