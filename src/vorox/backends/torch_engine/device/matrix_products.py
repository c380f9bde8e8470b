"""Matrix products by the fastest library, and sums of products in place.

Shape legend: M and N rows of the factors, K columns.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONEDNN_MIN_WORK = 1 << 20
"""Below so many multiplications, starting a oneDNN product costs more than it saves."""

_addmm_dtype_out = torch.ops.aten.addmm.dtype_out


class Products:
    """Matrix products ``a @ b.T`` through one library; either factor may be a transposed view.

    Args:
        use_onednn: Use oneDNN for large fp32 products; otherwise ``torch.mm``.
        has_fp32_sums: Add products of half precision to an fp32 sum without rounding them before; on CUDA.
    """

    def __init__(self, *, use_onednn: bool, has_fp32_sums: bool = False) -> None:
        self.is_onednn, self._has_fp32_sums = use_onednn, has_fp32_sums
        self._onednn = torch.ops.mkldnn._linear_pointwise.default if use_onednn else None

    def __call__(self, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        if self._onednn is None or a_MK.shape[0] * a_MK.shape[1] * b_NK.shape[0] < ONEDNN_MIN_WORK:
            return torch.mm(a_MK, b_NK.t())
        return self._onednn(_dense(a_MK), _dense(b_NK), None, "none", [], "")

    def add_to(self, sum_MN: Tensor, a_KM: Tensor, b_KN: Tensor, scale: float = 1.0) -> None:
        """Add ``scale * a.T @ b`` in place, by BLAS also where oneDNN multiplies: oneDNN cannot add to its result."""
        if a_KM.dtype == sum_MN.dtype:
            sum_MN.addmm_(a_KM.t(), b_KN, alpha=scale)
        elif self._has_fp32_sums:
            _addmm_dtype_out(sum_MN, a_KM.t(), b_KN, sum_MN.dtype, alpha=scale, out=sum_MN)
        else:
            sum_MN.add_(self(a_KM.t(), b_KN.t()), alpha=scale)


def _dense(x: Tensor) -> Tensor:
    """Return ``x`` with the strides of a matrix or its transpose; oneDNN is slow for any others."""
    return x if x.is_contiguous() or x.t().is_contiguous() else x.contiguous()
