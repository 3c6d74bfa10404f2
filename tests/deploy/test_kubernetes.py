"""The chart and the manifests: rendered by a real helm, valid for three versions of Kubernetes, and what
their pods would run.

No cluster of Kubernetes runs here. The last test starts what the pods' commands say, as processes with
addresses of their own.
"""

import contextlib
import filecmp
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
import yaml

from pd_cache.cluster import ClusterConfig, read_config
from tests.support.cluster import ENGINE, complete, fetched
from tests.support.needs import needed, needs_etcd
from tests.support.pool import Process
from tests.support.waiting import PATIENCE_S, wait_for
from tests.test_architecture import ROOT

CHART = ROOT / "deploy" / "helm" / "pd-cache"
VERSIONS = ("1.29", "1.33", "1.37")
VARIANTS = {
    "defaults": "",
    "everything": """
cacheServer: {enabled: true, tolerations: [{operator: Exists}]}
serviceMonitor: {enabled: true, proxyKey: {name: keys, key: monitor}}
prometheusRule: {enabled: true}
store: {imageTag: 0.2.0, updateStrategy: OnDelete}
proxy: {keysSecret: keys, tlsSecret: tls, serviceType: LoadBalancer, priorityClassName: high, pickerPort: 9002, gateways: [{podSelector: {}}]}
engineImage: {repository: pd-cache-vllm, tag: 0.2.0}
engine: {models: {persistentVolumeClaim: {claimName: models}}}
prefill: {nodeSelector: {gpu: "yes"}, resources: {limits: {nvidia.com/gpu: "1"}}, env: {A: 1}}
imagePullSecrets: [{name: registry}]
networkPolicy: {clients: [{podSelector: {}}], engines: [{podSelector: {}}], monitoring: []}
config:
  engine: {kind: vllm, model: /models/m, name: m}
  proxy: {api_keys_file: /etc/pd-cache-keys/keys}
  tracing: {endpoint: "http://collector:4318/v1/traces"}
""",
    "rdma": "{rdma: {enabled: true}, hostNetwork: true, store: {enabled: false}, master: {replicas: 1}}",
    "gpu": (CHART.parent / "gpu-values.yaml").read_text(),
}
OPERATORS = ("ServiceMonitor", "PrometheusRule", "InferencePool")
"""Kinds of the Prometheus Operator and the inference extension, which Kubernetes' own schemas do not know."""


def helm(*arguments):
    return subprocess.run([needed("helm"), *arguments], capture_output=True, text=True, check=False)


def templated(folder, *values):
    """Has helm render the chart with these values, in YAML, the later over the earlier."""
    files = [folder / f"{number}.values" for number in range(len(values))]
    for file, text in zip(files, values, strict=True):
        file.write_text(text)
    given = (f"--values={file}" for file in files)
    return helm("template", "try", str(CHART), "--namespace", "n", *given)


def rendered(folder, *values):
    done = templated(folder, *values)
    assert (done.returncode, done.stderr) == (0, "")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def of_kind(documents, *kinds):
    return [document for document in documents if document["kind"] in kinds]


def workloads(documents):
    """The Deployment or DaemonSet of each role."""
    found = of_kind(documents, "Deployment", "DaemonSet")
    return {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in found}


def policy_of(documents, name="try-pd-cache"):
    """The only rule for what may come in, of a NetworkPolicy."""
    (policy,) = [one for one in of_kind(documents, "NetworkPolicy") if one["metadata"]["name"] == name]
    (rule,) = policy["spec"]["ingress"]
    return rule


def files(documents):
    """The file of each role."""
    (config,) = of_kind(documents, "ConfigMap")
    return {name.removesuffix(".yaml"): text for name, text in config["data"].items()}


@pytest.mark.parametrize(
    "variant, version",
    [
        *(("everything", version) for version in VERSIONS),
        ("defaults", VERSIONS[0]),
        ("rdma", VERSIONS[-1]),
        ("gpu", VERSIONS[-1]),
    ],
)
def test_what_the_chart_renders_is_valid(tmp_path, variant, version):
    kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="`make install` installs it")
    documents = rendered(tmp_path, VARIANTS[variant])
    assert (
        len({(document["kind"], document["metadata"]["name"]) for document in documents})
        == len(documents)
        > 10
    )
    for document in documents:
        if document["kind"] not in OPERATORS:
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_role_has_a_workload_a_file_that_can_be_read_and_probes(tmp_path, variant):
    documents = rendered(tmp_path, VARIANTS[variant])
    kinds = {"store": "DaemonSet", "cache-server": "DaemonSet"}
    found = {}
    for role, workload in workloads(documents).items():
        assert workload["kind"] == kinds.get(role, "Deployment")
        found[role] = workload["spec"]["template"]["spec"]
    expected = {"master", "prefill", "decode", "proxy"}
    expected |= {"store"} if variant != "rdma" else set()
    expected |= {"cache-server"} if variant == "everything" else set()
    assert found.keys() == files(documents).keys() == expected
    for role, text in files(documents).items():
        file = tmp_path / f"{role}.yaml"
        for word, value in (
            ("POD_IP", "127.0.0.1"),
            ("POD_NAME", f"try-{role}-0"),
            ("NODE_NICS", "[mlx5_0]"),
        ):
            text = text.replace(word, value)
        file.write_text(text)
        config, _ = read_config(file)
        assert config.nodes[0].role == role
        (container,) = found[role]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["path"] == "/health"
            node = config.nodes[0]
            assert ports[asked["port"]] == (getattr(node, "metrics_port", None) or node.port)
        assert "livenessProbe" in container
        assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]
        moves = variant in ("rdma", "gpu") and role not in ("master", "proxy")
        assert (
            (config.transfer.protocol == "rdma") == moves == ("rdma/hca" in container["resources"]["limits"])
        )


def test_roles_of_different_tensor_parallel_sizes_cut_chunks_into_the_same_shards(tmp_path):
    texts = files(rendered(tmp_path, VARIANTS["gpu"]))
    for role, size in (("prefill", 4), ("decode", 8)):
        config = yaml.safe_load(texts[role])
        assert config["nodes"][0]["args"] == {"tensor-parallel-size": size}
        assert config["cache"]["shards"] == 8


def test_vllm_publishes_events_where_a_role_has_a_port_for_them_and_the_pods_may_connect_to_it(tmp_path):
    documents = rendered(tmp_path, VARIANTS["gpu"])
    nodes = {role: yaml.safe_load(text)["nodes"][0] for role, text in files(documents).items()}
    assert (nodes["prefill"]["events_port"], nodes["decode"].get("events_port")) == (5570, None)
    assert {5570, 5571} <= {one["port"] for one in policy_of(documents)["ports"]}
    assert "5571" not in yaml.safe_dump(rendered(tmp_path)), "by default there are none"


def test_a_pod_takes_the_nics_of_its_node(tmp_path):
    devices = "[{nodes: gpu-a-*, devices: [mlx5_0, mlx5_1]}, {nodes: gpu-b-1, devices: [mlx5_2]}]"
    documents = rendered(tmp_path, f"rdma: {{enabled: true, devices: {devices}}}")
    (container,) = workloads(documents)["store"]["spec"]["template"]["spec"]["containers"]
    script = (
        container["args"][0]
        .replace("/etc/pd-cache", str(tmp_path))
        .replace("/run/pd-cache-file", str(tmp_path))
    )
    (tmp_path / "store.yaml").write_text(files(documents)["store"])
    program = tmp_path / "pd-cache"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    for node, nics in (("gpu-a-7.rack", ["mlx5_0", "mlx5_1"]), ("gpu-b-1", ["mlx5_2"]), ("gpu-b-10", None)):
        names = {"NODE_NAME": node, "POD_IP": "127.0.0.1", "POD_NAME": "store-0"}
        path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [*container["command"], script],
            env={**names, "PATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        if nics is None:
            assert (done.returncode, done.stderr) == (1, "rdma.devices has no entry for the node gpu-b-10\n")
        else:
            assert done.returncode == 0
            assert list(read_config(tmp_path / "cluster.yaml")[0].transfer.devices) == nics


@pytest.mark.parametrize(
    "values, restarted",
    [
        ("prefill: {args: {max-model-len: 1024}}", "prefill"),
        ("config: {proxy: {direct_tokens: 64}}", "proxy"),
        ("config: {handoff: {wait_ms: 1000}}", "prefill decode proxy"),
        ("config: {engine: {kind: vllm, model: /models/m}}", "cache-server prefill decode proxy"),
        ("image: {tag: 0.2.1}", "cache-server prefill decode proxy"),
        ("config: {transfer: {threads: 2}}", "master store cache-server prefill decode proxy"),
        ("networkPolicy: {clients: [{podSelector: {}}]}", ""),
    ],
)
def test_an_upgrade_restarts_only_the_roles_that_read_what_changed(tmp_path, values, restarted):
    """Above all no store, which forgets what it held."""
    fixed = "{cacheServer: {enabled: true}, master: {imageTag: 0.2.0}, store: {imageTag: 0.2.0}}"
    before, after = (
        {role: one["spec"]["template"] for role, one in workloads(rendered(tmp_path, fixed, *more)).items()}
        for more in ((), (values,))
    )
    assert {role for role, pod in after.items() if pod != before[role]} == set(restarted.split())
    labels = {label for pod in before.values() for label in pod["metadata"]["labels"]}
    assert not labels & {"app.kubernetes.io/version", "helm.sh/chart"}, (
        "these change with each version of the chart"
    )


def test_monitors_choose_the_services_of_each_role_and_name_it(tmp_path):
    documents = rendered(tmp_path, VARIANTS["everything"])
    services = of_kind(documents, "Service")
    roles = set()
    for monitor in of_kind(documents, "ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        (service,) = [one for one in services if wanted <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in [port["name"] for port in service["spec"]["ports"]]
        labels = {entry["targetLabel"]: entry["replacement"] for entry in endpoint["relabelings"]}
        assert labels == {
            "job": "pd-cache",
            "role": service["spec"]["selector"]["app.kubernetes.io/component"],
        }
        roles.add(labels["role"])
        pods = [
            one["spec"]["template"]["metadata"]["labels"].items() for one in workloads(documents).values()
        ]
        assert sum(service["spec"]["selector"].items() <= labels for labels in pods) == 1
    assert roles == {"master", "store", "cache-server", "prefill", "decode", "proxy"}
    (rule,) = of_kind(documents, "PrometheusRule")
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yml").read_text())


@pytest.mark.parametrize(
    "values, message",
    [
        ("prefil: {}", "additional properties 'prefil' not allowed"),
        ("store: {segmentSize: 4 gigs}", "/store/segmentSize"),
        ("decode: {segmentSize: 1MiB}", "/decode/segmentSize"),
        ("store: {segmentSize: 4Gi}", "/store/segmentSize"),
        ("prefill: {segmentSize: 0Gi}", "/prefill/segmentSize"),
        ("config: {transfer: {staging_size: 4Gi}}", "/config/transfer/staging_size"),
        ("store: {segmentSize: 5GiB}", "store: segmentSize 5GiB and 1 GiB besides do not fit into"),
        ("config: {engine: {kind: vllm, modle: m}}", "config.engine.model: the vllm engine needs it"),
        ("etcd: {endpoints: []}", "/etcd/endpoints"),
        ("proxy: {port: 0}", "/proxy/port"),
        ("config: {nodes: []}", "additional properties 'nodes' not allowed"),
        ("clusterName: a b", "/clusterName"),
        ("rdma: {devices: [{nodes: a;b, devices: [mlx5_0]}]}", "/rdma/devices/0/nodes"),
        ("decode: {args: {tensor-parallel-size: 8}}", "config.cache.shards: tensor-parallel sizes of [1 8]"),
        ("proxy: {keysSecret: keys}", "set config.proxy.api_keys_file: /etc/pd-cache-keys/FILE"),
        ("proxy: {pickerPort: 9002}", "name the gateway's pods in proxy.gateways"),
        ("config: {proxy: {api_keys_file: /etc/pd-cache-keys/keys}}", "set proxy.keysSecret to the Secret"),
    ],
)
def test_the_schema_refuses_values_that_cannot_work(tmp_path, values, message):
    done = templated(tmp_path, values)
    assert done.returncode != 0
    assert message in done.stderr


def test_a_gateways_pool_has_the_decode_nodes_and_asks_the_proxies(tmp_path):
    documents = rendered(tmp_path, VARIANTS["everything"])
    (pool,) = of_kind(documents, "InferencePool")
    chosen = [
        role
        for role, one in workloads(documents).items()
        if pool["spec"]["selector"]["matchLabels"].items()
        <= one["spec"]["template"]["metadata"]["labels"].items()
    ]
    assert chosen == ["decode"]
    picker = pool["spec"]["endpointPickerRef"]
    (service,) = [one for one in of_kind(documents, "Service") if one["metadata"]["name"] == picker["name"]]
    assert {port["name"]: port["port"] for port in service["spec"]["ports"]}["picker"] == 9002
    assert picker["port"] == {"number": 9002}
    assert "picker_port: 9002" in files(documents)["proxy"]
    for role, port in (("proxy", 9002), ("decode", 8200)):
        rule = policy_of(documents, f"try-pd-cache-{role}-gateways")
        assert (rule["from"], rule["ports"][0]["port"]) == ([{"podSelector": {}}], port)


def test_large_numbers_are_written_in_full_and_the_monitoring_reaches_proxies_that_few_may_reach(tmp_path):
    """helm reads numbers as floats, and by itself writes an hour in milliseconds as 3.6e+06."""
    values = """
master: {leaseTtlMs: 3600000}
prefill: {segmentSize: 1073741824}
networkPolicy: {clients: [{podSelector: {}}], monitoring: [{namespaceSelector: {}}]}
"""
    documents = rendered(tmp_path, values)
    texts = files(documents)
    assert "lease_ttl_ms: 3600000\n" in texts["master"]
    assert yaml.safe_load(texts["prefill"])["nodes"][0]["segment_size"] == 1 << 30
    assert policy_of(documents, "try-pd-cache-proxy")["from"] == [
        {"podSelector": {}},
        {"namespaceSelector": {}},
    ]


def test_engines_of_ones_own_reach_what_the_pods_of_the_release_reach(tmp_path):
    own = {"podSelector": {"matchLabels": {"app": "vllm"}}}
    values = """
networkPolicy: {engines: [{podSelector: {matchLabels: {app: vllm}}}]}
prefill: {replicas: 0}
decode: {replicas: 0}
proxy: {replicas: 0}
"""
    release = {"app.kubernetes.io/name": "pd-cache", "app.kubernetes.io/instance": "try"}
    assert policy_of(rendered(tmp_path, values))["from"] == [{"podSelector": {"matchLabels": release}}, own]


def test_the_schema_knows_every_section_of_a_file_that_the_chart_does_not_write():
    schema = json.loads((CHART / "values.schema.json").read_text())
    sections = set(ClusterConfig.__struct_encode_fields__) - {"name", "master", "discovery", "nodes"}
    assert set(schema["properties"]["config"]["properties"]) == sections


def test_the_plain_manifests_are_current(tmp_path):
    """`make manifests` makes them from the chart."""
    path = f"{Path(needed('helm')).parent}{os.pathsep}{os.environ['PATH']}"
    script = ROOT / "tools" / "render-manifests.sh"
    subprocess.run(["bash", script, tmp_path], env={**os.environ, "PATH": path}, check=True)
    there, made = ROOT / "deploy" / "kubernetes", sorted(file.name for file in tmp_path.iterdir())
    assert sorted(file.name for file in there.iterdir()) == made
    assert filecmp.cmpfiles(there, tmp_path, made, shallow=False) == (made, [], []), "run `make manifests`"
    rules = (ROOT / "deploy" / "prometheus" / "rules.yml").read_text()
    assert (CHART / "files" / "rules.yml").read_text() == rules, "run `make manifests`"


# --- what the pods run --------------------------------------------------------------------------------------


class Pod(NamedTuple):
    role: str
    address: str
    container: dict
    process: psutil.Process

    def probed(self, probe):
        """The status of the answer to a probe; 0 if there is none."""
        asked = self.container[probe]["httpGet"]
        (port,) = [one["containerPort"] for one in self.container["ports"] if one["name"] == asked["port"]]
        try:
            return fetched(f"http://{self.address}:{port}{asked['path']}", timeout=PATIENCE_S).status
        except OSError:
            return 0


@contextlib.contextmanager
def pods(folder, documents):
    """A process for each replica, with the command, the variables and the files that its pod would have."""
    written = folder / "etc"
    written.mkdir()
    running = []

    def moved(text, own):
        """The paths of a pod as paths of this machine; the cache server's socket is on the node, which all
        share."""
        for path, here in (
            ("/etc/pd-cache", written),
            ("/run/pd-cache-file", own),
            ("/run/pd-cache/", f"{folder}/s/"),
        ):
            text = text.replace(path, str(here))
        return text

    (folder / "s").mkdir(mode=0o700)
    program = folder / "bin" / "pd-cache"  # this Python's, which need not have a script of that name
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m launch "$@"\n')
    program.chmod(0o755)
    for role, text in files(documents).items():
        (written / f"{role}.yaml").write_text(moved(text, folder))
    with contextlib.ExitStack() as stack:
        # masters end last: while none leads, Mooncake's clients ask etcd without a pause
        for _, workload in sorted(workloads(documents).items(), key=lambda one: one[0] != "master"):
            (container,) = workload["spec"]["template"]["spec"]["containers"]
            for index in range(workload["spec"].get("replicas", 1)):
                name, address = f"{workload['metadata']['name']}-{index}", f"127.0.7.{len(running) + 1}"
                own = folder / name
                own.mkdir()
                fields = {"metadata.name": name, "status.podIP": address}
                env = {
                    one["name"]: one["value"]
                    if "value" in one
                    else fields[one["valueFrom"]["fieldRef"]["fieldPath"]]
                    for one in container["env"]
                }
                env["PATH"] = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
                words = [*container["command"], *(moved(text, own) for text in container["args"])]
                process = Process(name, ["env", *(f"{key}={value}" for key, value in env.items()), *words])
                stack.callback(process.stop)
                running.append(
                    Pod(container["name"], address, container, psutil.Process(process.process.pid))
                )
        yield running


@needs_etcd
def test_the_commands_of_the_pods_are_a_cluster_whose_probes_answer_and_whose_second_prompt_hits(
    tmp_path, etcd
):
    """Every pod is started at once, as Kubernetes does; they find one another in etcd."""
    values = f"""
clusterName: rendered
etcd: {{endpoints: ["{etcd.endpoint}"]}}
config:
  transfer: {{staging_size: 8MiB}}
  cache: {{chunk_size: 64}}
  handoff: {{wait_ms: 2000}}
  proxy: {{direct_tokens: 0}}
  engine: {json.dumps(ENGINE)}
store: {{segmentSize: 64MiB}}
cacheServer: {{enabled: true}}
proxy: {{replicas: 1}}
"""
    documents = rendered(tmp_path, values)
    with pods(tmp_path, documents) as running:
        assert len(running) == 7, "two masters, and one pod of each other role"
        for probe in ("startupProbe", "readinessProbe"):
            for pod in running:
                assert pod.process.status() != psutil.STATUS_ZOMBIE, f"{pod.role} ended"
                wait_for(lambda pod=pod, probe=probe: pod.probed(probe) == 200, f"{pod.role}: {probe}")
        (proxy,) = [pod for pod in running if pod.role == "proxy"]
        prompt = list(range(300))

        def hit():
            answer = complete(f"http://{proxy.address}:8000", prompt)
            return answer.status == 200 and min(answer.cached) >= 256

        wait_for(hit, "a hit on both hops")
        ports = policy_of(documents)["ports"]
        allowed = {port for one in ports for port in range(one["port"], one.get("endPort", one["port"]) + 1)}
        for pod in running:
            family = (pod.process, *pod.process.children(recursive=True))
            sockets = [one for each in family for one in each.net_connections("tcp")]
            heard = {
                one.laddr.port for one in sockets if one.status == "LISTEN" and one.laddr.ip != "127.0.0.1"
            }
            assert heard <= allowed, f"{pod.role}: the NetworkPolicy keeps others from {heard - allowed}"


def test_the_containerfile_installs_what_the_wheel_needs_and_copies_what_make_wheel_leaves():
    """No test builds the image; docs/operations.md says how it was."""
    text = (ROOT / "deploy" / "container" / "Containerfile").read_text()
    needed = set(
        re.findall(r"\|\| echo (lib\w+)$", (ROOT / "tools" / "system-packages.sh").read_text(), re.MULTILINE)
    )
    assert {"libibverbs1", "libnuma1", "libcurl4"} == needed
    assert all(re.search(rf"apt-get install .*\b{package}\b", text) for package in needed)
    assert "COPY dist/pd_cache-*.whl" in text
    assert "-w dist" in (ROOT / "Makefile").read_text()
    chart = (CHART / "templates" / "_helpers.tpl").read_text()
    assert "USER 10001:10001" in text
    assert "runAsUser: 10001" in chart
