"""The units of deploy/systemd, judged by systemd itself, and what they run."""

import re
import shlex
import shutil
import subprocess

import pytest

from pd_cache.cluster.schema import ROLES
from tests.support.cli import cli
from tests.support.needs import needed, tool
from tests.test_architecture import ROOT

FOLDER = ROOT / "deploy" / "systemd"
INSTALLED = "/usr/local/bin/pd-cache"


def entries(unit):
    return dict(re.findall(r"^(\w+)=(.*)$", (FOLDER / unit).read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", ["pd-cache.service", "pd-cache@cache-server.service"])
def test_systemd_accepts_the_units(tmp_path, name):
    program = tool("pd-cache") or shutil.which("true") or ""
    text = (FOLDER / re.sub(r"@.*\.", "@.", name)).read_text()
    assert INSTALLED in text
    unit = tmp_path / name
    unit.write_text(text.replace(INSTALLED, program))
    done = subprocess.run(
        [needed("systemd-analyze"), "verify", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("unit", ["pd-cache.service", "pd-cache@.service"])
def test_pd_cache_has_the_commands_of_the_units(tmp_path, unit):
    """Each fails only because the file is not there, and says so: its command, its role and its options are
    right."""
    for role in ROLES:
        program, *arguments = shlex.split(entries(unit)["ExecStart"].replace("%i", role))
        assert program == INSTALLED
        missing = str(tmp_path / "missing.yaml")
        done = cli(*(missing if "/etc/" in argument else argument for argument in arguments), code=2)
        assert "missing.yaml: cannot be read: No such file" in done.output


def test_the_units_allow_what_pd_cache_needs():
    """Locked memory and descriptors as `doctor` asks for them, and as long to stop as six groups of nodes may
    take."""
    for unit in ("pd-cache.service", "pd-cache@.service"):
        found = entries(unit)
        assert found["LimitMEMLOCK"] == "infinity"
        assert int(found["LimitNOFILE"]) >= 4 * 1024 + 256
        assert int(found["TimeoutStopSec"]) >= 6 * 10
        assert found["KillMode"] == "mixed"
        assert found["Environment"] == f"XDG_RUNTIME_DIR=/run/{found['RuntimeDirectory']}"
        assert found["RuntimeDirectoryMode"] == "0700"
