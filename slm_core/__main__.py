"""``python -m slm_core`` is the command ``slm``."""

from slm_core.cli import main

if __name__ == "__main__":
    main()
