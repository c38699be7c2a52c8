"""Forward and gradients of the operators, collected from the files of their families.

"<kind>.forward" takes the operator's inputs, then its statistic where it has one. "<kind>.grad<i>", the gradient of
input i, takes the gradient of the output and then the saved operands that `plans.operators` names in `Gradient.needs`,
in that order; "<kind>.grad012" makes several of them together.
"""

from collections.abc import Mapping

from executor.kernels.activations import ACTIVATION_RULES
from executor.kernels.attention import ATTENTION_RULES
from executor.kernels.context import Rule
from executor.kernels.elementwise import ELEMENTWISE_RULES
from executor.kernels.experts import EXPERT_RULES
from executor.kernels.images import IMAGE_RULES
from executor.kernels.lookup import LOOKUP_RULES
from executor.kernels.matrix import MATRIX_RULES
from executor.kernels.normalisation import NORMALISATION_RULES
from executor.kernels.positions import POSITION_RULES
from executor.kernels.random import RANDOM_RULES
from executor.kernels.recurrent import RECURRENT_RULES
from executor.kernels.reductions import REDUCTION_RULES
from executor.kernels.shapes import SHAPE_RULES
from executor.kernels.sources import SOURCE_RULES

__all__ = ["OPERATOR_RULES"]

OPERATOR_RULES: Mapping[str, Rule] = {
    **ACTIVATION_RULES,
    **ATTENTION_RULES,
    **ELEMENTWISE_RULES,
    **EXPERT_RULES,
    **IMAGE_RULES,
    **LOOKUP_RULES,
    **MATRIX_RULES,
    **NORMALISATION_RULES,
    **POSITION_RULES,
    **RANDOM_RULES,
    **RECURRENT_RULES,
    **REDUCTION_RULES,
    **SHAPE_RULES,
    **SOURCE_RULES,
}
