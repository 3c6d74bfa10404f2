"""`pd-cache` as tests run it: within their own process, or in another one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result
from rich.console import Console

from launch.cli import main
from tests.support.pool import ROOT


def cli(*arguments: object, code: int | None = 0, **options: Any) -> Result:
    """Runs a command in this process. AssertionError if it ends otherwise than with the exit status `code`; None means any."""
    result = CliRunner().invoke(main, [str(one) for one in arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert code in (None, result.exit_code), result.output
    return result


def cli_json(*arguments: object, code: int | None = 0, **options: Any) -> Any:
    """The same, and decodes what it prints."""
    return json.loads(cli(*arguments, "--json", code=code, **options).stdout)


def drawn(table: Any, width: int = 80) -> str:
    """What a table looks like in a terminal of so many columns."""
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def program(*arguments: object) -> list[str]:
    """The command line that runs a command in a process of its own, in the folder `ROOT`."""
    return [sys.executable, "-m", "launch", *(str(one) for one in arguments)]


def printed(*command: object, cwd: Path = ROOT, **env: str) -> str:
    """What a program prints. AssertionError, with the end of its complaints, if it fails."""
    given = [str(one) for one in command], {**os.environ, **env}
    done = subprocess.run(given[0], cwd=cwd, env=given[1], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_program(*arguments: object, code: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process of its own. Raises AssertionError if it ends otherwise than with the exit status `code`."""
    given = {**os.environ, **env}
    done = subprocess.run(program(*arguments), cwd=ROOT, env=given, capture_output=True, text=True, timeout=300, check=False)  # fmt: skip
    assert done.returncode == code, done.stderr[-4000:]
    assert "Traceback" not in done.stderr
    return done
