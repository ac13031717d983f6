"""How Transformer Engine lays out block scales, padding included, and which views bring them to logical order.

``rows`` are all leading axes of a tensor taken together, ``columns`` the last. Uses slicing and ``.T`` only, so that
the same lines serve numpy arrays here and torch tensors (as views, without a launch) where tensors are recorded.
"""

from __future__ import annotations

from typing import Any

FP8_BLOCK = 128
MX_BLOCK = 32
NVFP4_BLOCK = 16
BLOCKS = {"float8_block": FP8_BLOCK, "mxfp8": MX_BLOCK, "nvfp4": NVFP4_BLOCK}
"""Elements of a block, by scheme."""


def divided(size: int, block: int) -> int:
    """Number of blocks, the last one perhaps not full."""
    return -(-size // block)


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up."""
    return divided(size, multiple) * multiple


def scale_shape(scheme: str, rows: int, columns: int, *, columnwise: bool, two_d: bool = False) -> tuple[int, int]:
    """Shape in which the scales of one side are held, padding included.

    Args:
        scheme: ``float8_block``, ``mxfp8`` or ``nvfp4``.
        rows: of the tensor.
        columns: of the tensor.
        columnwise: which side.
        two_d: ``float8_block`` in blocks of 128 x 128 rather than 1 x 128.
    """
    block = BLOCKS[scheme]
    down, across = divided(rows, block), divided(columns, block)
    if scheme == "mxfp8":
        return (padded(down, 4), padded(columns, 128)) if columnwise else (padded(rows, 128), padded(across, 4))
    if scheme == "nvfp4":
        return (padded(columns, 128), padded(down, 4)) if columnwise else (padded(rows, 128), padded(across, 4))
    if two_d:
        return (across, padded(down, 4)) if columnwise else (down, padded(across, 4))
    return (down, padded(columns, 4)) if columnwise else (across, padded(rows, 4))


def logical_scale(
    scheme: str, scale: Any, rows: int, columns: int, *, columnwise: bool, two_d: bool = False
) -> tuple[Any, tuple[int, int]]:
    """A view of the scales without padding, in the order of the codes that they scale, and the blocks' shape.

    Args:
        scheme: as in ``scale_shape``.
        scale: a two-dimensional array or tensor as Transformer Engine holds it, padded or not.
        rows: of the tensor.
        columns: of the tensor.
        columnwise: which side.
        two_d: as in ``scale_shape``.

    Returns:
        The view, and elements that share a scale in (rows, columns); for the column-wise side of ``nvfp4``, whose codes
        are held transposed, in (columns, rows).
    """
    block = BLOCKS[scheme]
    down, across = divided(rows, block), divided(columns, block)
    if scheme == "nvfp4":
        return (_crop(scale, columns, down) if columnwise else _crop(scale, rows, across)), (1, block)
    if scheme == "mxfp8":
        return (_crop(scale, down, columns), (block, 1)) if columnwise else (_crop(scale, rows, across), (1, block))
    if two_d:
        return (_crop(scale, across, down).T if columnwise else _crop(scale, down, across)), (block, block)
    return (_crop(scale, down, columns), (block, 1)) if columnwise else (_crop(scale, across, rows).T, (1, block))


def _crop(scale: Any, rows: int, columns: int) -> Any:
    """Without a slice, which costs a torch tensor microseconds, where there is no padding."""
    return scale if tuple(scale.shape) == (rows, columns) else scale[:rows, :columns]
