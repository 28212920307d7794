"""Heads: classifiers that are trained on the features of a few images.

A head is one file of this package, with a class decorated by ``@register("name")``.
"""

from aniso.learn.heads.files import SavedHead, head_options, load_head, new_head
from aniso.learn.heads.head import Classifier, Head, HeadFit, HeadOption, RestrictedHead
from aniso.learn.heads.linear import LinearProbe
from aniso.learn.heads.lpp import LPP
from aniso.learn.heads.tip import TipAdapter
from aniso.registry import HEADS

register = HEADS.register

__all__ = [
    "RestrictedHead",
    "Classifier",
    "Head",
    "HeadFit",
    "HeadOption",
    "LPP",
    "LinearProbe",
    "SavedHead",
    "TipAdapter",
    "head_options",
    "load_head",
    "new_head",
    "register",
]
