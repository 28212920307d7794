"""Merge rules: functions of one block of all vectors that give one block of a merged vector.

``merge.tsv(bank)`` returns an ordinary task vector. A rule is a class decorated by ``@register("name")`` in a
file of this package; ``aniso bank merge`` runs it by its name.
"""

from aniso.merge.cart_rule import Cart, cart
from aniso.merge.core_space import CoreSpace
from aniso.merge.dare_rule import Dare, dare
from aniso.merge.deltas import Deltas
from aniso.merge.iso_rules import IsoC, IsoCTS, iso_c, iso_cts
from aniso.merge.mean_rules import Mean, TaskArithmetic, mean, task_arithmetic
from aniso.merge.merge_plan import MergePlan, plan_merge
from aniso.merge.merge_rule import ElementwiseRule, MergeRule, RuleOption, new_merge_rule, parsed_options
from aniso.merge.merging import MergeKeywords, MergeOptions, merge, unread_merge
from aniso.merge.ties_rule import Ties, ties
from aniso.merge.tsv_rule import TSV, tsv
from aniso.merge.wudi_rules import Aswudi, Swudi, aswudi, swudi
from aniso.registry import MERGE_RULES

register = MERGE_RULES.register

__all__ = [
    "mean",
    "task_arithmetic",
    "ties",
    "dare",
    "tsv",
    "iso_c",
    "iso_cts",
    "cart",
    "aswudi",
    "swudi",
    "merge",
    "Mean",
    "TaskArithmetic",
    "Ties",
    "TSV",
    "IsoC",
    "IsoCTS",
    "Dare",
    "Cart",
    "Aswudi",
    "Swudi",
    "CoreSpace",
    "MergePlan",
    "plan_merge",
    "MergeRule",
    "ElementwiseRule",
    "MergeOptions",
    "MergeKeywords",
    "RuleOption",
    "Deltas",
    "new_merge_rule",
    "parsed_options",
    "unread_merge",
    "register",
]
