"""Transformer Engine's delayed scaling without a GPU: its own state, quantizer and tensor class; torch casts."""

from __future__ import annotations

from typing import Any

import te_cpu
import torch

HISTORY_LENGTH = 16


class Delayed:
    """One quantizer of a module under delayed scaling.

    Attributes:
        state: Transformer Engine's ``DelayedScalingRecipeState`` of one quantizer.
        quantizer: what it made: holds views of the state's words.
    """

    def __init__(self) -> None:
        te_cpu.install()
        from transformer_engine.common.recipe import DelayedScaling
        from transformer_engine.pytorch.quantization import DelayedScalingRecipeState

        self.recipe = DelayedScaling(amax_history_len=HISTORY_LENGTH, amax_compute_algo="max")
        self.state = DelayedScalingRecipeState(
            self.recipe, mode="forward", num_quantizers=1, device=torch.device("cpu")
        )
        (self.quantizer,) = self.state.make_quantizers()

    @property
    def scale(self) -> torch.Tensor:
        """The live scale, 0-dimensional; multiplies to encode."""
        return self.quantizer.scale

    def quantize(self, x: torch.Tensor) -> Any:
        """A ``Float8Tensor`` of E4M3 codes of ``x``, made with the live scale; the amax is noted."""
        self.quantizer.amax.copy_(torch.maximum(self.quantizer.amax, x.abs().amax()))
        codes = (x * self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        return self.tensor(codes, 1 / self.scale, x.dtype)

    def tensor(self, codes: torch.Tensor, scale_inv: torch.Tensor | float, dtype: torch.dtype = torch.float32) -> Any:
        """A ``Float8Tensor`` of this quantizer with any codes and any scale."""
        from transformer_engine.pytorch.tensor.float8_tensor import Float8Tensor

        return Float8Tensor(
            shape=codes.shape,
            dtype=dtype,
            data=codes.view(torch.uint8),
            fp8_scale_inv=torch.as_tensor(scale_inv, dtype=torch.float32).reshape(1),
            fp8_dtype=self.quantizer.dtype,
            quantizer=self.quantizer,
            device=torch.device("cpu"),
        )

    def update(self) -> None:
        """Compute the next scale from the amaxes so far, as Transformer Engine does at the end of an autocast."""
        history = self.state.amax_history
        self.state.scale.copy_(448.0 / history.amax(0).clamp(min=1e-30))
        history.copy_(history.roll(-1, 0))
        history[0] = 0

    def parts(self, tensor: Any) -> Any:
        """The tensor with its quantizer's words as they are right behind the quantizing call."""
        from flightrec.sources.extract_te import QuantizerState, extract_te

        state = QuantizerState(
            scale=self.scale,
            amax=self.quantizer.amax,
            amax_history=self.state.amax_history[:, 0],
            recipe={"class": "DelayedScaling", "margin": self.recipe.margin, "amax_history_len": HISTORY_LENGTH},
            at_quantizing=True,
        )
        extraction = extract_te(tensor, state=state)
        assert extraction.parts is not None, extraction.reason
        return extraction.parts
