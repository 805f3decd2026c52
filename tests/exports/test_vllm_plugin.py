"""The entry point that vLLM calls, in an environment where only vLLM's dependencies are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PROPOSER = "vllm/model_executor/models/llama_eagle3.py"
REGISTER = """
import logging, sys
logging.basicConfig(format="%(message)s")
from spectrain.exports.vllm_plugin import register
register()
print(*{name.split(".")[0] for name in sys.modules} & {"torch", "numpy", "hydra", "transformers"})
"""


def registered(folder: Path, version: str, *files: str) -> tuple[str, str]:
    """What `register` prints and logs where a vLLM of this version has these files."""
    registry = "class ModelRegistry:\n    register_model = staticmethod(print)\n"
    for file in (PROPOSER, *files):
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        for package in (folder / file).relative_to(folder).parents:
            (folder / package / "__init__.py").touch()
    for file in files:
        (folder / file).touch()
    (folder / "vllm/__init__.py").write_text(f"__version__ = {version!r}\n{registry}")
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run([sys.executable, "-c", REGISTER], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), done.stderr.strip()


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1+cpu", "1.0.0", "0.1.dev7+g1234567"])
def test_the_class_is_registered_by_its_name_and_nothing_heavy_is_imported(tmp_path, version):
    said = registered(tmp_path, version, PROPOSER)
    assert said == ("SpireLlamaEagle3 spectrain.exports.vllm_spire:SpireLlamaEagle3", "")


def test_a_vllm_that_is_too_old_or_lacks_the_proposer_is_named_in_a_sentence(tmp_path):
    known = "they ran in vLLM 0.32.0, and the source of 0.33.0 was read"
    old = f"SPIRe drafters cannot be served: this is vLLM 0.9.2, which is too old; {known}"
    assert registered(tmp_path / "old", "0.9.2", PROPOSER) == ("", old)
    lacks = "this vLLM 0.40.0 lacks its EAGLE-3 proposer (vllm.model_executor.models.llama_eagle3)"
    assert registered(tmp_path / "new", "0.40.0") == ("", f"SPIRe drafters cannot be served: {lacks}; {known}")
