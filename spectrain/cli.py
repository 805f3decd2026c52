"""Start a command: options as they were typed, errors as one sentence, signals.

Each command is a module with `main(options)`, whose options are a class of `spectrain.config`. Hydra composes them. The
module, and torch with it, is imported only once they are right.

`target=<folder or hub id>` is short for `target.path=...`, and `corpus=` likewise, unless the value names a file of
that Hydra group (`corpus=stdlib`). `method=<exported folder>` is the method that decodes with it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.metadata
import io
import json
import logging
import os
import re
import runpy
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra import version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from spectrain import config
from spectrain.config import COMMANDS, conf_dir, help, overrides, papers
from spectrain.config.fields import flat
from spectrain.config.overrides import did_you_mean, is_file_of, quoted
from spectrain.config.training import EXPERIMENTS
from spectrain.errors import AllRanksError, FinishedRun, LostRankError, UserError, nearest
from spectrain.stores.files import naming_a_full_disk
from spectrain.stores.named import check_model, check_names
from spectrain.stores.signals import EXIT_CODES, SIGNALS, Terminated
from spectrain.terminal import open_streams, stage

if TYPE_CHECKING:
    from spectrain.target import TargetModel

log = logging.getLogger(__name__)

HELP = {"-h", "--help"}
RANK_ZERO_SPEAKS_WITHIN_S = 5.0
SHORTHANDS = {"target": "target.path", "corpus": "corpus.path"}
SPIN_ROUNDS = "1000"  # of a waiting thread, some ten microseconds, before it sleeps and leaves its core to others
PIPE_CLOSED = 141  # exit code of other tools whose stdout ends at a reader that has left
UNHELPFUL_WARNINGS = (
    "LeafSpec",
    "does not have many workers",
    "smaller than the logging interval",
    "saving the DeepSpeed Stage 3 checkpoint",  # spectrain.export
    "gradient_checkpointing_enable",  # the name that all of 5.x know
)


def main() -> None:
    """Run `spectrain COMMAND name=value ...` as `python -m spectrain.COMMAND name=value ...` does.

    Without a command, list all of them.
    """
    open_streams()
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in HELP:
        with one_sentence("spectrain"):
            help.show_commands()
    elif name == "--version":
        print(importlib.metadata.version("spectrain"))
    elif name in COMMANDS:
        sys.argv[1:] = arguments
        # As Python's own -m, so that Lightning starts the other ranks of a training the same way.
        runpy.run_module(config.module_of(name), run_name="__main__", alter_sys=True)
    else:
        print(f"error: unknown command: {name}{nearest(name, COMMANDS)}; spectrain lists all commands", file=sys.stderr)
        raise SystemExit(2)


def run(module: str) -> None:
    """Run the command of a module, such as "spectrain.bench".

    Wrong use is one sentence and exit code 2; Ctrl-C is one sentence and 130, SIGTERM 143.
    """
    open_streams()
    name, arguments = module.rpartition(".")[2], sys.argv[1:]
    if HELP & set(arguments):
        with one_sentence(name):
            help.show_options(name, overrides.in_our_words(arguments, name))
        raise SystemExit
    config.TYPED_COMMAND.set(shlex.join(["python", "-m", module, *arguments]))
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra raises its errors then, where it would print them
    if name == "train":  # beside another process, threads that spin for long make it several times slower
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_ROUNDS)  # OpenMP, which torch loads, reads it once
    failed: list[str] = []  # jobs of a sweep
    jobs: list[tuple[list[str], str, float]] = []  # of a sweep: options, result, seconds

    def job(cfg: DictConfig) -> None:
        began_s, n_failed, said = time.monotonic(), len(failed), "finished before"
        with one_sentence(name, failed if in_multirun() else None):  # within it: Hydra would print an error of its own
            try:
                options = config.options_of(name, cfg)
                if not getattr(options, "experiment", name):
                    known = " or ".join(f"+exp={one}" for one in EXPERIMENTS)
                    raise UserError(f"nothing to train; give {known}")
                check_names(config.paths_of(name), options)
                with stage("starting"):
                    if hasattr(options, "target"):
                        importlib.import_module("spectrain.compiled").begin()
                    main = importlib.import_module(module).main
                quiet_libraries()
                settle_target(options)
                said = main(options) or "done"
            finally:
                if "wandb" in sys.modules:  # in a multirun each job is a W&B run of its own
                    sys.modules["wandb"].finish(exit_code=int(sys.exc_info()[0] is not None))
        if in_multirun():
            said = "failed, see below" if len(failed) > n_failed else said
            jobs.append(([*HydraConfig.get().overrides.task], said, time.monotonic() - began_s))

    with SIGNALS.answered(), one_sentence(name):
        config.register()
        for drafter in (one for one in arguments if name == "generate" and re.match(r"drafter=[^[,]+$", one)):
            check_model(*drafter.split("=", 1))  # before its kind is looked for, which takes torch
        sys.argv[1:] = flags_first(expand_shorthands(arguments, name))
        try:
            compose_and_run(name, job)
        finally:  # not after each job of a multirun: DeepSpeed keeps its groups for the life of a process
            leave_ranks()
        common = set.intersection(*(set(options) for options, _, _ in jobs)) if len(jobs) > 1 else set()
        for options, result, elapsed_s in jobs if len(jobs) > 1 and rank() == 0 else ():
            print(f"{' '.join(one for one in options if one not in common):<40}  {elapsed_s:6.0f} s  {result}")
        if failed:
            raise UserError(f"{len(failed)} of the jobs failed: {'; '.join(failed)}")


def compose_and_run(name: str, job: Callable[[DictConfig], None]) -> None:
    """Run a job with the options of a command, or each job of a sweep.

    `hydra.main` does the same, but composes all options once more to see whether they choose a sweep, as -m does.
    """
    args = get_args_parser().parse_args()
    asked = {flag for flag, value in vars(args).items() if value} - {"overrides", "run", "multirun"}
    if asked or any(one.startswith("hydra.mode=") for one in args.overrides):
        hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name=name)(job)()
        return
    version.setbase("1.3")
    path = create_automatic_config_search_path(None, __name__, str(conf_dir()))
    composer = Hydra.create_main_hydra2(__name__.rpartition(".")[2], path)
    run, mode = (composer.multirun, "MULTIRUN") if args.multirun else (composer.run, "RUN")
    try:
        run(config_name=name, task_function=job, overrides=[*args.overrides, f"hydra.mode={mode}"])
    finally:
        GlobalHydra.instance().clear()


def expand_shorthands(arguments: Sequence[str], name: str) -> list[str]:
    """Rewrite `target=X` to `target.path=X` where X is no file of the group, and put paths and texts in quotes.

    `method=<exported folder>` becomes the method that decodes with it, and its options. They stand first, so that other
    arguments can change them. `generate drafter=<folder>` takes the method of the drafter's kind. `paper=` becomes a
    preset (`config.papers`). `name` is the command's.

    Raises:
        UserError: an argument has no name, or would remove an option.
    """
    (_, groups), paths, expanded = COMMANDS[name], config.paths_of(name), []
    quote = overrides.quoted_path if overrides.MULTIRUN.isdisjoint(arguments) else overrides.quoted_paths
    arguments = overrides.in_our_words(arguments, name)
    for argument in arguments:
        key, _, value = argument.partition("=")
        if argument.startswith("="):
            raise UserError(f"{argument} has no name; write options as name=value")
        if argument.startswith("~"):
            raise UserError(f"{argument} would remove an option, which the command needs; give it another value")
        if key not in overrides.FREE_TEXT and argument.encode("utf-8", "replace").decode() != argument:
            raise UserError(f"{argument} is no UTF-8 text; give a name that is")
        is_method = key == "method" and "method" in groups
        is_here = is_method and "/" not in value and (Path(value) / "spectrain.json").is_file()
        if is_here and is_file_of("method", value):
            log.warning("%s is a method and a folder here: the method is taken; ./%s is the folder", value, value)
        elif is_method and (is_here or "/" in value):
            if not Path(value).exists():
                raise UserError(f"method={value} does not exist; give the name of a method, or an exported folder")
            from spectrain.models.artifacts import decoded_by  # here: it imports torch

            chosen, options = decoded_by(Path(value))
            expanded[:0] = [f"++method.{option}={overrides.as_override(one)}" for option, one in options.items()]
            argument = f"method={chosen}"
        elif key in overrides.FREE_TEXT:
            argument = f"{key}={quoted(value)}"
        else:
            if key in SHORTHANDS and value not in ("", "null") and not (key in groups and is_file_of(key, value)):
                key = SHORTHANDS[key]
                argument = f"{key}={value}"
            if value and key.lstrip("+") in paths:
                argument = f"{key}={quote(value)}"
            if key in ("recipe", "engine"):
                if value == "null":
                    continue
                argument = f"+{argument}"
            if key.startswith("sampling.") and "sampling" in groups:
                argument = f"++{argument}"  # where no sampling is chosen, one option of it may be given all the same
        expanded.append(argument)
    typed = dict(argument.partition("=")[::2] for argument in arguments)
    if name == "generate" and "method" not in typed and re.match(r"[^[,]+$", typed.get("drafter", "")):
        from spectrain.methods.options import method_with  # here: it imports torch

        expanded.insert(0, f"method={method_with(typed['drafter'])}")
    first = sorted(expanded, key=lambda one: not one.startswith("+exp="))  # which later groups change
    return papers.with_paper(first, name)


def flags_first(arguments: list[str]) -> list[str]:
    """Put Hydra's own flags before the options: it reads none behind `name=value name=value -m name=value`.

    Raises:
        UserError: a flag is unknown, or lacks its value.
    """
    options = [argument for argument in arguments if re.match(r"[^-=]*=", argument)]
    arguments = [argument for argument in arguments if argument not in options] + options
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            get_args_parser().parse_args(arguments)
    except SystemExit as stop:
        if not stop.code:
            raise
        why = said.getvalue().splitlines()[-1].partition("error: ")[2]
        raise UserError(f"{why}; write options as name=value") from None
    return arguments


@contextlib.contextmanager
def one_sentence(name: str, failed: list[str] | None = None) -> Iterator[None]:
    """Turn what the user did wrong into one line on stderr and exit code 2, and signals likewise into 130 or 143.

    One job of a sweep adds the line to `failed` instead, with its options, and the others go on. So it does with an
    error of the code, whose traceback is logged.
    """
    try:
        with interruptible(), naming_a_full_disk(Path.cwd()):
            yield
            sys.stdout.flush()
        return
    except UserError as error:
        if failed is not None and isinstance(error, FinishedRun):  # an interrupted sweep goes on with what is left
            log.info("already finished, skipping: %s", error)
            return
        if failed is None and not isinstance(error, LostRankError):
            tell_torchrun(str(error))
        sentence = str(error) if failed is not None or is_mine_to_say(error) else None
    except MissingMandatoryValue as error:
        sentence = f"{error.full_key} is missing; give {error.full_key}=..."
    except OmegaConfBaseException as error:
        sentence = f"{error.full_key or 'an option'}: {str(error).splitlines()[0]}; write \\$ for a dollar sign"
    except HydraException as error:
        sentence = hydra_sentence(error, name, sys.argv[1:])
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python would fail at what it still holds
        raise SystemExit(PIPE_CLOSED) from None
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            sentence = f"{error.filename} cannot be read or written ({error.strerror}); see to it, or give another path"
            if failed is None:
                tell_torchrun(sentence)
        elif failed is None or int(os.environ.get("WORLD_SIZE", 1)) > 1:  # other ranks may wait in this job
            tell_torchrun(f"{type(error).__name__}: {error}")
            raise
        else:
            sentence = f"{type(error).__name__}: {error}"
            log.exception("not an error of the options")
    if failed is not None:
        failed.append(f"{' '.join(HydraConfig.get().overrides.task)}: {' '.join(sentence.split())}")
        log.error("this job failed, the others go on: %s", failed[-1])
        return
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
        # Libraries report at exit what an interrupted command has left.
        atexit.register(os.dup2, os.open(os.devnull, os.O_WRONLY), 2)
        raise SystemExit(SIGNALS.say(then, terminated=isinstance(error, Terminated))) from None


def hydra_sentence(error: HydraException, name: str, arguments: list[str]) -> str:
    """Say in one sentence what is wrong with the arguments that Hydra refused."""
    text = str(error)
    if found := re.match(r"Could not override '([^']+)'", text):
        wrong = found[1]
        others = [one for one in option_names(name, arguments) if one != wrong]  # which is a group of other commands
        return f"unknown option: {wrong}{did_you_mean(wrong, others) or '; --help lists all options'}"
    options = r"Could not find '([^']+)/([^'/]+)'\s+Available options in '[^']+':\s+(.*?)\s*Config"
    if found := re.search(options, text, re.DOTALL):
        known = found[3].split()
        return f"{found[1]}={found[2]} is unknown; choose among {', '.join(known)}{nearest(found[2], known)}"
    if found := re.match(r"Ambiguous value for argument '([^']+)'", text):
        return f"{found[1]} has several values; give one of them, or -m for a sweep over all"
    if isinstance(error, OverrideParseException):
        first = text.removeprefix("Error parsing override ").splitlines()[0]
        return f"{first} cannot be read as an option; write name=value, and quote values with special characters"
    return ", ".join(line.strip().rstrip(".") for line in text.splitlines() if line.strip())


def option_names(name: str, arguments: list[str]) -> list[str]:
    """List all options of a command, in dotted form, with the groups (`+exp=spire`) that the arguments choose."""
    groups = [a for a in arguments if "=" in a and overrides.is_group(a.split("=")[0].lstrip("+"))]
    for chosen in (groups, []):
        with contextlib.suppress(HydraException):  # a sweep over a group, or a group that is wrong, too
            return [*COMMANDS[name][1], *dict(flat(OmegaConf.to_container(composed(name, *chosen))))]
    return []


def composed(name: str, *arguments: str) -> DictConfig:
    """Compose the options of a command as Hydra does."""
    config.register()
    with hydra.initialize_config_dir(str(conf_dir()), version_base="1.3"):
        return hydra.compose(name, overrides=expand_shorthands(arguments, name))


def is_mine_to_say(error: UserError) -> bool:
    """Whether this rank prints its error: rank zero does, another only what rank zero does not say.

    What ends rank zero ends the others (torchrun), or they have raised it alike. A rank that is still there after a
    while has an error of its own, or has lost a rank of another machine.
    """
    is_ended = isinstance(error, LostRankError) and "TORCHELASTIC_RUN_ID" in os.environ
    if rank() == 0 and not is_ended:
        return True
    time.sleep(RANK_ZERO_SPEAKS_WITHIN_S)
    return not isinstance(error, AllRanksError)


def tell_torchrun(sentence: str) -> None:
    """Leave the error where torchrun reads it: its report, which stands last, ends with that of the first rank."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        said = " ".join(sentence.split())
        facts = {"message": said, "extraInfo": {"py_callstack": said, "timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": facts}), encoding="utf-8")


def rank() -> int:
    """Return this process's number among those that torchrun, Lightning or SLURM started."""
    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID")
    return int(next((os.environ[name] for name in names if name in os.environ), 0))


def leave_ranks() -> None:
    """Take leave of the other ranks: a process that ends while connected to them aborts, and takes them with it."""
    torch = sys.modules.get("torch")
    if torch and torch.distributed.is_available() and torch.distributed.is_initialized():
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
    if "transformers" in sys.modules:
        sys.modules["transformers"].logging.disable_progress_bar()
    for message in UNHELPFUL_WARNINGS:
        warnings.filterwarnings("ignore", message=f".*{message}.*")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")  # of what DeepSpeed calls


def settle_target(options: object) -> None:
    """Replace a target that is left open, and `target.dtype=auto`, by which stores and results are named.

    A training settles the dtype with all its options. Where the bundled target is taken unasked, that is said.
    """
    target = getattr(options, "target", None)
    if not isinstance(target, config.Target):
        return
    from spectrain.models.packages import default_target, dtype_of  # here: this module imports no torch

    if target.path is None:
        target.path = default_target()
    elif not any(one.startswith("target") for one in HydraConfig.get().overrides.task):
        log.info("target=%s, which comes with spectrain; target=<folder or id> takes another", target.path)
    if not hasattr(options, "trainer"):
        import torch

        target.dtype = dtype_of(vars(target), torch.cuda.is_available())


def open_target(
    chosen: config.Target, device: str | None = None, has_blocks: bool = True, all_ranks: bool = False
) -> TargetModel:
    """Load the target of a command's options, on `device` where given; without its blocks where these are not run.

    Raise UserError with `all_ranks` if not all ranks hold it together, because each works on the same texts.
    """
    from spectrain.models.packages import target_path
    from spectrain.target import load_target  # here: this module imports no torch
    from spectrain.target.weights import is_emulated

    n_ranks = int(os.environ.get("WORLD_SIZE", 1))
    if chosen.ranks_of_group(n_ranks) < n_ranks and all_ranks:
        raise AllRanksError(
            f"{n_ranks} ranks would each do the same here; start one process, or give target.parallel=tp and leave "
            "target.tp out"
        )
    path, device = target_path(chosen.path), device or chosen.device
    if not has_blocks and chosen.parallel == "none":
        from spectrain.target.loading import open_tables

        if (tables := open_tables(Path(path), chosen.dtype, device)) is not None:
            return tables
    options = {"engine": chosen.engine, "graphs": chosen.graphs, "compile": chosen.compile, "tp": chosen.tp}
    with stage(f"loading {chosen.path}", shown=Path(path).is_dir()):  # downloads have bars of their own
        target = load_target(path, chosen.dtype, device, chosen.parallel, **options)
    if target.device.type == "cpu" and is_emulated(target.dtype) and rank() == 0:
        log.warning("this processor computes %s slowly; target.dtype=float32 is faster here", chosen.dtype)
    return target
