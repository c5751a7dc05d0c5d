"""The norm test in the norm of the inner optimizer's steps (arXiv 2602.03001)."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from adloco.rules.batch_rules.norm_test import NormTest

Metric = Literal["sign", "adam", "muon"]
"""The norm in which the test measures the error of the gradient; see `StepNormTest.metric`."""


@dataclass(frozen=True, kw_only=True)
class StepNormTest(NormTest):
    """Norm test in the norm of the optimizer's steps: noise and gradient as the steps see them."""

    key: ClassVar[str] = "step-norm-test"

    metric: Metric
    """Norm that S and |G|^2 are measured in. sign: S = (sum of all elements' standard
    deviations)^2, |G|^2 = (sum of their absolute means)^2; adam: the same after dividing by the
    root of AdamW's second moments; muon: singular values of the matrices that Muon updates, and
    the form of adam for the rest. They fit the steps of the optimizer of that name."""

    measurement = "adloco.lab.optimizer_norms.dual_stats:DualMeasurement"
