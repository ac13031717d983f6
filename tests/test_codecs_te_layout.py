from __future__ import annotations

import numpy as np
import pytest

from flightrec.codecs import te_layout

CASES = [
    # scheme, two_d, columnwise, shape of the scales as documented for (200, 300) or (192, 320), logical, blocks
    ("float8_block", False, False, (200, 300), (3, 200), (200, 3), (1, 128)),
    ("float8_block", False, True, (200, 300), (2, 300), (2, 300), (128, 1)),
    ("float8_block", False, False, (198, 300), (3, 200), (198, 3), (1, 128)),
    ("float8_block", False, True, (200, 298), (2, 300), (2, 298), (128, 1)),
    ("float8_block", True, False, (200, 300), (2, 4), (2, 3), (128, 128)),
    ("float8_block", True, True, (200, 300), (3, 4), (2, 3), (128, 128)),
    ("mxfp8", False, False, (192, 320), (256, 12), (192, 10), (1, 32)),
    ("mxfp8", False, True, (192, 320), (8, 384), (6, 320), (32, 1)),
    ("nvfp4", False, False, (192, 320), (256, 20), (192, 20), (1, 16)),
    ("nvfp4", False, True, (192, 320), (384, 12), (320, 12), (1, 16)),
]


@pytest.mark.parametrize(("scheme", "two_d", "columnwise", "shape", "held", "logical", "blocks"), CASES)
def test_held_and_logical_shapes(scheme, two_d, columnwise, shape, held, logical, blocks) -> None:
    assert te_layout.scale_shape(scheme, *shape, columnwise=columnwise, two_d=two_d) == held
    raw = np.arange(held[0] * held[1]).reshape(held)
    view, found = te_layout.logical_scale(scheme, raw, *shape, columnwise=columnwise, two_d=two_d)
    assert (view.shape, found) == (logical, blocks)
    assert np.shares_memory(view, raw)
    assert view[0, 0] == 0


def test_scales_without_padding_are_taken_too() -> None:
    raw = np.ones((3, 198))
    view, _ = te_layout.logical_scale("float8_block", raw, 198, 300, columnwise=False)
    assert view.shape == (198, 3)
