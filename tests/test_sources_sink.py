from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from flightrec.sources.sink import is_plain, quiet


def test_quiet_makes_no_history_and_no_inference_tensors():
    weight = nn.Parameter(torch.ones(2))
    with quiet():
        assert not (weight * 2).requires_grad
    with torch.inference_mode():
        with quiet():
            made = torch.ones(2)
        assert torch.is_inference_mode_enabled()
    assert not made.is_inference()
    assert torch.is_grad_enabled()


def test_quiet_computes_in_the_tensors_own_dtype_and_leaves_autocast_on():
    x = torch.full((8, 8), 1.001)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with quiet():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    with quiet():
        pass
    assert not torch.is_autocast_enabled("cpu")


def test_quiet_keeps_autocasts_cache_of_weights():
    weight = nn.Parameter(torch.randn(4, 4))
    casts: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            casts.append(str(func))
            return func(*args, **(kwargs or {}))

    with Count(), torch.autocast("cpu", dtype=torch.bfloat16):
        x = torch.randn(2, 4, dtype=torch.bfloat16)
        nn.functional.linear(x, weight)
        with quiet():
            torch.ones(1)
        nn.functional.linear(x, weight)
    assert sum("_to_copy" in name for name in casts) == 1


def test_quiet_is_not_seen_by_function_modes():
    seen: list[object] = []

    class Spy(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Spy():
        with quiet():
            x.clone()
        assert not seen
        x.clone()
        assert seen


def test_quiet_stays_out_of_selective_checkpointing_but_not_of_other_modes():
    seen: list[str] = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Count(), quiet():
        torch.ones(2)
    assert len(seen) == 1, "a mode that counts still sees what we do"

    asked: list[str] = []

    def policy(ctx, op, *args, **kwargs):
        asked.append(str(op))
        return CheckpointPolicy.MUST_SAVE

    def region(x):
        with quiet():
            x.detach().cos()
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    checkpoint(
        region, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(policy)
    ).sum().backward()
    assert any("sin" in op for op in asked)
    assert not any("cos" in op for op in asked)


def test_quiet_lets_exceptions_through_and_restores_everything():
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        with pytest.raises(ZeroDivisionError), quiet():
            raise ZeroDivisionError
        assert torch.is_inference_mode_enabled()
        assert torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


def test_is_plain():
    assert is_plain(torch.ones(1).expand(3))
    assert is_plain(nn.Parameter(torch.ones(1)))
    assert not is_plain(torch.ones(1).to_sparse())
    assert not is_plain(torch.empty(1, device="meta"))
    assert not is_plain(torch.ones(1).as_subclass(type("Sub", (torch.Tensor,), {})))
    assert not is_plain(1.0)
