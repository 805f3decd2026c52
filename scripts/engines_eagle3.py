"""An EAGLE-3 export in llama.cpp, OpenVINO and SGLang: run it and its target there beside our own loop.

    python scripts/engines_eagle3.py --target smollm2 --drafter <export> --prompts gsm8k.jsonl humaneval.jsonl \\
        --llama-cpp xllama/bin/python llama.cpp/convert_hf_to_gguf.py --openvino ov/bin/python \\
        --sglang sglang/bin/python --out engines_eagle3.json

An engine that is not given is left out. llama.cpp and OpenVINO read converted models, SGLang the export as it is. What
--work holds is neither converted nor measured again. Each engine writes the same greedy texts without the drafter and
with a fixed chain of --draft tokens, in float32. docs/measuring.md says what the columns mean and how the environments
are made; that of OpenVINO also needs optimum-intel, and this Python sentencepiece, which the converter of llama.cpp
imports.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench_engines import asked
from same_drafter import OURS, Setting, measured, table

from spectrain.measure.tables import show, table_of
from spectrain.stores.environment import cpu_name, date_now
from spectrain.stores.files import load_json, write_json

LAYERS = "eagle_aux_hidden_state_layer_ids"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--drafter", required=True, help="an export of spectrain.train +exp=eagle3")
    parser.add_argument("--vanilla", help="a vanilla drafter, which SGLang alone runs beside ours")
    parser.add_argument("--llama-cpp", nargs=2, metavar=("PYTHON", "SCRIPT"), help="with xllamacpp; the converter")
    parser.add_argument("--openvino", metavar="PYTHON", help="with openvino-genai and optimum-intel")
    parser.add_argument("--sglang", metavar="PYTHON", help="with sglang, which runs with the kernels of sglang_cpu/")
    parser.add_argument("--prompts", nargs="+", help="files, as bench reads them", default=[None])
    parser.add_argument("--limit", type=int, default=2, help="prompts of each file")
    parser.add_argument("--new", type=int, default=64, help="tokens of a text, at most")
    parser.add_argument("--draft", type=int, default=4, help="tokens of a draft")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default="runs/engines-eagle3", help="folder of converted models and texts")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    folder, prompts, eos_ids = asked(args.target, args.prompts, args.limit)
    alike = {"n_draft": args.draft, "n_new": args.new, "eos_ids": eos_ids, "threads": args.threads}
    settings = [
        (python, Setting(drafter, engine, kind, model, export, **alike))
        for engine, python, model, eagle3 in engines(args, str(folder))
        for drafter, kind, export in (
            ("none", "none", None),
            ("EAGLE-3", "eagle3", eagle3),
            ("vanilla", "vanilla", args.vanilla if engine in (OURS, "SGLang") else None),
        )
        if export or kind == "none"
    ]
    frame = table_of(table(measured(settings, prompts, args.work)))
    show([(f"{len(prompts)} prompts", frame)], 160)
    if args.out:
        command = " ".join(["python scripts/engines_eagle3.py", *sys.argv[1:]])
        facts = {"title": "An EAGLE-3 export in other engines", "date": date_now(), "machine": cpu_name()}
        facts |= {"model": Path(folder).name, "dtype": "float32", "batch": "1 and 4", "threads": args.threads}
        result = {**facts, "command": command, "note": "", "columns": list(frame), "rows": frame.to_numpy().tolist()}
        write_json(args.out, result)


def engines(args: argparse.Namespace, target: str) -> Iterator[tuple[str, str, str, str]]:
    """Each engine that is given, its Python, and the target and the drafter as it reads them."""
    yield OURS, sys.executable, target, args.drafter
    if args.sglang:
        yield "SGLang", args.sglang, target, args.drafter
    if args.llama_cpp:
        python, script = args.llama_cpp
        convert, ends = (sys.executable, script), ("--outtype", "f32", "--outfile")
        model = converted(args.work / "target.gguf", *convert, target, *ends)
        drafter = converted(args.work / "drafter.gguf", *convert, args.drafter, "--target-model-dir", target, *ends)
        yield "llama.cpp", python, model, drafter
    if args.openvino:
        optimum = args.openvino, "-m", "optimum.commands.optimum_cli", "export", "openvino", "--trust-remote-code"
        options = "--task", "text-generation-with-past", "--weight-format", "fp32"
        target, drafter = (
            converted(args.work / f"{name}-openvino", *optimum, *options, "--model", path)
            for name, path in (("target", target), ("drafter", args.drafter))
        )
        name_layers(Path(drafter), load_json(Path(args.drafter, "config.json"))["eagle_config"][LAYERS])
        yield "OpenVINO", args.openvino, target, drafter


def name_layers(folder: Path, layers: list[int]) -> None:
    """Write into a drafter of OpenVINO the blocks of the target whose outputs it reads.

    Otherwise openvino-genai reads the outputs of blocks 2, L / 2 and L - 3, where EAGLE-3 has their inputs.
    """
    file, mode = folder / "openvino_model.xml", '<eagle3_mode value="True" />'
    text, named = file.read_text(), f'<hidden_layers_list value="{" ".join(map(str, layers))}" />'
    if named not in text:
        file.write_text(text.replace(mode, mode + named))


def converted(out: Path, *command: str) -> str:
    """Run the command of a converter, which ends with its output, unless that is there."""
    if not out.exists():
        subprocess.run([*command, str(out)], check=True)
    return str(out)


if __name__ == "__main__":
    main()
