"""`python -m spectrain` is the command `spectrain`."""

from spectrain.cli import main

if __name__ == "__main__":
    main()
