"""Compare how well drafters of a target are accepted: tau on the same held-out contexts, in pairs.

    python scripts/compare_drafters.py checkpoints/spire-bf16 checkpoints/spire-int8 --rows 256
    python scripts/compare_drafters.py spire=<folder> magicdec --context-tokens 256 512 960 --out <folder>

A drafter is a folder that training or spectrain.export wrote, or `magicdec`, which needs no folder. A name may stand
before the folder (`name=<folder>`). Several folders with commas between them (`name=<folder>,<folder>`) are one
drafter, trained with several seeds: their counts are added, and drafters.json has the tau of each, too (`by_seed`).
The first drafter is the one that the others are compared with. All drafters continue the same beginnings of held-out
rows. Finished parts are kept in --out, so you can resume with the same command. A command with further drafters or
more rows decodes only what is new. drafters.json, drafters.md and drafters.png show the drafters that the command
names.

tau is the number of tokens produced per target forward pass. Intervals are 95 % bootstraps over rows, without the
spread between seeds. For a difference the rows of both drafters are drawn together. A difference whose interval
contains 0 is unresolved.

--computed draws no draft tokens. The target alone continues each context once, and the tau that is expected of a draft
at each position of this text is computed for every drafter. Intervals of differences are several times smaller.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shlex
import sys
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from pandas import DataFrame

from spectrain.cli import quiet_libraries
from spectrain.decoding import Drafter, Sampling, TargetModel, fingerprint, load_target
from spectrain.errors import UserError, check_whole
from spectrain.measure.cost import Acceptance, paper_model
from spectrain.measure.parity import Steps, computed, draft_logits, logits_of
from spectrain.measure.plots import bars, colours_of, write_png
from spectrain.measure.tables import as_markdown, number, plus_minus, show, table_of
from spectrain.measure.tau import POOLED, Setting, compare, continue_rows, counts_of, with_pools
from spectrain.methods import magicdec
from spectrain.methods.autoregressive import Autoregressive
from spectrain.methods.loading import load_method
from spectrain.models.artifacts import check_weights, read_manifest
from spectrain.stores.environment import date_of, environment
from spectrain.stores.folder import write_json
from spectrain.stores.locations import bundled_folder
from spectrain.stores.packing import pack, rows_of, token_documents
from spectrain.stores.texts import STDLIB_HELD_OUT, read_documents, unit_hash

PART_ROWS = 32  # decoded between two writes
MAGICDEC = "magicdec"
PAPER_TAU = {  # SPIRe, Table 1, k = 4, contexts of 512 tokens; of the dense cache it assumes SPIRe's (section 4.2)
    "vanilla": 2.647,
    "magicdec": 3.891,
    "spire": 3.401,
    "random_init": 3.105,
    "distill": 3.375,
    "hard": 3.069,
    "no_feedback": 3.352,
    "no_target_activations": 2.959,
    "dense_kv": 3.401,
}
LEAST = {"row_tokens": 1, "rows": 1, "skip": 0, "new_tokens": 2, "batch_size": 1, "gamma": 1}  # 2: a forward is counted


def main() -> None:
    args = parsed()
    quiet_libraries()
    try:
        folders = checked(args)
        target = load_target(bundled_folder(args.target) or args.target, args.dtype, args.device)
        content = compared(args, target, folders)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    show([terminal_table(content)], columns=80)
    if args.out:
        settings, found = settings_of(content), content["drafters"]
        panels = {s: {name: one["tau"].get(s) or {} for name, one in found.items()} for s in settings}
        write_png(bars(panels, colours_of(found)), args.out / "drafters.png")
        (args.out / "drafters.md").write_text(markdown(content))
        write_json(args.out / "drafters.json", content)
        print(f"{args.out}/drafters.json, drafters.md, drafters.png", file=sys.stderr)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafters", nargs="+", help="[name=]folder, or magicdec")
    parser.add_argument("--target", default="pystdlib-8l", help="folder, hub id or bundled name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--corpus", default=None, help="file or folder; None: the standard library")
    parser.add_argument("--held-out-share", type=float, default=STDLIB_HELD_OUT, help="as in training")
    parser.add_argument("--also", nargs="*", default=[], help="files or folders that no training saw, all of them")
    parser.add_argument("--documents", action="store_true", help="a context begins a held-out document, not a row")
    parser.add_argument("--computed", action="store_true", help="expected on text that the target writes alone")
    parser.add_argument("--row-tokens", type=int, default=1024, help="as in training; a context begins a row")
    parser.add_argument("--context-tokens", nargs="+", type=int, default=[256])
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument(
        "--skip", type=int, default=48, help="first held-out rows, or documents: validation and selection saw them"
    )
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--gamma", type=int, default=4, help="drafted tokens, for all drafters")
    parser.add_argument("--out", type=Path, default=None, help="folder that keeps what is measured")
    return parser.parse_args()


def checked(args: argparse.Namespace) -> dict[str, list[Path | None]]:
    """Each drafter's folders by its name, one for each seed.

    Raises:
        UserError: a number is out of range, two drafters share a name, or a folder is no whole export.
    """
    for name, least in LEAST.items():
        check_whole(f"--{name.replace('_', '-')}", getattr(args, name), least)
    for length in args.context_tokens:
        check_whole("--context-tokens", length, 1)
    if args.corpus in args.also:
        raise UserError(f"--also={args.corpus} is the corpus itself; give files that no training saw")
    if args.computed and args.new_tokens <= args.gamma:
        raise UserError(f"--new-tokens={args.new_tokens} must be above --gamma={args.gamma} with --computed; raise it")
    found: dict[str, list[Path | None]] = {}
    for name, folders in map(named, args.drafters):
        if name in found:
            raise UserError(f"two drafters are called {name}; give one another name, as other={folders[0]}")
        if len({kind_of(folder) for folder in folders}) > 1:
            raise UserError(f"the folders of {name} are drafters of several kinds; give each kind a name of its own")
        for folder in folders:
            kind = kind_of(folder)
            if args.computed and kind not in ("spire", "vanilla"):
                raise UserError(
                    f"--computed knows drafters of kind spire and vanilla, and {name} is of kind {kind}; leave it out"
                )
            if kind not in (MAGICDEC, "lookup"):
                check_weights(folder, "drafter")
        found[name] = folders
    return found


def kind_of(folder: Path | None) -> str:
    """What a drafter is. Raises UserError where its folder is no whole export."""
    return MAGICDEC if folder is None else read_manifest(folder).kind


def compared(args: argparse.Namespace, target: TargetModel, folders: Mapping[str, Sequence[Path | None]]) -> dict:
    """What drafters.json holds. Raises UserError where a drafter is none of this target's, or there are no rows."""
    rows = held_out_rows(args, target)
    settings = [Setting(length, t) for t in args.temperatures for length in args.context_tokens]
    counts: dict[str, list[dict[Setting, np.ndarray]]] = {}
    for name, own in folders.items():
        files = (name if number == 0 else f"{name},{number}" for number in range(len(own)))
        counts[name] = [counted(args, target, *one, rows, settings) for one in zip(files, own, strict=True)]
    found = compare({name: {s: sum(one[s] for one in own) for s in settings} for name, own in counts.items()})
    for name, own in folders.items():
        where = None if own[0] is None else ",".join(map(str, own))
        found[name] = {"folder": where, "kind": kind_of(own[0])} | found[name]
        if len(own) > 1:
            found[name]["by_seed"] = [
                {s.name: float(c[:, 0].sum() / c[:, 1].sum()) for s, c in with_pools(one).items()}
                for one in counts[name]
            ]
    content = {
        "kind": "drafters",
        "command": shlex.join(["python", *sys.argv]),
        "date": date_of(),
        "target": args.target,
        "dtype": args.dtype,
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "versions": environment(1),
        "rows": len(rows),
        "new_tokens": args.new_tokens,
        "gamma": args.gamma,
        "computed": args.computed,
        "contexts": {str(length): len(rows) for length in dict.fromkeys(args.context_tokens)},
        "first": next(iter(found)),
        "drafters": found,
    }
    return content | {"figures": [{"file": "drafters.png", "caption": caption(content)}]}


def terminal_table(content: Mapping) -> tuple[str, DataFrame]:
    """tau pooled over context lengths, with a title."""
    lengths = ", ".join(content["contexts"])
    pools = [name for name in settings_of(content) if name.startswith(f"{POOLED}, ")]
    kind = "tau, computed," if content.get("computed") else "tau"
    title = f"{kind} on {content['rows']} held-out contexts of {lengths} tokens each, in pairs with {content['first']}"
    return title, drafters_table(content, pools)


def caption(content: Mapping) -> str:
    """Say what the bars show."""
    return (
        f"tau, the tokens produced per target forward pass, of each drafter with {content['gamma']} draft tokens per "
        f"step, by setting and pooled over settings ({content['rows']} held-out contexts of each length, "
        f"{content['new_tokens']} new tokens{', computed' if content.get('computed') else ''}), with 95 % bootstrap "
        "intervals; higher is better."
    )


def settings_of(content: Mapping) -> list[str]:
    return list(dict.fromkeys(name for one in content["drafters"].values() for name in one["tau"]))


def drafters_table(content: Mapping, settings: Sequence[str]) -> DataFrame:
    """Make a table of the tau of each drafter, and below it of the difference from the first one."""
    first, rows = content["first"], []
    for name, one in content["drafters"].items():
        rows.append({"drafter": name} | {s: plus_minus(one["tau"].get(s), 3) for s in settings})
        if (other := one.get("difference")) and name != first:
            rows.append({"drafter": f"{name} - {first}"} | {s: difference_text(other.get(s)) for s in settings})
    return table_of(rows)


def difference_text(one: Mapping | None) -> str:
    low, high = (number((one or {}).get(key)) for key in ("low", "high"))
    text = plus_minus(one, 3, sign="+")
    return f"{text} unresolved" if None in (low, high) or low <= 0 <= high else text


def modelled(content: Mapping) -> dict[str, tuple[float, float]]:
    """Model throughput at batch 64 and 512 tokens (SPIRe, Figure 5), with our tau at T = 1 and with the paper's own.

    A drafter without feedback costs as much as one with it, as in the paper's figure.
    """
    setting, (model, methods) = Setting(512, 1.0).name, paper_model()
    dense = replace(methods["spire"], cache=None)
    found = {}
    for name in set(content["drafters"]) & set(PAPER_TAU) if content["gamma"] == 4 else ():
        if tau := content["drafters"][name]["tau"].get(setting):
            method = dense if name == "dense_kv" else methods.get(name, methods["spire"])
            found[name] = tuple(
                model.multiplier(replace(method, acceptance=Acceptance(one)), 4, [64], [512]).item()
                for one in (tau["value"], PAPER_TAU[name])
            )
    return found


def markdown(content: Mapping) -> str:
    """The comparison for a document, with the paper's values where the drafters are its own."""
    several = len(content["contexts"]) > 1
    columns = [s for s in settings_of(content) if s != POOLED and (several or not s.startswith(POOLED))]
    frame, first = drafters_table(content, columns), content["first"]
    reported = {name: f"{tau:.3f}" for name, tau in PAPER_TAU.items()}
    if first in PAPER_TAU:
        reported |= {f"{name} - {first}": f"{tau - PAPER_TAU[first]:+.3f}" for name, tau in PAPER_TAU.items()}
    if len(set(content["drafters"]) & set(PAPER_TAU)) > 1:
        frame["paper, 512 tokens"] = [reported.get(name, "") for name in frame["drafter"]]
    text, head = as_markdown(frame), "modelled throughput at (64, 512)"
    rows = [
        {head: name, "with our tau": f"{ours:.2f}", "with the paper's": f"{theirs:.2f}"}
        for name, (ours, theirs) in modelled(content).items()
    ]
    return text + ("\n" + as_markdown(table_of(rows)) if rows else "")


def named(text: str) -> tuple[str, list[Path | None]]:
    """A drafter's name, and its folders; None for MagicDec, which has none."""
    if text == MAGICDEC:
        return text, [None]
    name, _, given = text.rpartition("=")
    folders = [Path(given)] if Path(given).exists() else [Path(folder) for folder in given.split(",") if folder]
    if not folders:
        raise UserError(f"{text} names no folder; give name=<folder>")
    return name or folders[0].name, folders


def opened(target: TargetModel, folder: Path | None, gamma: int) -> Drafter:
    return magicdec.build(target, gamma=gamma) if folder is None else load_method(folder, target, gamma=gamma)


def held_out_documents(args: argparse.Namespace, target: TargetModel) -> list[list[int]]:
    """Held-out documents that are as long as the longest context, in hashed order, then those of --also."""
    longest = max(args.context_tokens)

    def long_ones(path: str | None, share: float) -> list[list[int]]:
        documents = [d for d in read_documents(path, tokenizer=target.tokenizer) if d.is_held_out(share)]
        documents.sort(key=lambda document: unit_hash(document.id))
        tokens = [document.tokens.tolist() for document in token_documents(documents, target.tokenizer)]
        return [one for one in tokens if len(one) >= longest]

    held_out = long_ones(args.corpus, args.held_out_share)
    found = held_out[args.skip :] + [one for path in args.also for one in long_ones(path, 1.0)]
    if not found:
        raise UserError(
            f"the corpus has {len(held_out)} held-out documents of {longest} tokens or more, and --skip={args.skip}; "
            "lower --skip or --context-tokens, or give --also"
        )
    return found[: args.rows]


def held_out_rows(args: argparse.Namespace, target: TargetModel) -> list[list[int]]:
    """Held-out rows that neither training nor validation saw, then rows of the files that no training saw."""
    if args.documents:
        return held_out_documents(args, target)
    tokenizer = target.tokenizer
    documents = read_documents(args.corpus, tokenizer=tokenizer)
    packed = pack(documents, tokenizer, args.row_tokens, args.held_out_share, loss_on="all")
    rows = packed.held_out.tokens[args.skip :].tolist()
    for path in args.also:
        found = [replace(d, is_response=None) for d in token_documents(read_documents(path), tokenizer)]
        rows += rows_of(found, tokenizer.eos_token_id, args.row_tokens).tokens.tolist()
    if not rows:
        raise UserError(f"the corpus has {len(packed.held_out)} held-out rows, all of them skipped; lower --skip")
    longest = max(args.context_tokens)
    if longest > args.row_tokens:
        raise UserError(f"contexts of {longest} tokens do not fit rows of {args.row_tokens}; lower --context-tokens")
    return rows[: args.rows]


def counted(
    args: argparse.Namespace,
    target: TargetModel,
    name: str,
    folder: Path | None,
    rows: Sequence[Sequence[int]],
    settings: Sequence[Setting],
) -> dict[Setting, np.ndarray]:
    """Counts of a drafter [R, 2] by setting: what --out holds, and the rest decoded now."""
    drafter = opened(target, folder, args.gamma)
    kept = Kept.open(args, target, name, folder, rows)
    for start in range(0, len(rows), PART_ROWS):  # all settings part by part: an interrupted comparison has them all
        for setting in settings:
            done = len(kept.counts.get(setting.name, ()))
            part = rows[done : min(start + PART_ROWS, len(rows))]
            if part:
                count = expect if args.computed else decode
                counts = count(target, drafter, part, setting, args.new_tokens, args.batch_size, done)
                kept.add(setting, counts)
    return {setting: np.array(kept.counts[setting.name][: len(rows)]) for setting in settings}


def decode(target, drafter, rows, setting: Setting, new_tokens: int, batch_size: int, first_number: int) -> np.ndarray:
    """Counts [R, 2] of a part of the rows, the first of which has this number."""
    return counts_of(continue_rows(target, drafter, rows, setting, new_tokens, batch_size, first_number=first_number))


def expect(target, drafter, rows, setting: Setting, new_tokens: int, batch_size: int, first_number: int) -> np.ndarray:
    """Expected tokens and forwards [R, 2], had a draft begun at each position of what the target alone writes."""
    written = continue_rows(target, Autoregressive(), rows, setting, new_tokens, batch_size, first_number=first_number)
    contexts = [row[: setting.context_tokens] for row in rows]
    texts = [Steps([*c, *one.tokens], len(c), roots=[], accepted=[]) for c, one in zip(contexts, written, strict=True)]
    sampling = Sampling(temperature=setting.temperature)
    reached, _ = computed(texts, drafter.gamma, draft_logits(drafter, target), logits_of(target), sampling)
    return np.stack([reached.sum(1), reached[:, 0]], axis=1)


class Kept:
    """What was counted of one drafter: a file in --out, replaced whole after each part."""

    def __init__(self, file: Path | None, made_of: dict, rows: list[int], counts: dict[str, list]) -> None:
        self.file, self.made_of, self.rows, self.counts = file, made_of, rows, counts

    @classmethod
    def open(
        cls,
        args: argparse.Namespace,
        target: TargetModel,
        name: str,
        folder: Path | None,
        rows: Sequence[Sequence[int]],
    ) -> Kept:
        """Raises UserError where the file is of another drafter, target or other rows, or is damaged."""
        made_of = {
            "weights": folder and content_of(folder),
            "target": fingerprint(target.model, target.tokenizer),
            **{key: getattr(args, key) for key in CONTEXTS},
        }
        sums = [zlib.crc32(np.array(row, dtype=np.int64).tobytes()) for row in rows]
        if args.out is None:
            return cls(None, made_of, sums, {})
        file = args.out / "counts" / f"{name}.json"
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            return cls(file, made_of, sums, {})
        try:
            kept = json.loads(file.read_text())
            known, counts = kept["rows"], kept["counts"]
            before = {"documents": False, "computed": False} | kept["made_of"]  # older files say neither
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{file} is damaged ({type(error).__name__}); remove it, or give another --out") from error
        n = min(len(known), len(sums))
        if before != json.loads(json.dumps(made_of)) or known[:n] != sums[:n]:
            raise UserError(f"{file} was counted of another drafter, target or other rows; give another --out")
        return cls(file, made_of, max(known, sums, key=len), counts)

    def add(self, setting: Setting, found: np.ndarray) -> None:
        self.counts.setdefault(setting.name, []).extend(found.tolist())
        if self.file is not None:
            write_json(self.file, {"made_of": self.made_of, "rows": self.rows, "counts": self.counts})


def content_of(folder: Path) -> str:
    """Fingerprint of what a drafter is: its weights and its config."""
    digest = hashlib.sha256()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("config.json")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


CONTEXTS = (
    "dtype",
    "corpus",
    "held_out_share",
    "also",
    "row_tokens",
    "skip",
    "new_tokens",
    "gamma",
    "documents",
    "computed",
)


if __name__ == "__main__":
    main()
