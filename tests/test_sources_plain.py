from __future__ import annotations

import pytest
import torch

from flightrec.sources.observe import observe
from flightrec.sources.plain import forget_plain, has_memory, is_known_plain
from flightrec.sources.sink import quiet


@pytest.fixture(autouse=True)
def _fresh():
    forget_plain()
    yield
    forget_plain()


def kinds() -> dict[str, torch.Tensor]:
    """Tensors that are recorded as they are, and such that are not, all of float32."""
    x = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    freed = x.clone()
    freed.untyped_storage().resize_(0)
    return {
        "plain": x,
        "view": x[1:],
        "parameter": torch.nn.Parameter(x.clone()),
        "with history": x.clone().requires_grad_() * 2,
        "inference": _inference(x),
        "transposed": x.t(),
        "expanded": x[:1].expand(4, 3),
        "no elements": x[:0],
        "freed": freed,
        "negated": torch.complex(x, x).conj().imag,
        "zero": torch._efficientzerotensor((2, 3)),
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
        "subclass": x.as_subclass(Own),
    }


class Own(torch.Tensor):
    pass


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


@pytest.mark.parametrize("name", list(kinds()))
def test_a_tensor_is_taken_the_same_way_when_its_like_was_seen_before(name):
    with quiet():
        for other in kinds().values():
            observe(other)
        again = observe(kinds()[name])
        forget_plain()
        first = observe(kinds()[name])
    assert first.reason == again.reason
    assert (first.plain is None) == (again.plain is None)
    assert type(first.quantized) is type(again.quantized)
    if again.plain is not None:
        assert type(again.plain) is torch.Tensor
        assert not again.plain.requires_grad
        assert torch.equal(first.plain, again.plain)


def test_only_what_lies_plainly_in_its_memory_is_known_after_a_first_look():
    known = {}
    with quiet():
        for name, tensor in kinds().items():
            assert not is_known_plain(tensor) or name != "plain"
            observe(tensor)
        known = {name for name, tensor in kinds().items() if is_known_plain(tensor)}
    assert known == {
        "plain", "view", "parameter", "with history", "inference", "transposed", "expanded", "no elements"
    }  # fmt: skip


def test_what_is_recorded_shares_the_tensors_memory():
    x = torch.ones(3)
    with quiet():
        observe(x)
        assert observe(x).plain.data_ptr() == x.data_ptr()


def test_memory_that_is_too_small_is_told():
    x = torch.ones(8)[2:]
    assert has_memory(x)
    x.untyped_storage().resize_(28)
    assert not has_memory(x)
