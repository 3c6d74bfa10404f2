"""A real Prometheus that scrapes a cluster with the configuration and the rules of deploy/prometheus."""

import json
import math
import signal
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import yaml

from launch.run.supervise import spawn_child
from tests.support.needs import needed
from tests.support.pool import free_port
from tests.support.waiting import PATIENCE_S, wait_for

FOLDER = Path(__file__).resolve().parent.parent.parent / "deploy" / "prometheus"


def configuration(config):
    """deploy/prometheus/prometheus.yml with the addresses of a cluster, asked every second."""
    tree = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    tree["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    tree["rule_files"] = [str(FOLDER / name) for name in tree["rule_files"]]
    (job,) = tree["scrape_configs"]
    job["scrape_timeout"] = "1s"
    roles = {entry["labels"]["role"] for entry in job["static_configs"]}
    assert roles == {"master", "store", "cache-server", "prefill", "decode", "proxy"}, (
        "each role has its targets"
    )
    for entry in job["static_configs"]:
        nodes = config.by_role(entry["labels"]["role"])
        entry["targets"] = [f"{node.host}:{scraped(node)}" for node in nodes]
    return tree


def scraped(node):
    """The port of a node's /metrics."""
    return int(getattr(node, "metrics_port", None) or getattr(node, "port", 0))


class Prometheus:
    """One server, from `start` to `stop`."""

    def __init__(self, folder, tree):
        self._folder = folder
        self._port = free_port()
        self._file = folder / "prometheus.yml"
        self._file.write_text(yaml.safe_dump(tree))
        self._process = None
        self.since = time.time()

    def start(self):
        command = [
            needed("prometheus"),
            f"--config.file={self._file}",
            f"--storage.tsdb.path={self._folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{self._port}",
            "--log.level=error",
        ]
        self._process = spawn_child(command, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "Prometheus")
        return self

    def stop(self):
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(PATIENCE_S)
            self._process = None

    def get(self, path, **fields):
        """The `data` of an answer of its API. Raises HTTPError for a query that it refuses."""
        url = f"http://127.0.0.1:{self._port}/api/v1/{path}?{urllib.parse.urlencode(fields)}"
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
            return json.load(answer)["data"]

    def has_shown(self, query):
        """Whether a panel of this query would show a number anywhere between the start and now."""
        found = self.get("query_range", query=query, start=self.since, end=time.time(), step="1s")
        return any(
            not math.isnan(float(value)) for series in found["result"] for _, value in series["values"]
        )

    def _answers(self):
        try:
            return bool(self.get("status/buildinfo"))
        except OSError:
            return False
