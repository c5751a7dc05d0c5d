"""The polynomials with which Muon orthogonalises matrices (Newton-Schulz), without torch.

Settings check the names of the variants and must not import torch for it; `muon_step.py` computes
with the coefficients.
"""

from collections.abc import Mapping, Sequence

Quintic = tuple[float, float, float]
"""Coefficients a, b and c of the step s -> a s + b s^3 + c s^5 of a singular value s."""

NEWTON_SCHULZ: Mapping[str, Sequence[Quintic]] = {
    "constant": [(3.4445, -4.775, 2.0315)] * 5,
    "polar-express": [
        (8.205161, -22.901935, 16.460724),
        (4.066395, -2.861154, 0.518400),
        (3.909595, -2.823352, 0.525037),
        (3.285564, -2.415302, 0.485294),
        (2.300652, -1.668904, 0.418807),
    ],
}
"""The steps of each variant.

- constant: those of Jordan et al., 2024 and torch.optim.Muon. They take singular values from 0.01
  to 1 of the norm to 0.68 to 1.13.
- polar-express: the best polynomial for what the steps before it leave (arXiv 2505.16932, theorem
  3.1), for singular values from 0.001 of the norm on, which it takes to 0.83 to 1.12. In all steps
  but the last, s is divided by 1.01 before, against rounding.
"""
