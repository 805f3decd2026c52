"""The README.md of an exported folder: what it is, what it was trained on, what was measured, how to use it.

Cards are text that the templates beside this module make from plain values; who exports gathers the values.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath

from huggingface_hub import ModelCard, ModelCardData

from spectrain.config.fields import types_of
from spectrain.config.training import Train
from spectrain.measure.tables import interval
from spectrain.models.kinds import about

TEMPLATES = Path(__file__).parent / "templates"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")  # name of a hub model, with or without its owner
CORPUS_MARGIN = 1.2  # SGLang refuses a corpus that has more tokens than it was told
NOT_SHOWN = ("drafter", "responses", "held_out_share", "export_dtype")  # of an experiment's options


NO_ENGINE = "No other engine runs this kind of drafter."


def trained_card(
    kind: str,
    folder: str,
    target: tuple[str, str],
    config: Train,
    trained: Mapping,
    attempts: Sequence[Mapping],
    engine: str = NO_ENGINE,
) -> str:
    """The card of a trained drafter, acceptance head or target.

    `folder` is the export as command lines name it. `target` is the name of the target there, and its fingerprint; both
    are "" for a target from scratch. `trained` is what spectrain.json keeps, `attempts` are those of run.json, and
    `engine` is what `write_for_engine` says.
    """
    taus = {name: row for name, row in (trained.get("tau") or {}).items() if name != "autoregressive"}
    hidden, data = (*types_of(Train), *NOT_SHOWN), config.data
    options = {name: value for name, value in vars(config.own).items() if name not in hidden}
    options |= {"init": published(options["init"])} if "init" in options else {}
    options |= {"seed": config.seed, "optimizer": vars(config.own.optimizer), "batch_size": data.batch_size}
    options |= {"precision": config.trainer.precision}
    return _card(
        "drafter",
        kind,
        folder,
        target,
        own=config.own,
        data=data,
        corpus=vars(config.corpus) | {"path": _places(config.corpus.path)},
        trained=trained,
        taus={name: {s: interval(one, 2) for s, one in row.items()} for name, row in taus.items()},
        settings=list(next(iter(taus.values()), {})),
        selected=trained.get("selected"),
        options={name: _plain(value) for name, value in options.items() if value is not None},
        attempts=attempts,
        engine=engine,
    )


def lookup_card(folder: str, target: tuple[str, str], method: str, options: Mapping, store: Mapping) -> str:
    """The card of a lookup method.

    `folder` is the export as command lines name it. `target` is the name of the target there, and its tokenizer's
    fingerprint. `store` has `documents`, `tokens` and `built_from` (its config); it is empty without a datastore.
    """
    reads_text = method in ("pld", "anpd") or options.get("input_source", method == "sssd")
    stored = [f"a datastore of {store['tokens']:,} tokens"] if store else []
    return _card(
        "lookup",
        "lookup",
        folder,
        target,
        method=method,
        sources=["the text itself"] * bool(reads_text) + stored,
        store=store,
        corpus=PurePath(_places((store.get("built_from", {}).get("corpus") or {}).get("path"))).name,
        options={name: value for name, value in options.items() if value is not None},
        corpus_limit=math.ceil(store.get("tokens", 0) * CORPUS_MARGIN / 1000) * 1000,
    )


def _places(path: str | Sequence[str | None] | None) -> str:
    """The paths of a corpus, with colons between them; empty: the standard library."""
    return ":".join(place or "" for place in (path if isinstance(path, list) else [path]))


def _card(template: str, kind: str, folder: str, target: tuple[str, str], **values: object) -> str:
    """Fill a template; the hub's metadata name a local target by its folder."""
    path, fingerprint = target
    is_hub_id = HUB_ID.fullmatch(path) and not path.startswith("checkpoints/")
    metadata = ModelCardData(
        base_model=(path if is_hub_id else PurePath(path).name) or None,
        library_name=about(kind).library,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "spectrain", kind],
    )
    values |= {"about": about(kind), "name": PurePath(folder).name, "folder": folder, "target": path, "named": _named}
    values |= {"fingerprint": fingerprint, "quote": shlex.quote}
    values["json_argument"] = json_argument
    card = ModelCard.from_template(metadata, TEMPLATES / f"card_{template}.md", **values)
    return re.sub(r"\n{3,}", "\n\n", str(card)).strip() + "\n"


def json_argument(**value: object) -> str:
    """A mapping as an argument of a shell's command line."""
    return shlex.quote(json.dumps(value, separators=(",", ":")))


def _named(path: str | None) -> str:
    """` name`, or of several stores with colons; see `published`."""
    return f" `{':'.join(map(published, str(path).split(':')))}`" if path else ""


def published(path: str | PurePath) -> str:
    """The path as it was given; of an absolute one the last part, because a card may be published."""
    return PurePath(path).name if PurePath(path).is_absolute() else str(PurePath(path))


def _plain(value: object) -> str:
    """An option's value on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key}={_plain(item)}" for key, item in value.items() if item is not None)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain, value))}]"
    return str(value).lower() if isinstance(value, bool) else str(value)
