"""`python -m launch` is `pd-cache`, for processes that start others with their own interpreter."""

from launch.cli import main

main(prog_name="pd-cache")
