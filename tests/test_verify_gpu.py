"""A healthy training under Transformer Engine on a GPU: what was recorded agrees with itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import te_models

import flightrec
from flightrec.analysis.verify import Verified, verify
from flightrec.storage import read

pytestmark = pytest.mark.filterwarnings("ignore")

TENSORS = ["activation", "weight", "output", "gradient", "dgrad", "wgrad"]
CONFIG = {
    "budget": "none",
    "ring": {"iterations": 1},
    "select": [{"tensors": TENSORS}],
    "triggers": [{"kind": "manual"}],
    "incident": {"after": 0},
}
OPERANDS = {"activation", "weight", "gradient"}
DIRECTIONS = {"forward", "dgrad", "wgrad"}


def verified(directory: Path) -> Verified:
    """The one incident's outcomes, told whole where a test fails."""
    (folder,) = directory.iterdir()
    with read.open_incident(folder) as incident:
        found = verify(incident)
        print("blind:", incident.blind)
    for outcome in found.outcomes:
        key = outcome.where.key
        print(key.layer, key.tensor, key.microbatch, outcome.what, outcome.side, outcome.why_not or "compared",
              *outcome.notes, *outcome.mismatches, sep=" | ")  # fmt: skip
    return found


def compared(found: Verified) -> tuple[set[str], set[str]]:
    """Tensors whose codes, and directions whose products, were compared."""
    codes = {outcome.where.key.tensor for outcome in found.compared if outcome.what == "codes"}
    products = {outcome.side for outcome in found.compared if outcome.what == "product"}
    return codes & OPERANDS, products


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", te_models.RECIPES)
def test_a_healthy_training_on_a_gpu_agrees(recipe: str, tmp_path: Path) -> None:
    model = te_models.make(num_layers=1, stem=True)
    with flightrec.Recorder(CONFIG | {"ring": {"iterations": 1, "memory": "1 GiB"}}, directory=tmp_path) as recorder:
        recorder.attach(model)
        te_models.train(
            model, te_models.recipe_of(recipe), te_models.tokens(4, 2), recorder,
            end=lambda iteration: recorder.trigger("look") if iteration == 3 else None,
        )  # fmt: skip
    found = verified(tmp_path)
    assert not found.mismatches, found.mismatches
    assert compared(found) == (OPERANDS, DIRECTIONS)
    layers = {outcome.where.key.layer for outcome in found.compared if outcome.what == "product"}
    assert len(layers) == 1 + len(te_models.PRODUCTS), layers
