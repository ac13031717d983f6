from __future__ import annotations

import torch
from sources_support import (
    BACKWARD,
    Net,
    RecordingSink,
    assert_same_bits,
    batches,
    square,
    train,
)
from torch import nn


def test_a_failing_sink_never_reaches_the_run():
    sink = RecordingSink()
    sink.fail_on = lambda key: key.layer == "blocks.0.fc1"
    data = batches()
    assert_same_bits(train(Net, square, data), train(Net, square, data, sink))
    assert len(sink.errors) == 1
    assert "failed on purpose" in sink.blinds["blocks.0.fc1", ""]
    assert sink.find("blocks.0.fc2", "gradient")
    assert not sink.find("blocks.0.fc1", "output")


def test_a_sink_that_fails_everywhere_switches_the_source_off():
    sink = RecordingSink()
    sink.fail_on = lambda key: True
    data = batches()
    assert_same_bits(train(Net, square, data), train(Net, square, data, sink))
    assert not sink.seen
    assert 0 < len(sink.errors) <= 10


def test_a_failure_in_a_backward_hook_does_not_stop_backward():
    sink = RecordingSink()
    sink.fail_on = lambda key: key.stage is BACKWARD
    data = batches(2)
    assert_same_bits(train(Net, square, data), train(Net, square, data, sink))
    assert sink.errors


def test_what_cannot_be_recorded_is_told_once_with_its_reason():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.emb = nn.Embedding(4, 2, sparse=True)
            self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 2))
            self.seen = nn.Identity()

        def forward(self, index):
            x = self.spectral(self.emb(index))
            self.seen(torch.complex(x, x))
            self.seen(x.to_sparse())
            return x

    data = [torch.tensor([1, 2])] * 2
    sink = RecordingSink()
    torch.manual_seed(0)
    assert_same_bits(train(Odd, square, data, optimizer=torch.optim.SGD)[:1], train(Odd, square, data, sink)[:1])
    sparse = sink.one("emb", "wgrad", 0)
    assert sparse.quantized.components["indices"].tolist() == [[1, 2]]
    assert sparse.tensor.shape == (2, 2)
    assert "parametrized" in sink.blinds["spectral", "weight"]
    dtypes = [seen.tensor.dtype for seen in sink.find("seen", "input", 0)]
    assert dtypes == [torch.complex64, torch.float32]
    assert not sink.errors
