"""DuoAttention's identification: learns which of a model's heads retrieve."""

from kvjax.duo.distillation import LayeredModel
from kvjax.duo.identification import Identification, Progress, identify
from kvjax.duo.recipe import Recipe

__all__ = ["Identification", "LayeredModel", "Progress", "Recipe", "identify"]
