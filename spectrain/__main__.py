"""`python -m spectrain` is the command `spectrain`."""

import os


def main() -> None:
    """Run `spectrain.cli.main`; Ctrl-C is one sentence also while it is imported."""
    try:
        from spectrain import cli

        cli.main()
    except KeyboardInterrupt:
        os.write(2, b"interrupted; run the same command again\n")
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
