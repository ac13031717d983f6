"""What a run checks before it initializes nvdlfw_inspect."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cli_support import flightrec as command
from cli_support import flightrec_process
from torch import nn

import flightrec
from flightrec.config.load import packaged


def config(**recorder: Any) -> dict[str, Any]:
    features = {"FlightRecorder": {"enabled": True, **recorder}}
    return {"a": {"enabled": True, "layers": {"layer_name_regex_pattern": ".*"}, "transformer_engine": features}}


def test_the_feature_directory_holds_the_feature_and_nothing_else() -> None:
    folder = Path(flightrec.feature_directory(config(tensors=["weight"])))
    assert folder.is_absolute()
    assert [path.name for path in folder.iterdir() if path.suffix == ".py"] == ["flight_recorder.py"]
    assert not [path for path in folder.rglob("*.py") if path.parent != folder]


def test_neither_torch_nor_nvdlfw_inspect_is_needed_to_ask() -> None:
    program = (
        "import sys, flightrec; flightrec.feature_directory(); "
        "assert not {'torch', 'nvdlfw_inspect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_bad_configuration_is_refused_before_training() -> None:
    with pytest.raises(flightrec.ConfigError, match="did you mean freq"):
        flightrec.feature_directory(config(tensors=["weight"], frq=1))
    with pytest.raises(flightrec.ConfigError, match="did you mean freq"):
        flightrec.check_inspect(config(tensors=["weight"], frq=1))


class Delayed(nn.Module):
    """Carries what Transformer Engine's modules carry: a store of weight gradients."""

    def __init__(self, delays: bool) -> None:
        super().__init__()
        self.wgrad_store = SimpleNamespace(delay_wgrad_compute=lambda: delays)


def test_delayed_weight_gradients_are_refused_with_the_way_out() -> None:
    fine = nn.Sequential(Delayed(False), nn.Linear(2, 2))
    flightrec.check_inspect(config(tensors=["weight"]), fine)
    with pytest.raises(flightrec.AttachError, match=r"1 modules .*\(1\.0\).*Recorder\.attach\(model\)"):
        flightrec.check_inspect(config(tensors=["weight"]), nn.Sequential(fine, nn.Sequential(Delayed(True))))


def test_the_command_tells_what_the_shipped_file_means(tmp_path: Path) -> None:
    shown = command("check", str(packaged("inspect-transformer-engine")))
    assert shown.returncode == 0, shown.stderr
    assert "fine, an nvdlfw_inspect configuration" in shown.stdout
    assert "mlp: weight (keeps quantized) every 10 iterations" in shown.stdout
    assert "nan (nonfinite, fault)" in shown.stdout
    bad = tmp_path / "bad.yaml"
    bad.write_text(packaged("inspect-transformer-engine").read_text().replace("freq: 10", "freq: 0"))
    refused = command("check", str(bad))
    assert refused.returncode == 1
    assert "tensors_struct[1].freq: expected at least 1, got 0" in refused.stderr


@pytest.mark.parametrize("delays", [False, True])
def test_the_command_looks_at_a_model(delays: bool, tmp_path: Path) -> None:
    module = tmp_path / f"factory_{delays}.py"
    module.write_text(
        "import types, torch\ndef make():\n    net = torch.nn.Linear(2, 2)\n"
        f"    net.wgrad_store = types.SimpleNamespace(delay_wgrad_compute=lambda: {delays})\n    return net\n"
    )
    file = str(packaged("inspect-transformer-engine"))
    shown = flightrec_process("check", file, "--model", f"{module.stem}:make", cwd=tmp_path)
    assert shown.returncode == (2 if delays else 0), shown.stderr
    assert "delay_wgrad_compute=True" in shown.stderr if delays else "debug mode works" in shown.stdout
