"""Image encoders with a layout, from either CLIP library or any classifier; class weights; views."""

from aniso.models.cache import WeightsCache
from aniso.models.encoder import Encoder
from aniso.models.head import ClassWeights
from aniso.models.load import load_model, mini_bank, mini_directory

__all__ = ["load_model", "Encoder", "ClassWeights", "WeightsCache", "mini_bank", "mini_directory"]
