"""What every command shares: where `conf/` lies, short overrides, errors as one sentence, targets and methods.

`target=<folder or hub id>` is short for `target.path=...`; the same holds for the other names of `SHORTHANDS`, unless
the value names a file of that Hydra group (`corpus=stdlib`).
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import logging
import os
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import hydra
import torch
import transformers
from hydra._internal.utils import get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    GrammarParseError,
    InterpolationKeyError,
    InterpolationResolutionError,
    MissingMandatoryValue,
)

from spectrain.decoding import TargetModel, load_target
from spectrain.decoding.weights import is_emulated
from spectrain.errors import AllRanksError, UserError
from spectrain.models.artifacts import decoded_by, is_export
from spectrain.models.packages import target_path
from spectrain.stores.environment import TYPED_COMMAND
from spectrain.stores.locations import conf_dir
from spectrain.stores.options import check_options
from spectrain.stores.signals import EXIT_CODES, SIGNALS, Terminated
from spectrain.stores.writing import naming_a_full_disk

log = logging.getLogger(__name__)

RANK_ZERO_SPEAKS_WITHIN_S = 5.0
FREE_TEXT = ("prompt", "lookup")
UNHELPFUL_WARNINGS = (
    "LeafSpec",
    "does not have many workers",
    "smaller than the logging interval",
    "saving the DeepSpeed Stage 3 checkpoint",  # spectrain.export
    "gradient_checkpointing_enable",  # the name that all of 5.x know
)
PIPE_CLOSED = 141  # exit code of other tools whose stdout ends at a reader that has left
LONGEST_NAME = 200  # of a file, without its ending
# Values that are no name of a file for Hydra: null, numbers, truth values, empty texts and lists, mappings.
NUMBER = r"[-+]?(nan|inf|[\d.]+(e[-+]?\d+)?)?"
LIST = r"\[(\W*|nan|true|false|null|.*[\[{].*)\]"
NO_NAME = re.compile(rf"null|true|false|{NUMBER}|''|\"\"|{LIST}|\{{.*\}}", re.IGNORECASE)
SHORTHANDS = {"target": "target.path", "corpus": "corpus.path"}


def expand_shorthands(arguments: list[str], samples: bool = True) -> list[str]:
    """Rewrite `target=X` to `target.path=X` where X is no option of the config group `target`.

    `method=<exported folder>` becomes the method that decodes with it, and its options. They stand first, so that other
    arguments can change them.

    `samples`: the command has sampling options.
    """
    expanded = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if key == "method" and ("/" in value or is_export(value)):
            name, options = decoded_by(Path(value))
            expanded[:0] = [f"++method.{option}={as_override(value)}" for option, value in options.items()]
            argument = f"method={name}"
        elif key in FREE_TEXT:
            argument = f"{key}={quoted(value)}"
        elif key in SHORTHANDS and value not in ("", "null") and not (conf_dir() / key / f"{value}.yaml").is_file():
            argument = f"{SHORTHANDS[key]}={value}"
        elif samples and key.startswith("sampling."):
            argument = f"++{argument}"  # Hydra would send an unknown option away before we can say why
        expanded.append(argument)
    return expanded


def refuse_what_hydra_fails_on(arguments: list[str], primary: str) -> None:
    """Raise UserError for what Hydra fails on: no name for an option that names a file of `conf/`, or a long number.

    `primary`: the text of the command's own yaml.
    """
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not key.lstrip("+~"):
            raise UserError(f"{argument} has no name; write options as name=value")
        if key.startswith("~"):
            raise UserError(f"{argument} would remove an option, which the command needs; give it another value")
        if key not in FREE_TEXT and re.search(r"\d{4300}", value):  # Hydra fails on what Python does not read
            raise UserError(f"{key} has a number of thousands of digits; give a smaller one")
        group = key.lstrip("+")
        of_command = re.search(rf"^ *- (optional )?{re.escape(group)}:", primary, re.MULTILINE)
        is_group = of_command or (group in os.listdir(conf_dir()) and (conf_dir() / group).is_dir())
        is_path = key in SHORTHANDS and value != "null"
        if is_group and not is_path and (NO_NAME.fullmatch(value) or (of_command and len(value) > LONGEST_NAME)):
            known = ", ".join(sorted(file.stem for file in (conf_dir() / group).glob("*.yaml")))
            hint = f"choose among {known}" if of_command or key != group else f"leave {key} out"
            raise UserError(f"{key}={value[:LONGEST_NAME]} names nothing; {hint}")


def flags_first(arguments: list[str]) -> list[str]:
    """Put Hydra's own flags before the options: it reads none behind `name=value name=value -m name=value`.

    Raises:
        UserError: a flag is unknown, or lacks its value.
    """
    options = [argument for argument in arguments if re.match(r"[^-=]*=|~", argument)]
    arguments = [argument for argument in arguments if argument not in options] + options
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            get_args_parser().parse_args(arguments)
    except SystemExit as stop:
        if stop.code:
            why = said.getvalue().splitlines()[-1].partition("error: ")[2]
            raise UserError(f"{why}; write options as name=value") from None
        raise
    return arguments


def quoted(text: str) -> str:
    """Quote text for Hydra's override grammar, whose syntax has parentheses, colons and dollars."""
    text = text.replace("${", "\\${")  # no interpolation
    return '"' + re.sub(r'(\\*)("|$)', lambda m: 2 * m[1] + ("\\" + m[2] if m[2] else ""), text) + '"'


def as_override(value: object) -> str:
    """A plain value in Hydra's override grammar."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_override(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, list):
        return f"[{','.join(map(as_override, value))}]"
    return quoted(value) if isinstance(value, str) else json.dumps(value)


def command(config_name: str) -> Callable[[Callable[[DictConfig], None]], Callable[[], None]]:
    """Make `main(cfg)` a command that composes `conf/<config_name>.yaml` and checks its options.

    Wrong use is one sentence and exit code 2; Ctrl-C is one sentence and 130, SIGTERM 143.
    """

    def decorate(main: Callable[[DictConfig], None]) -> Callable[[], None]:
        def job(cfg: DictConfig) -> None:
            quiet_libraries()
            out = [Path(str(cfg[name])) for name in ("run_dir", "out") if cfg.get(name)]
            with one_sentence(config_name, out):
                try:
                    for resolved in (False, True):  # an interpolation of a wrong value may not resolve
                        check_options(OmegaConf.to_container(cfg, resolve=resolved), config_name)
                    main(cfg)
                finally:
                    if "wandb" in sys.modules:  # in a multirun each job is a W&B run of its own
                        sys.modules["wandb"].finish(exit_code=int(sys.exc_info()[0] is not None))

        def run() -> None:
            TYPED_COMMAND.set(typed_command(main.__module__))
            primary = (conf_dir() / f"{config_name}.yaml").read_text()
            os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors then, where it would print them
            with SIGNALS.answered(), one_sentence(config_name):
                try:
                    refuse_what_hydra_fails_on(sys.argv[1:], primary)
                    sys.argv[1:] = flags_first(expand_shorthands(sys.argv[1:], samples="- sampling:" in primary))
                    hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=config_name)(job)()
                finally:  # not after each job of a multirun: DeepSpeed keeps its groups for the life of a process
                    leave_ranks()

        return run

    return decorate


@contextlib.contextmanager
def one_sentence(config_name: str, out: Sequence[Path] = ()) -> Iterator[None]:
    """Turn what the user did wrong into one line on stderr and exit code 2, and signals likewise into 130 or 143.

    A full disk counts as such, that of the folders `out`, of stdout, or one on which Python and its libraries write.
    A closed pipe is no error to speak of.
    """
    written = [*out, Path(), Path(os.environ.get("TMPDIR", "/tmp")), Path(os.path.expanduser("~"))]
    try:
        with interruptible(), naming_a_full_disk(*written):
            yield
            if sys.stdout is not None:
                sys.stdout.flush()
        return
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # rich's own answer to it
            raise SystemExit(PIPE_CLOSED) from None
        raise
    except UserError as error:
        sentence = str(error) if is_mine_to_say(error) else None
    except MissingMandatoryValue as error:
        sentence = f"{error.full_key} is missing; give {error.full_key}=..."
    except (InterpolationKeyError, InterpolationResolutionError, GrammarParseError) as error:
        sentence = (
            f"{error.full_key or 'an option'} refers to an option that does not exist; write \\$ for a dollar sign"
        )
    except HydraException as error:
        sentence = hydra_sentence(error, config_name, sys.argv[1:])
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python fails again while it flushes
            raise SystemExit(PIPE_CLOSED) from None
        if error.filename is None:
            raise
        sentence = f"{error.filename} cannot be read or written ({error.strerror}); see to it, or give another path"
    if sentence is not None:
        print(f"error: {' '.join(sentence.split())}", file=sys.stderr)
    raise SystemExit(2)


@contextlib.contextmanager
def interruptible(then: str = "again") -> Iterator[None]:
    """Answer Ctrl-C and SIGTERM with one sentence. `then` says what the same command does next."""
    try:
        yield
    except BaseException as error:
        asked = isinstance(error, KeyboardInterrupt) or SIGNALS.first is not None  # libraries raise other errors then
        said = isinstance(error, SystemExit) and error.code in EXIT_CODES
        if not asked or said:
            raise
        raise SystemExit(SIGNALS.say(then, terminated=isinstance(error, Terminated))) from None


def typed_command(module: str) -> str:
    """Return the command line as it was typed, fit for a shell. Call it before shorthands are expanded.

    `module` is the one that the command's `main` lives in; `__main__` where it was started with `python -m`.
    """
    if module == "__main__":
        spec = sys.modules["__main__"].__spec__
        module = spec.name if spec else ""
    return shlex.join(["python", *(["-m", module] if module else sys.argv[:1]), *sys.argv[1:]])


def hydra_sentence(error: HydraException, config_name: str, arguments: list[str]) -> str:
    """Say in one sentence what is wrong with the arguments that Hydra refused."""
    text = str(error)
    if found := re.match(r"Could not override '([^']+)'", text):
        name = found[1]
        if (conf_dir() / name).is_dir() and "defaults list" in text:
            return f"{name} must be written with a plus sign here: +{name}=..."
        near = difflib.get_close_matches(name, option_names(config_name, arguments), n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else "--cfg job prints all options"
        return f"unknown option: {name}; {hint}"
    options = r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\s+(.*?)\s*Config"
    if found := re.search(options, text, re.DOTALL):
        return f"{found[1]}={found[2]} is unknown; choose among {', '.join(found[3].split())}"
    if isinstance(error, OverrideParseException):
        first = text.removeprefix("Error parsing override ").splitlines()[0]
        return f"{first} cannot be read as an option; write name=value, and quote values with special characters"
    return ", ".join(line.strip().rstrip(".") for line in text.splitlines() if line.strip())


def option_names(config_name: str, arguments: list[str]) -> list[str]:
    """List all options of a command, in dotted form, with the groups (`+exp=spire`) that the arguments choose."""
    groups = [a for a in arguments if "=" in a and (conf_dir() / a.split("=")[0].lstrip("+")).is_dir()]
    for chosen in (groups, []):
        try:
            with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
                return list(_dotted(OmegaConf.to_container(hydra.compose(config_name, overrides=chosen))))
        except HydraException:  # a sweep over a group, or a group that is wrong, too
            continue
    return []


def _dotted(node: Mapping, prefix: str = "") -> Iterator[str]:
    for key, value in node.items():
        yield f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _dotted(value, f"{prefix}{key}.")


def is_mine_to_say(error: UserError) -> bool:
    """Whether this rank prints its error: rank zero does, another only what rank zero does not say.

    What ends rank zero ends the others (torchrun), or they have raised it alike. A rank that is still there after a
    while has an error of its own.
    """
    if rank() == 0:
        return True
    time.sleep(RANK_ZERO_SPEAKS_WITHIN_S)
    return not isinstance(error, AllRanksError)


def rank() -> int:
    """Return this process's number among those that torchrun, Lightning or SLURM started."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def leave_ranks() -> None:
    """Take leave of the other ranks: a process that ends while connected to them aborts, and takes them with it."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def in_multirun() -> bool:
    """Whether this is one job of Hydra's `-m`."""
    return HydraConfig.initialized() and HydraConfig.get().mode == RunMode.MULTIRUN


def quiet_libraries() -> None:
    """Leave the terminal to the command: no tips, device reports and weight-loading bars of the libraries."""
    for name in ("lightning.pytorch", "lightning.fabric", "DeepSpeed"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if rank() != 0:
        logging.getLogger().setLevel(logging.WARNING)
    transformers.logging.disable_progress_bar()
    for message in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of what DeepSpeed calls


def open_target(cfg: DictConfig, device: str | None = None) -> TargetModel:
    """Load the target of a config's `target` node, on `device` where given; see `target_path` for bare names."""
    chosen = cfg.target
    path, device = target_path(chosen.path), device or chosen.device
    target = load_target(path, chosen.dtype, device, chosen.parallel, engine=chosen.engine, graphs=chosen.graphs)
    if target.device.type == "cpu" and is_emulated(target.dtype) and rank() == 0 and cfg.get("source") != "server":
        log.warning("this processor computes %s slowly; target.dtype=float32 is faster here", chosen.dtype)
    return target
