"""Exports of runs, equal from training and `spectrain.export`, and of lookup methods, as folders for other engines.

A run's folder holds weights, tokenizer, facts and a model card; a lookup method's its options, its datastore, and the
datastore's documents as text.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from spectrain.config.training import Train
from spectrain.data.overlap import TRAINED_ON
from spectrain.errors import UserError
from spectrain.exports.cards import NO_ENGINE, TEMPLATES, lookup_card, published, trained_card
from spectrain.methods.options import build_function, check_options, plain_options
from spectrain.methods.registry import instantiate, method_config, token_methods
from spectrain.models.artifacts import (
    CORPUS,
    DATASTORE,
    Artifact,
    LookupFacts,
    read_manifest,
    trained_artifact,
    write_manifest,
)
from spectrain.models.kinds import about, module_of
from spectrain.models.packages import target_path
from spectrain.retrieval.calibration import CALIBRATION
from spectrain.retrieval.datastore import Datastore, largest_datastore
from spectrain.stores.files import load_json, write_json
from spectrain.stores.folder import MANIFEST
from spectrain.stores.locations import CHECKPOINTS, bundled_folder
from spectrain.target import TargetModel, fingerprint, tokenizer_fingerprint
from spectrain.target.loading import DTYPES, first_line, read_config, read_tokenizer
from spectrain.training.base import Experiment
from spectrain.training.runs import RunFolder

log = logging.getLogger(__name__)

CARD = "README.md"
DECODE = Path("decode", "custom_generate", "generate.py")  # beside a model: in it, it would replace its own `generate`


@dataclass(frozen=True)
class Export:
    """The model of a run, ready to be written."""

    experiment: Experiment
    weights: dict[str, Tensor]  # whole, of the training's module
    trained: dict  # steps, tokens, tau: what spectrain.json keeps
    for_engine: Mapping = field(default_factory=dict)  # options of `write_for_engine` of its kind


def run_export(experiment: Experiment, which: str) -> Export:
    """The export of a run as it stands, finished or not.

    `which` is "best", the weights that training exports, or "last", those of the newest checkpoint.

    Raises:
        UserError: it has no weights yet, they do not fit its config, or its target or its rows are others by now.
    """
    run, target = experiment.run, experiment.target
    step, weights = run.weights(which)
    log.info("step %d of %s", step, run.path)
    if target is not None:
        run.keep_to(run.source | {"target": fingerprint(target.model, target.tokenizer)})
    return Export(experiment, weights, trained_facts(run, step))


def trained_facts(run: RunFolder, step: int) -> dict:
    """The facts for spectrain.json: the run's result where it is of these weights, else how far they are trained."""
    result, best = run.read(run.result), run.best.read()
    if result and step == (result.get("selected") or {"step": result["steps"]})["step"]:
        return result
    # Stored rows have any length, which only the training itself knows.
    tokens = {} if run.source.keys() & {"rows", "activations"} else {"tokens": tokens_of(run.config, step)}
    selected = best.facts() if best is not None and best.step == step else None
    facts = {"before": run.source.get("before", []), "selected": selected, "metrics": run.metrics_at(step)}
    return {"steps": step, **tokens, **facts, "finished": bool(result)}


def tokens_of(config: Train, steps: int, row_lengths: Sequence[int] | None = None) -> int:
    """Tokens that a training saw in this many steps, about, where rows have the given lengths; None: `row_tokens`."""
    data = config.data
    rows = steps * config.trainer.accumulate_grad_batches * data.batch_size
    return round(rows * (data.row_tokens if row_lengths is None else sum(row_lengths) / len(row_lengths)))


def write_export(folder: Path, out: Path, export: Export) -> None:
    """Fill a folder that will appear as `out` with weights, config, tokenizer, facts and a model card."""
    experiment, trained = export.experiment, export.trained
    run, target, kind = experiment.run, experiment.target, experiment.exports
    experiment.save(folder, export.weights)
    if (run.path / TRAINED_ON).is_file():
        shutil.copyfile(run.path / TRAINED_ON, folder / TRAINED_ON)
    about_target, engine = ("", ""), NO_ENGINE
    if target is not None:
        path = str(run.config.target.path)
        about_target = engine_path(path), write_facts(folder, kind, path, target, trained)
        engine = write_for_engine(kind, folder, out, target, export.for_engine)
    card = trained_card(kind, published(out), about_target, run.config, trained, run.attempts, engine)
    (folder / CARD).write_text(card, encoding="utf-8")
    let_others_read(folder)


def write_facts(folder: Path, kind: str, path: str, target: TargetModel, trained: dict) -> str:
    """Write what every export of a drafter or head has beside its weights, and return the target's fingerprint."""
    tokenizer = target.tokenizer
    tokenizer.save_pretrained(folder)
    prints = fingerprint(target.model, tokenizer), tokenizer_fingerprint(tokenizer)
    write_manifest(folder, trained_artifact(kind, path, prints[0], trained, prints[1]))
    write_decode(folder)
    return prints[0]


def let_others_read(folder: Path) -> None:
    """Give weights the mode of other files: safetensors makes files that nobody but their owner may read."""
    for file in folder.rglob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


def write_again(
    folder: Path, out: Path, drafter: Path, model: nn.Module, path: str, target: TargetModel, options: Mapping
) -> None:
    """Fill a folder that will appear as `out` with a drafter as its kind is exported today.

    `model` is what was read of `drafter`, an export or the folder of another project; `path` is the target's. For
    `options` see `Export`.
    """
    artifact = read_manifest(drafter)
    is_ours, kind = bool(artifact.target_fingerprint), artifact.kind
    if is_ours:
        shutil.copytree(drafter, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(engine_module(kind).FOLDER))
    else:
        for file in (*drafter.glob("LICENSE*"), *drafter.glob(CARD)):
            shutil.copyfile(file, folder / file.name)
        write_facts(folder, kind, path, target, {})
    module_of(kind).save(folder, model, stored_dtype(drafter))
    engine = write_for_engine(kind, folder, out, target, options)
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else f"# {out.name}\n"
    if is_ours:  # how engines run it stands last
        card = re.sub(
            r"^(No other engine runs|In vLLM) .*", lambda _: f"{engine}\n", card, flags=re.DOTALL | re.MULTILINE
        )
    else:
        card += f"\n## As spectrain has written it\n\n{engine}\n"
    (folder / CARD).write_text(card, encoding="utf-8")
    let_others_read(folder)


def stored_dtype(drafter: Path) -> torch.dtype:
    """Return the dtype of a drafter's weights: of those in safetensors, else what its config.json says."""
    for file in drafter.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            dtypes = (tensors.get_tensor(name).dtype for name in tensors.keys())  # noqa: SIM118
            return next(dtype for dtype in dtypes if dtype.is_floating_point)
    return DTYPES.get(load_json(drafter / "config.json").get("torch_dtype"), torch.float32)


def write_for_engine(kind: str, folder: Path, out: Path, target: TargetModel, options: Mapping) -> str:
    """Write what another engine needs of a drafter, where one runs its kind, and return what its card says of it.

    The module of a kind is given the folder, how command lines name the export and its target, the target, of which the
    tables may be all there is, and its own options.
    """
    if (module := engine_module(kind)) is None:
        return NO_ENGINE
    artifact = read_manifest(folder)
    return module.write_for_engine(folder, published(out), engine_path(artifact.target), target, **options)


def engine_module(kind: str) -> ModuleType | None:
    """Return the module that writes what other engines need of a kind; None: none runs it."""
    engine = about(kind).engine
    return import_module(f"spectrain.exports.{engine}") if engine else None


def write_decode(folder: Path) -> None:
    """Write what lets the `generate` of transformers decode with an export; see `transformers_generate.py`."""
    (folder / DECODE).parent.mkdir(parents=True)
    shutil.copyfile(TEMPLATES / "custom_generate.py", folder / DECODE)


def engine_path(target: str) -> str:
    """A target as other engines find it: a bundled one by its folder."""
    folder = bundled_folder(target) if target else None
    return f"checkpoints/{folder.name}" if folder else target


@dataclass(frozen=True)
class LookupExport:
    """A lookup method, ready to be written."""

    facts: LookupFacts
    target: str  # path
    tokenizer: PreTrainedTokenizerBase
    store: Datastore | None  # None: the method has none


def lookup_export(method: dict, datastore: str | None, target: str) -> LookupExport:
    """A lookup method for the tokenizer of a target, a folder or an id.

    `method` is the content of its yaml. Without a folder as `datastore`, the largest that fits is taken.

    Raises:
        UserError: the method needs more than tokens, an option is out of range, or the datastore does not fit.
    """
    name, options = method["_target_"].split(".")[-2], plain_options(method)
    if name not in token_methods():
        raise UserError(
            f"method={name} needs the target's logits, states or a drafter's weights, which an engine gives no lookup "
            f"method; export one of {', '.join(token_methods())}"
        )
    if options.get("last_logits"):
        raise UserError(
            f"method={name} with last_logits=true needs the target's logits, which an engine gives no lookup method; "
            "give method.last_logits=false"
        )
    tokenizer, vocab_size = open_tokenizer(target)
    vocabulary = tokenizer_fingerprint(tokenizer)
    takes_store = "datastore" in options
    if not takes_store and datastore:
        raise UserError(f"datastore={datastore} is nothing that this method takes; remove it")
    folder, store = options.pop("datastore", None) or datastore, None
    if takes_store and options.get("datastore_source", True):
        store = Datastore(folder or largest_datastore(CHECKPOINTS, vocabulary, ""))
        store.check_fits(vocabulary)
        store.verify()  # a copy must not spread damage
        log.info("datastore: %s", store.folder)
    # Options out of range are reported at the export, not at the start of a server.
    check_options(build_function(method), options, name)
    given = {"datastore": str(store.folder)} if store is not None else {"datastore": None} if name == "sssd" else {}
    instantiate(method_config(name), None, options | given)
    return LookupExport(LookupFacts(name, options, vocabulary, vocab_size, store is not None), target, tokenizer, store)


def open_tokenizer(target: str) -> tuple[PreTrainedTokenizerBase, int]:
    """The target's tokenizer and vocabulary, without its weights. Raises UserError where they cannot be read."""
    path = target_path(target)
    try:
        return read_tokenizer(path), read_config(path).get_text_config().vocab_size
    except Exception as error:  # transformers, tokenizers and the hub each raise their own types here
        why = first_line(error)
        raise UserError(f"target={target} has no tokenizer that can be read ({why}); give a folder or an id") from error


def write_lookup(folder: Path, out: Path, export: LookupExport) -> None:
    """Fill a folder that will appear as `out`."""
    facts, store, vocabulary = export.facts, export.store, export.facts.tokenizer_fingerprint
    export.tokenizer.save_pretrained(folder)
    made_of, ranked_by, folders, about_store = {"documents": 0, "tokens": 0}, "", {}, {}
    if store is not None:
        write_store(store, export.tokenizer, folder)
        manifest, folders = store.manifest, {"datastore": DATASTORE}
        ranked_by, made_of = manifest.target_fingerprint, {"documents": manifest.documents, "tokens": manifest.tokens}
        about_store = made_of | {"built_from": manifest.build.get("config", {})}
    write_json(folder / "config.json", facts)
    artifact = Artifact("lookup", export.target, ranked_by, made_of, vocabulary, facts.method, facts.options, folders)
    write_manifest(folder, artifact)
    write_decode(folder)
    target = engine_path(export.target), vocabulary
    card = lookup_card(published(out), target, facts.method, facts.options, about_store)
    (folder / CARD).write_text(card, encoding="utf-8")


def write_store(store: Datastore, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write the files that a datastore is opened by, and its documents as text, as SGLang's NGRAM reads them."""
    (folder / DATASTORE).mkdir()
    for name in (*store.manifest.files, MANIFEST, CALIBRATION):
        if (store.folder / name).is_file():
            shutil.copyfile(store.folder / name, folder / DATASTORE / name)
    with (folder / CORPUS).open("w", encoding="utf-8") as lines:
        for document in store.documents():
            text = tokenizer.decode(document.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if text:  # one JSON string per line: SGLang refuses objects
                lines.write(json.dumps(text, ensure_ascii=False) + "\n")
