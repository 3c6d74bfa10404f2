"""The dashboard and the rules of deploy/, asked of a real Prometheus that scrapes a live cluster."""

import contextlib
import json
import re
import subprocess
from typing import NamedTuple

import pytest
import yaml

from launch.run.up import LocalCluster
from tests.support.cluster import CHUNK, OUTAGES, complete, kill, nodes_of_every_role, started
from tests.support.needs import needed
from tests.support.prometheus import FOLDER, Prometheus, configuration
from tests.support.waiting import wait_for
from tests.test_architecture import ROOT

pytestmark = pytest.mark.slow(seconds=60)

DASHBOARD = json.loads((ROOT / "deploy" / "grafana" / "pd-cache.json").read_text())
RULES = [
    rule for group in yaml.safe_load((FOLDER / "rules.yml").read_text())["groups"] for rule in group["rules"]
]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def panel_queries():
    """Title and query of everything that the dashboard asks, as Grafana asks it with `All` chosen."""
    for panel in DASHBOARD["panels"]:
        for target in panel.get("targets", ()):
            yield panel["title"], target["expr"]
    for annotation in DASHBOARD["annotations"]["list"]:
        yield (
            annotation["name"],
            annotation["expr"].replace('alertstate="firing"', 'alertstate=~"pending|firing"'),
        )


def filled_in(query):
    for name, value in (("job", ".+"), ("instance", ".+"), ("__rate_interval", "10m")):
        query = query.replace(f"${name}", value)
    assert "$" not in query, "a variable that the dashboard does not define"
    return query


class Watched(NamedTuple):
    cluster: LocalCluster
    prometheus: Prometheus


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A cluster with every role and every kind of tier that has computed, stored and loaded, and that then
    lost its master and its decode node."""
    needed("prometheus")
    folder = tmp_path_factory.mktemp("watched")
    tiers = [
        {"kind": "local", "capacity": "1MiB"},
        {"kind": "disk", "path": str(folder / "disk"), "capacity": "64MiB"},
        {"kind": "mooncake"},
    ]
    (folder / "disk").mkdir()
    cache = {"chunk_size": CHUNK, "tiers": tiers}
    with started(folder, nodes=nodes_of_every_role(), cache=cache, **OUTAGES) as cluster:
        prometheus = Prometheus(folder, configuration(cluster.config))
        try:
            prometheus.start()
            wait_for(
                lambda: prometheus.get("query", query='up{job="pd-cache"} == 1')["result"][5:], "6 nodes up"
            )
            _use(cluster, prometheus)
            yield Watched(cluster, prometheus)
        finally:
            prometheus.stop()
            for name in cluster.supervisor.pids:  # without their master they would take long to stop
                with contextlib.suppress(ProcessLookupError):
                    kill(cluster, name)


def _use(cluster, prometheus):
    url = cluster.urls["proxy"]
    prompt = iter(range(10_000))

    def loaded():
        """Sends a new prompt, twice; the second time the prefill node computes next to nothing."""
        first = next(prompt)
        tokens = [(first + n) % 500 for n in range(6 * CHUNK)]
        return all(complete(url, tokens).status == 200 for _ in range(2)) and prometheus.has_shown(
            'increase(pd_cache_prompt_tokens_total{source="loaded"}[1m]) > 0'
        )

    wait_for(loaded, "a load that Prometheus has seen")
    kill(cluster, "master")

    def lost():
        complete(url, [(next(prompt) * 7 + n) % 500 for n in range(2 * CHUNK)])
        return prometheus.has_shown('increase(pd_cache_troubles_total{reason="pool_down"}[1m]) > 0')

    wait_for(lost, "a lookup without a pool")
    kill(cluster, "decode-0")

    def failed():
        complete(url, [1, 2, 3])
        return prometheus.has_shown('increase(pd_cache_proxy_requests_total{status=~"5.."}[1m]) > 0')

    wait_for(failed, "a request without a decode node")


@pytest.mark.parametrize("title, query", list(panel_queries()))
def test_every_query_of_the_dashboard_shows_data_of_a_live_cluster(watched, title, query):
    wait_for(lambda: watched.prometheus.has_shown(filled_in(query)), f"{title}: {query}")


@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if "record" in rule], ids=lambda rule: rule["record"]
)
def test_every_recording_rule_records_a_live_cluster(watched, rule):
    wait_for(lambda: watched.prometheus.has_shown(rule["record"]), rule["record"])


def test_variables_of_the_dashboard_find_the_cluster(watched):
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            match = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["definition"])
            assert match
            chosen = {"match[]": match[1].replace("$job", "pd-cache")}
            found = watched.prometheus.get(f"label/{match[2]}/values", **chosen)
            nodes = len(watched.cluster.config.nodes)
            assert found == ["pd-cache"] if variable["name"] == "job" else len(found) == nodes


def test_a_master_that_dies_sets_off_the_alerts_for_it(watched):
    def noticed():
        return {alert["labels"]["alertname"] for alert in watched.prometheus.get("alerts")["alerts"]}

    wait_for(lambda: noticed() >= {"PdCachePoolDown", "PdCacheNodeDown"}, "the alerts")
    rules = [rule for group in watched.prometheus.get("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(RULES)
    assert [rule["name"] for rule in rules if rule["health"] != "ok"] == []


@pytest.mark.parametrize("command", ["test rules rules_test.yml", "check config prometheus.yml"])
def test_promtool_finds_nothing_wrong(command):
    """`rules_test.yml` has a scenario for each alert, and a healthy cluster in which none fires."""
    promtool = [needed("promtool"), *command.split()]
    done = subprocess.run(promtool, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_is_tested_firing_and_silent_and_has_a_page(name):
    tests = yaml.safe_load((FOLDER / "rules_test.yml").read_text())["tests"]
    asked = [ask for one in tests for ask in one.get("alert_rule_test", ()) if ask["alertname"] == name]
    assert any(ask.get("exp_alerts") for ask in asked), "no test in which it fires"
    assert any(not ask.get("exp_alerts") for ask in asked), "no test in which it is silent"
    page, _, anchor = ALERTS[name]["annotations"]["runbook"].partition("#")
    assert anchor == name.lower()
    assert f"### {name}\n" in (ROOT / page).read_text()
    assert ALERTS[name]["labels"]["severity"] in ("critical", "warning")
