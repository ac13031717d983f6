from __future__ import annotations

import pytest
import te_cpu
import torch


def test_the_packages_own_classes_are_there_and_its_kernels_are_not() -> None:
    te_cpu.install()
    te_cpu.install()
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Tensor

    assert issubclass(Float8Tensor, torch.Tensor)
    if torch.cuda.is_available():
        return
    quantizer = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, torch.device("cpu"))
    with pytest.raises(RuntimeError, match="quantize is a GPU kernel"):
        quantizer(torch.ones(16, 16))
