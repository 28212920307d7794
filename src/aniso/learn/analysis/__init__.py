"""Analysis of task vectors, compositions and tasks beside accuracy."""

from aniso.learn.analysis.distributions import (
    FeatureDistribution,
    ProjectedTask,
    Projection,
    feature_distribution,
    project_distributions,
)
from aniso.learn.analysis.matrix import LabelledMatrix
from aniso.learn.analysis.measures import (
    by_component,
    by_depth,
    by_kind,
    five_numbers,
    out_of_domain,
    relative_accuracy,
    relative_significance,
)
from aniso.learn.analysis.pairwise_error import disentanglement, disentanglement_matrix, only
from aniso.learn.analysis.significance import Significance, vector_significance
from aniso.learn.analysis.similarity import Similarity, block_products, cosine_similarity, cosines

__all__ = [
    "LabelledMatrix",
    "Similarity",
    "cosine_similarity",
    "cosines",
    "block_products",
    "disentanglement",
    "disentanglement_matrix",
    "only",
    "Significance",
    "vector_significance",
    "relative_significance",
    "relative_accuracy",
    "FeatureDistribution",
    "ProjectedTask",
    "Projection",
    "feature_distribution",
    "project_distributions",
    "out_of_domain",
    "by_kind",
    "by_depth",
    "by_component",
    "five_numbers",
]
