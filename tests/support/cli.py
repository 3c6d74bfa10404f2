"""`pd-cache` as tests run it: within their own process, or in another one."""

import io
import json
import os
import subprocess
import sys

from click.testing import CliRunner
from rich.console import Console

from launch.cli import main
from tests.support.pool import ROOT


def cli(*arguments, code=0, **options):
    """Runs a command in this process. AssertionError if it ends otherwise than with the exit status `code`;
    None means any."""
    result = CliRunner().invoke(main, [str(one) for one in arguments], **options)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    assert code in (None, result.exit_code), result.output
    return result


def cli_json(*arguments, code=0, **options):
    """The same, and decodes what it prints."""
    return json.loads(cli(*arguments, "--json", code=code, **options).stdout)


def drawn(table, width=80):
    """What a table looks like in a terminal of so many columns."""
    text = io.StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue()


def program(*arguments):
    """The command line that runs a command in a process of its own, in the folder `ROOT`."""
    return [sys.executable, "-m", "launch", *(str(one) for one in arguments)]


def printed(*command, cwd=ROOT, **env):
    """What a program prints. AssertionError, with the end of its complaints, if it fails."""
    return _ended(command, cwd, 0, env).stdout


def run_program(*arguments, code=0, **env):
    """Runs a command in a process of its own. Raises AssertionError if it ends otherwise than with the exit
    status `code`."""
    done = _ended(program(*arguments), ROOT, code, env)
    assert "Traceback" not in done.stderr
    return done


def _ended(command, cwd, code, env):
    words, given = [str(one) for one in command], {**os.environ, **env}
    done = subprocess.run(words, cwd=cwd, env=given, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stderr[-4000:]
    return done
