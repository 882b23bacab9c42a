"""``python -m weight_update``: the command ``weight-update``."""

from weight_update.cli import main

if __name__ == "__main__":
    main()
