"""What the recorder says of its budget at the start and in ``summary()``. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from flightrec.ring.memory import format_bytes
from flightrec.ring.ring import Ring

_NAMES = 4


@dataclass(frozen=True, slots=True)
class Story:
    """The figures; bytes and records are those of one iteration, seconds are predicted.

    Attributes:
        share: the budget, None for everything.
        blocks: layers whose boundaries are recorded always.
        always_records, always_bytes, always_s: of what is recorded in every iteration.
        num_layers: layers that take turns.
        rotating_records, rotating_bytes, rotating_s: of all of them together.
        num_turns: iterations of a round.
        is_measured: the round's length rests on an observed step.
        step_s: observed step without recording, None if not known yet.
        judging_s: what judging takes of an iteration: of the stream, or of the host where that is the slower one.
    """

    share: float | None
    blocks: tuple[str, ...]
    always_records: int
    always_bytes: int
    always_s: float
    num_layers: int
    rotating_records: int
    rotating_bytes: int
    rotating_s: float
    num_turns: int
    is_measured: bool
    step_s: float | None
    judging_s: float

    @property
    def num_bytes(self) -> float:
        """Recorded in an iteration, the mean over a round."""
        return self.always_bytes + self.rotating_bytes / self.num_turns

    @property
    def predicted_s(self) -> float:
        """What an iteration's recording and judging add to the step, the mean over a round."""
        return self.always_s + self.rotating_s / self.num_turns + self.judging_s


def tell(story: Story, ring: Ring | None = None) -> list[str]:
    """The story as lines of text."""
    whole = story.share is None or story.num_turns == 1
    lines = [_head(story, whole)]
    if not whole:
        lines.append(_turns(story))
    cost = f"an iteration: {format_bytes(story.num_bytes)}, {milliseconds(story.predicted_s)} predicted"
    if story.step_s is not None:
        cost += f", {100 * story.predicted_s / story.step_s:.3g}% of the observed step of {milliseconds(story.step_s)}"
    if story.judging_s > 0:
        cost += f"; {milliseconds(story.judging_s)} of it for judging"
    lines.append(cost)
    if ring is not None:
        lines.append(f"N = {ring.iterations} iterations in {format_bytes(ring.num_bytes)} on {ring.device}")
    return lines


def _head(story: Story, whole: bool) -> str:
    if story.share is None:
        return f"budget none: everything that is selected in every iteration, {_everything(story)}"
    name = f"budget {100 * story.share:g}% of a step"
    if whole:
        return f"{name}: enough for everything that is selected in every iteration, {_everything(story)}"
    boundaries = "no block boundary is selected, so only loss, metrics and what is recorded by hand"
    if story.blocks:
        boundaries = f"output and gradient of {len(story.blocks)} blocks ({names(story.blocks)}), loss and metrics"
    size = f"{story.always_records} records, {format_bytes(story.always_bytes)}, {milliseconds(story.always_s)}"
    return f"{name}: in every iteration {boundaries}: {size}"


def _turns(story: Story) -> str:
    text = (
        f"in turns {story.num_layers} layers, {story.rotating_records} records and "
        f"{format_bytes(story.rotating_bytes)} in all"
    )
    if not story.is_measured:
        return f"{text}; a round takes at most {story.num_turns} iterations, how many shows when a step's time is known"
    return f"{text}; a round takes {story.num_turns} iterations"


def _everything(story: Story) -> str:
    return f"{story.always_records + story.rotating_records} records"


def milliseconds(seconds: float) -> str:
    """``0.00123`` -> ``1.23 ms``."""
    return f"{1e3 * seconds:.3g} ms"


def names(layers: tuple[str, ...]) -> str:
    """A few of them."""
    shown = [layer or "the model" for layer in layers[:_NAMES]]
    return ", ".join(shown) + (", ..." if len(layers) > _NAMES else "")
