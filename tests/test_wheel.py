"""The wheel carries what the commands need: configs, the bundled target, and the shipped drafters and datastores."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spectrain.stores import locations

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.shipped
def test_a_wheel_composes_its_config_in_an_empty_folder(tmp_path):
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in ("pystdlib-8l", *locations.SHIPPED):
        assert (site / "spectrain/checkpoints" / name / "model.safetensors").is_file()
    assert all((site / "spectrain/checkpoints" / name / "manifest.json").is_file() for name in locations.SHIPPED_STORES)
    files = [*ROOT.glob("spectrain/*/templates/*"), *ROOT.glob("spectrain/serving/page/*")]
    assert len(files) == 4 + 4
    assert all((site / file.relative_to(ROOT)).is_file() for file in files)
    # The unpacked wheel stands before the checkout on the path, so it is what runs.
    environment = {**os.environ, "PYTHONPATH": str(site)}
    command = [sys.executable, "-m", "spectrain.train", "--cfg", "job", "+exp=spire"]
    out = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout
    assert "window_tokens: 64" in out
    where = [
        sys.executable,
        "-c",
        "from spectrain.config import conf_dir; from spectrain.stores.locations import bundled_folder; "
        "print(conf_dir(), bundled_folder('pystdlib-8l'))",
    ]
    out = subprocess.run(where, cwd=empty, env=environment, capture_output=True, text=True, check=True).stdout
    assert out.split() == [str(site / "spectrain/conf"), str(site / "spectrain/checkpoints/pystdlib-8l")]
    assert list(empty.iterdir()) == []
