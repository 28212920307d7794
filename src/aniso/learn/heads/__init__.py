"""Classifiers that are learned on features of a few pictures: Tip-Adapter, LP++, a linear probe."""

from aniso.learn.heads.files import HEADS, SavedHead, load_head, new_head
from aniso.learn.heads.head import Classifier, Head, HeadFit, RestrictedHead
from aniso.learn.heads.linear import LinearProbe
from aniso.learn.heads.lpp import LPP
from aniso.learn.heads.tip import TipAdapter

__all__ = [
    "HEADS",
    "RestrictedHead",
    "Classifier",
    "Head",
    "HeadFit",
    "LPP",
    "LinearProbe",
    "SavedHead",
    "TipAdapter",
    "load_head",
    "new_head",
]
