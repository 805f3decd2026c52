"""Break the code on purpose, one line at a time, and see that a test fails for each.

    python scripts/deliberate_breaks.py                    # all, some 15 minutes on one core
    python scripts/deliberate_breaks.py only=verify,cost   # those whose file's path contains one of these words

The breaks stand in deliberate_breaks.txt. Each is applied to a copy of the checkout, so that nothing here changes. A
break that no test notices is said at the end, and the exit code is 1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).with_suffix(".txt")
COPIED = ("spectrain", "data_prep", "conf", "tests", "scripts", "pyproject.toml", "README.md", "docs")


def read_breaks(table: Path) -> list[tuple[str, str, str, str]]:
    """Return file, what stands there, what takes its place, and tests, for each paragraph of the table."""
    text = "".join(line for line in table.read_text().splitlines(keepends=True) if not line.startswith("#"))
    paragraphs = [paragraph.splitlines() for paragraph in text.strip().split("\n\n")]
    return [(file, old[2:], new[2:], tests[2:]) for file, old, new, tests in paragraphs]


def apply(root: Path, file: str, old: str, new: str) -> None:
    """Replace the one occurrence of `old` in a file of the copy. Raises SystemExit where it is not there once."""
    path = root / file
    text = path.read_text()
    if text.count(old) != 1:
        raise SystemExit(f"{file} has {text.count(old)} times: {old}")
    path.write_text(text.replace(old, new))


def main() -> None:
    wanted = next((a.removeprefix("only=").split(",") for a in sys.argv[1:] if a.startswith("only=")), [""])
    survived, started = [], time.time()
    chosen = [entry for entry in read_breaks(TABLE) if any(word in entry[0] for word in wanted)]
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, root / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, root / name)
        (root / "checkpoints").symlink_to(ROOT / "checkpoints")
        environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        for file, old, new, tests in chosen:
            whole = (root / file).read_text()
            apply(root, file, old, new)
            words = tests.split()
            command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", *words]
            done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
            (root / file).write_text(whole)
            caught = done.returncode == 1 and ("FAILED" in done.stdout or "ERROR" in done.stdout)
            failed = next((line.split(" - ")[0] for line in done.stdout.splitlines() if line.startswith("FAILED")), "")
            print(f"{'caught' if caught else 'SURVIVED'}  {file}: {new}  {failed}", flush=True)
            if not caught:
                survived.append(f"{file}: {old} -> {new}")
    print(f"{len(chosen) - len(survived)} of {len(chosen)} breaks were caught, {time.time() - started:.0f} s")
    for line in survived:
        print(f"survived: {line}")
    raise SystemExit(bool(survived))


if __name__ == "__main__":
    main()
