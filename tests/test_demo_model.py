"""The demo's model, text and planted fault."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchao")

from flightrec.demo.model import ModelSize, OutlierChannel, Text, build_model  # noqa: E402

SMALL = ModelSize(width=32, num_blocks=2, num_heads=2, num_sequences=2, context=16)


@pytest.fixture(scope="module")
def text() -> Text:
    return Text()


def test_batch_is_the_text_and_its_continuation(text: Text) -> None:
    inputs, targets = text.batch(SMALL, torch.Generator().manual_seed(1))
    assert inputs.shape == targets.shape == (2, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    passage = "".join(text.characters[code] for code in inputs[0])
    assert passage in "".join(text.characters[code] for code in text.codes)


def test_text_is_large_enough_to_train_on(text: Text) -> None:
    assert len(text.codes) > 100_000


def test_products_inside_blocks_are_fp8_and_the_head_is_not(text: Text) -> None:
    model = build_model(len(text.characters), SMALL)
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    assert kinds["blocks.0.mlp.fc2"] == kinds["blocks.1.attention.qkv"] == "Float8Linear"
    assert kinds["head"] == "Linear"


def test_outlier_leaves_the_function_alone_but_not_the_activation(text: Text) -> None:
    model = build_model(len(text.characters), SMALL)
    batch = text.batch(SMALL, torch.Generator().manual_seed(1))
    seen = {}
    model.blocks[1].mlp.fc2.register_forward_pre_hook(lambda _, inputs: seen.update(x=inputs[0].detach()))
    healthy = model(*batch).item()
    amax = seen["x"].abs().amax().item()
    fault = OutlierChannel(model, block=1, channel=3)
    gains = [fault.grow() for _ in range(4)]
    assert gains == [2.0**2, 2.0**6, 2.0**12, 2.0**20]
    assert model(*batch).item() == pytest.approx(healthy, abs=0.01)
    assert seen["x"].abs().amax().item() > 1000 * amax
    assert fault.layer == "blocks.1.mlp.fc2"


def test_outlier_overflows_at_last(text: Text) -> None:
    model = build_model(len(text.characters), SMALL)
    fault = OutlierChannel(model, block=0, channel=0)
    for _ in range(11):
        gain = fault.grow()
    assert gain == float("inf")
    assert not torch.isfinite(model(*text.batch(SMALL, torch.Generator().manual_seed(1))))
