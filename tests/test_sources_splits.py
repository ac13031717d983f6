from __future__ import annotations

import pytest
import torch

from flightrec.sources.splits import splits_on

CPU = torch.device("cpu")
X = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "splits",
    [[1, 3], (1, 3), torch.tensor([1, 3]), torch.tensor([1, 3], dtype=torch.int32), torch.tensor([1, 3]).numpy()],
)
def test_lists_and_tensors(splits):
    found = splits_on(CPU, splits, X, None)
    assert found.dtype == torch.int64
    assert found.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("splits", "tensor", "message"),
    [
        (torch.tensor([1.0, 3.0]), X, "expected integers"),
        (torch.tensor([[1, 3]]), X, "expected integers"),
        (torch.tensor([True, False]), X, "expected integers"),
        ([1, 3], torch.zeros(()), "rows to split"),
        (torch.tensor([1, 3], device="meta"), X, "in host memory, got meta"),
    ],
)
def test_what_is_refused(splits, tensor, message):
    with pytest.raises(ValueError, match=message):
        splits_on(CPU, splits, tensor, None)


@pytest.mark.gpu
def test_host_counts_go_to_the_device():
    device = torch.device("cuda", 0)
    for splits in ([1, 3], torch.tensor([1, 3]), torch.tensor([1, 3], device=device)):
        found = splits_on(device, splits, X.to(device), None)
        assert found.device == device
        assert found.tolist() == [1, 3]
