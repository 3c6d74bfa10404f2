"""`python -m launch` is `pd-cache`, for processes that start others with their own interpreter."""

from launch.cli import main

if __name__ == "__main__":  # processes that multiprocessing spawns import this, too
    main(prog_name="pd-cache")
