"""The program `pd-cache`; `python -m launch` for processes that start others with their own interpreter."""

import sys

try:
    from launch.cli import main
except KeyboardInterrupt:  # the imports take a moment, and a traceback of them helps nobody
    sys.exit(130)

if __name__ == "__main__":  # processes that multiprocessing spawns import this, too
    main(prog_name="pd-cache")
