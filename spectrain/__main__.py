"""How commands begin: `python -m spectrain`, which is `spectrain`, and `python -m spectrain.COMMAND`.

Signals are answered from here on, also while libraries are imported, which takes seconds.
"""

from spectrain.stores.signals import SIGNALS


def main() -> None:
    """Run `spectrain.cli.main`."""
    SIGNALS.end_at_once()
    from spectrain import cli

    cli.main()


def run(module: str) -> None:
    """Run the command of a module, such as "spectrain.bench", by `spectrain.cli.run`."""
    SIGNALS.end_at_once()
    from spectrain import cli

    cli.run(module)


if __name__ == "__main__":
    main()
