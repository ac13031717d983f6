from __future__ import annotations

import pytest
import torch
from sources_support import bits
from torch import nn

from flightrec.sources.observe import observe


def test_plain_tensors_are_observed_without_copy_and_without_history():
    x = torch.ones(3, requires_grad=True) * 2
    plain = observe(x).plain
    assert plain.data_ptr() == x.data_ptr()
    assert not plain.requires_grad
    parameter = nn.Parameter(torch.ones(2))
    assert observe(parameter).plain.data_ptr() == parameter.data_ptr()
    assert type(observe(parameter).plain) is torch.Tensor
    expanded = torch.ones(1, 3).expand(4, 3).t()
    assert observe(expanded).plain.stride() == expanded.stride()


def test_subclasses_with_their_own_memory_are_seen_as_plain():
    class Tagged(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise AssertionError("ran") if func is not torch.Tensor.as_subclass else None

    x = torch.tensor([1.0, torch.nan]).as_subclass(torch.Tensor)
    tagged = torch.Tensor._make_subclass(Tagged, x)
    with torch._C.DisableTorchFunction():
        plain = observe(tagged).plain
    assert type(plain) is torch.Tensor
    assert torch.equal(bits(plain), bits(x))


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: torch.empty(2, device="meta"), "meta"),
        (nn.UninitializedParameter, "lazy"),
        (lambda: freed(torch.ones(4)), "freed"),
        (lambda: shrunk(torch.ones(4)), "holds 8 bytes of the 16"),
        (lambda: torch.ones(1 << 14).as_strided((1 << 13, 1 << 13), (1, 1)), "overlapping view"),
        (lambda: torch.ones(4, 4).to_mkldnn(), "no plain arrays"),
        (lambda: freed(torch.ones(4).to_sparse()._values(), of=torch.ones(4).to_sparse()), "values"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_read_gives_a_reason(made, why):
    observed = observe(made())
    assert (observed.plain, observed.quantized) == (None, None)
    assert why in observed.reason


def freed(tensor, of=None):
    if of is not None:
        of._values().untyped_storage().resize_(0)
        return of
    tensor.untyped_storage().resize_(0)
    return tensor


def shrunk(tensor):
    tensor.untyped_storage().resize_(8)
    return tensor


def test_what_is_inside_a_transform_gives_a_reason():
    seen = []
    torch.vmap(lambda x: (seen.append(observe(x)), x)[1])(torch.ones(2, 3))
    torch.func.grad(lambda x: (seen.append(observe(x)), x.sum())[1])(torch.ones(3))
    assert [found.plain for found in seen] == [None, None]
    assert all("functorch" in found.reason for found in seen)


@pytest.mark.parametrize("layout", ["coo", "csr", "csc", "bsr", "bsc"])
@pytest.mark.filterwarnings("ignore")
def test_sparse_tensors_give_values_and_positions_that_make_them_again(layout):
    dense = torch.tensor([[0.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, -3.0], [0.0, 0.0, 0.0, 0.0], [4.0, 0.0, 5.0, 0.0]])
    made = {
        "coo": dense.to_sparse_coo,
        "csr": dense.to_sparse_csr,
        "csc": dense.to_sparse_csc,
        "bsr": lambda: dense.to_sparse_bsr((2, 2)),
        "bsc": lambda: dense.to_sparse_bsc((2, 2)),
    }[layout]()
    observed = observe(made)
    parts = observed.quantized
    assert parts.info.metadata["layout"] == f"sparse_{layout}"
    assert parts.info.metadata["shape"] == [4, 4]
    first, *others = parts.components.values()
    if layout == "coo":
        again = torch.sparse_coo_tensor(first, observed.plain, (4, 4))
    else:
        again = torch.sparse_compressed_tensor(first, others[0], observed.plain, (4, 4), layout=made.layout)
    assert torch.equal(again.to_dense(), dense)
    assert not parts.has_rows


def test_an_uncoalesced_gradient_is_taken_as_it_is():
    embedding = nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 2])).sum().backward()
    gradient = embedding.weight.grad
    observed = observe(gradient)
    assert not gradient.is_coalesced()
    assert observed.plain.data_ptr() == gradient._values().data_ptr()
    assert observed.quantized.components["indices"].tolist() == [[1, 1, 2]]
    assert observed.quantized.info.metadata["coalesced"] is False


@pytest.mark.filterwarnings("ignore")
def test_nested_and_masked_tensors_give_their_values():
    members = [torch.ones(2, 3), torch.full((4, 3), 2.0)]
    jagged = observe(torch.nested.nested_tensor(members, layout=torch.jagged))
    assert torch.equal(jagged.plain, torch.cat(members))
    assert jagged.quantized.components["offsets"].tolist() == [0, 2, 6]
    strided = observe(torch.nested.nested_tensor(members))
    assert torch.equal(strided.plain, torch.cat(members).reshape(-1))
    assert strided.quantized.components["sizes"].tolist() == [[2, 3], [4, 3]]
    from torch.masked import masked_tensor

    mask = torch.tensor([True, False])
    masked = observe(masked_tensor(torch.tensor([1.0, torch.nan]), mask))
    assert masked.plain.tolist() == [1.0, 0.0]
    assert torch.equal(masked.quantized.components["mask"], mask)
    assert masked.quantized.has_rows


@pytest.mark.filterwarnings("ignore")
def test_a_jagged_tensor_with_holes_is_kept_and_not_judged():
    padded = torch.arange(12.0).reshape(2, 6)
    lengths = torch.tensor([2, 3])
    holed = torch.nested.narrow(padded, 1, torch.zeros(2, dtype=torch.int64), lengths, layout=torch.jagged)
    observed = observe(holed)
    assert observed.plain is None
    assert not observed.quantized.is_understood
    assert observed.quantized.components["lengths"].tolist() == [2, 3]


@pytest.mark.parametrize("name", ["uint4", "int3", "bits16"])
def test_shell_dtypes_are_kept_as_bytes(name):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    codes = torch.arange(4, dtype=torch.int16 if name == "bits16" else torch.uint8)
    observed = observe(codes.view(dtype))
    assert torch.equal(observed.quantized.components["data"], codes)
    assert observed.quantized.formats["data"] == name
    assert not observed.quantized.is_understood


def test_packed_fp4_is_known():
    codes = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    observed = observe(codes.view(torch.float4_e2m1fn_x2))
    assert observed.plain is None
    assert observed.quantized.format == "float4_e2m1fn_x2"
    assert torch.equal(observed.quantized.data, codes)


def test_lazily_negated_and_zero_tensors_become_plain():
    negated = torch.tensor([1 + 2j, 3 - 4j]).conj().imag
    assert negated.is_neg()
    assert observe(negated).plain.numpy().tolist() == [-2.0, 4.0]
    assert observe(torch._efficientzerotensor((2,))).plain.numpy().tolist() == [0.0, 0.0]


def test_an_expanded_element_is_no_reason_and_costs_nothing():
    huge = torch.ones(1).expand(1 << 20, 1 << 20)
    assert observe(huge).plain.shape == huge.shape


def test_fake_tensors_give_a_reason():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.ones(2))
    assert observe(fake) == (None, None, "fake tensor without data")


def test_quantized_wrappers_are_handed_on_as_they_are():
    module = pytest.importorskip("torchao.float8.float8_training_tensor")
    tensor = module.hp_tensor_and_scale_to_float8(torch.ones(2, 2), torch.tensor(3.0), torch.float8_e4m3fn)
    assert observe(tensor).quantized is tensor
