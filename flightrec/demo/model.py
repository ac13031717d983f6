"""A small character-level GPT whose products run in FP8, its text, and the fault that the demo plants.

Runs on the CPU: torchao's Float8 products are emulated, bit for bit what the codes allow, without FP8 hardware.
Shapes carry suffixes: B sequences, L characters a sequence, W width, F = 4 W the hidden width, H heads, V characters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from flightrec.errors import MissingExtraError


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large the demo's model and batches are.

    Attributes:
        width: channels of the residual stream, a multiple of 16 (FP8 products ask for that).
        num_blocks: transformer blocks.
        num_heads: attention heads, a divisor of ``width``.
        num_sequences: sequences in a batch.
        context: characters in a sequence.
    """

    width: int = 128
    num_blocks: int = 4
    num_heads: int = 4
    num_sequences: int = 16
    context: int = 128


class Text:
    """The manual of the Python language that ships with every Python, as character numbers.

    Attributes:
        characters: the alphabet; a character's number is its place here.
        codes: int64 [number of characters in the text], on the CPU.
    """

    def __init__(self) -> None:
        # Imported here: half a megabyte of text that only the demo needs.
        from pydoc_data import topics

        text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
        self.characters = "".join(sorted(set(text)))
        number = {character: index for index, character in enumerate(self.characters)}
        self.codes = torch.tensor([number[character] for character in text])

    def batch(self, size: ModelSize, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the text.

        Args:
            size: gives the number of sequences B and their length L.
            generator: CPU generator that picks the windows.

        Returns:
            Inputs and targets, both int64 [B, L]; the targets are the inputs moved on by one character.
        """
        starts = torch.randint(len(self.codes) - size.context - 1, (size.num_sequences, 1), generator=generator)
        windows = self.codes[starts + torch.arange(size.context + 1)]
        return windows[:, :-1], windows[:, 1:]


class Attention(nn.Module):
    """Causal self-attention; its two products are ``qkv`` and ``projection``."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.num_heads = size.num_heads
        self.qkv = nn.Linear(size.width, 3 * size.width, bias=False)
        self.projection = nn.Linear(size.width, size.width, bias=False)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """Mix the sequence's characters; input and result [B, L, W]."""
        b, length, width = x_BLW.shape
        heads = self.qkv(x_BLW).view(b, length, 3, self.num_heads, width // self.num_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.projection(mixed.transpose(1, 2).reshape(b, length, width))
        return result


class FeedForward(nn.Module):
    """Two products, ``fc1`` and ``fc2``, around a GELU, with a gain for each hidden channel between them.

    The gain is 1 in a healthy model. ``OutlierChannel`` raises one of its channels.
    """

    gain: Tensor

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size.width, 4 * size.width, bias=False)
        self.fc2 = nn.Linear(4 * size.width, size.width, bias=False)
        self.register_buffer("gain", torch.ones(4 * size.width))

    def forward(self, x_BLW: Tensor) -> Tensor:
        """Transform each character by itself; input and result [B, L, W]."""
        hidden_BLF = functional.gelu(self.fc1(x_BLW)) * self.gain
        result: Tensor = self.fc2(hidden_BLF)
        return result


class Block(nn.Module):
    """One transformer block, norms before the branches."""

    def __init__(self, size: ModelSize) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.mlp_norm = nn.LayerNorm(size.width)
        self.mlp = FeedForward(size)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """Input and result [B, L, W]."""
        x_BLW = x_BLW + self.attention(self.attention_norm(x_BLW))
        result: Tensor = x_BLW + self.mlp(self.mlp_norm(x_BLW))
        return result


class GPT(nn.Module):
    """The model; its output head and embeddings stay in high precision, as is usual in FP8 training."""

    def __init__(self, num_characters: int, size: ModelSize) -> None:
        super().__init__()
        self.embedding = nn.Embedding(num_characters, size.width)
        self.position = nn.Embedding(size.context, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.num_blocks))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, num_characters, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("projection.weight", "fc2.weight"))
                nn.init.normal_(parameter, std=0.02 / ((2 * size.num_blocks) ** 0.5 if deep else 1.0))

    def forward(self, characters_BL: Tensor, targets_BL: Tensor) -> Tensor:
        """Mean cross entropy of the next character; a scalar, float32."""
        x_BLW = self.embedding(characters_BL) + self.position.weight
        for block in self.blocks:
            x_BLW = block(x_BLW)
        logits_BLV = self.head(self.norm(x_BLW))
        return functional.cross_entropy(logits_BLV.flatten(0, 1), targets_BL.flatten())


def build_model(num_characters: int, size: ModelSize, *, seed: int = 0) -> GPT:
    """Make the model and turn the products inside its blocks into torchao Float8 products.

    Args:
        num_characters: size V of the alphabet.
        size: widths and counts.
        seed: of the initial weights.

    Returns:
        The model, on the CPU, in float32 with FP8 products.

    Raises:
        MissingExtraError: torchao is not installed.
    """
    try:
        with no_warnings_logged():
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        message = "the demo trains with torchao's FP8, which is not installed: pip install 'torch-flightrec[torchao]'"
        raise MissingExtraError(message) from error
    torch.manual_seed(seed)
    model = GPT(num_characters, size)
    inside_block: Callable[[nn.Module, str], bool] = lambda _, name: name.startswith("blocks.")  # noqa: E731
    convert_to_float8_training(model, config=Float8LinearConfig(emulate=True), module_filter_fn=inside_block)
    return model


@contextmanager
def no_warnings_logged() -> Iterator[None]:
    """Importing torchao logs which GPU kernels it cannot load; nobody who runs a demo on a CPU needs to read that."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


class OutlierChannel:
    """The planted fault: one hidden channel of one block grows, and so ruins the block's FP8 activation.

    The channel's gain is raised and the weights that read the channel are lowered by the same factor. In exact
    arithmetic the model computes what it always did, so the loss has nothing to tell. But one scale serves the whole
    tensor, and it follows the largest value: all other channels sink below what FP8 can hold. Such channels grow by
    themselves in long FP8 runs; here the growth itself grows, so that the demo ends within minutes.
    """

    def __init__(self, model: GPT, *, block: int, channel: int) -> None:
        self.layer = f"blocks.{block}.mlp.fc2"
        self.channel = channel
        mlp = model.blocks[block].mlp
        assert isinstance(mlp, FeedForward)
        self._mlp = mlp
        self._weights = mlp.fc2.weight[:, channel].detach().clone()
        self._num_steps = 0

    @torch.no_grad()
    def grow(self) -> float:
        """Raise the channel once more, by twice the power of two of the last time; call before an iteration.

        Returns:
            The channel's gain: 2^2, 2^6, 2^12, 2^20, ..., at last beyond float32.
        """
        self._num_steps += 1
        exponent = self._num_steps * (self._num_steps + 1)
        gain = torch.tensor(2.0).pow(exponent)
        self._mlp.gain[self.channel] = gain
        # The optimizer moved the weights by more than they still are; put them where the function is the old one.
        self._mlp.fc2.weight[:, self.channel] = self._weights / gain
        return gain.item()
