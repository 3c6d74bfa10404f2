"""Whether a machine can carry its nodes: what `config check`, `launch`, `up` and `doctor` all ask."""

import resource
import socket
import sys
from pathlib import Path

import msgspec

from launch.cli import example_file
from pd_cache.cluster import (
    ClusterConfig,
    DecodeNode,
    EtcdDiscovery,
    MasterNode,
    ModelConfig,
    ProxyConfig,
    ProxyNode,
    RandomModel,
    ReferenceEngineConfig,
    ServerTlsConfig,
    Source,
    StoreNode,
    TlsConfig,
    VllmEngineConfig,
    load_config,
    machine,
)
from pd_cache.cluster.machine import local_nodes
from pd_cache.config import CacheConfig, LocalTier, MooncakeTier
from transfer.settings import TransferSettings

GIB = 1 << 30
ENGINE = ReferenceEngineConfig(model=ModelConfig(name="m", random=RandomModel()))
ELSEWHERE = "192.0.2.1"  # reserved for documentation: never an address of this machine


def cluster(*nodes, **sections):
    return ClusterConfig(
        nodes=(MasterNode(name="master", port=0, metrics_port=0), *nodes), engine=ENGINE, **sections
    )


def messages(config, root=Path("/")):
    source = Source(Path("c.yaml"), msgspec.to_builtins(config, enc_hook=str), {})
    return [
        str(source.error(problem)) for problem in machine.machine_problems(config, local_nodes(config), root)
    ]


def write(root, path, text):
    file = root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")


def test_a_machine_that_can_carry_the_nodes_has_no_problems_and_a_taken_port_is_named():
    assert messages(cluster(DecodeNode(name="a"), ProxyNode(name="p", port=0))) == []
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        (message,) = messages(cluster(DecodeNode(name="a", port=taken)))
    assert f"nodes[1].port: {taken}: another process uses this port of 127.0.0.1" in message
    config = cluster(DecodeNode(name="a", host=ELSEWHERE, port=8100))
    (problem,) = machine.machine_problems(config, config.nodes[1:])
    assert problem == (("nodes", 1, "host"), "is not an address of this machine")


def test_segments_staging_memory_and_tiers_of_all_nodes_must_fit_together(tmp_path):
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {64 << 20} kB")
    transfer = TransferSettings(segment_size="10GiB", staging_size="8GiB")
    cache = CacheConfig(tiers=(LocalTier(capacity="6GiB"), MooncakeTier()))
    nodes = [DecodeNode(name="a"), DecodeNode(name="b"), StoreNode(name="c", segment_size="20GiB")]
    assert messages(cluster(*nodes[:2], transfer=transfer, cache=cache), tmp_path) == []
    (message,) = messages(cluster(*nodes, transfer=transfer, cache=cache), tmp_path)
    assert message.endswith(
        "nodes[1]: the nodes of this host need 68.0 GiB (a 24.0 GiB, b 24.0 GiB, c 20.0 GiB), but it has 64.0 GiB (the machine)"
    )


def test_rdma_must_be_allowed_to_lock_what_a_node_registers(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "rdma_devices", lambda: ("mlx5_0",))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8 << 20, 8 << 20))
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {64 << 20} kB")
    store = StoreNode(name="s", segment_size=GIB)
    (message,) = messages(cluster(store, transfer=TransferSettings(protocol="rdma")), tmp_path)
    assert (
        "transfer.protocol: 'rdma': rdma locks memory: the limit is 8.0 MiB, but the largest process locks 1.0 GiB"
        in message
    )
    assert messages(cluster(store), tmp_path) == [], "tcp locks none"
    write(tmp_path, "proc/self/status", "CapEff:\t0000000000004000")
    assert messages(cluster(store, transfer=TransferSettings(protocol="rdma")), tmp_path) == []


def test_files_of_keys_and_certificates_that_are_not_here_are_named(tmp_path):
    tls = TlsConfig(ca_file=str(tmp_path / "ca"), cert_file=__file__, key_file=__file__)
    etcd = EtcdDiscovery(
        endpoints=("127.0.0.1:1",), user="u", password_file=str(tmp_path / "password"), tls=tls
    )
    proxy = ProxyConfig(
        api_keys_file=str(tmp_path / "keys"),
        monitor_keys_file=str(tmp_path / "monitors"),
        node_key_file=str(tmp_path / "key"),
        tls=ServerTlsConfig(cert_file="/nowhere", key_file=__file__),
    )
    told = messages(cluster(ProxyNode(name="p", port=0), proxy=proxy, discovery=etcd))
    assert [message.split(": ")[1] for message in told] == [
        "proxy.api_keys_file", "proxy.monitor_keys_file", "proxy.node_key_file", "proxy.tls.cert_file",
        "discovery.password_file", "discovery.tls.ca_file",
    ]  # fmt: skip
    assert all("does not exist on this machine, or cannot be read" in message for message in told)
    elsewhere = ClusterConfig(nodes=(ProxyNode(name="p", host=ELSEWHERE),), proxy=proxy, discovery=etcd)
    assert messages(elsewhere) == [], "they are needed where the nodes are"


def vllm(*nodes, model="m", **engine):
    given = {"executable": sys.executable, "model": str(model), **engine}
    master = MasterNode(name="master", port=0, metrics_port=0)
    return ClusterConfig(nodes=(master, *nodes), engine=VllmEngineConfig(**given))


def test_a_model_folder_needs_weights_and_a_name_that_may_not_be_downloaded_has_to_be_in_the_cache(
    tmp_path, monkeypatch
):
    node, folder = DecodeNode(name="d"), tmp_path / "model"
    write(folder, "config.json", "{}")
    (message,) = messages(vllm(node, model=folder))
    assert "engine.model: " in message
    assert "has no weights: no file that ends with .bin, .gguf, " in message
    assert messages(vllm(node, model=folder, args={"load-format": "dummy"})) == []
    write(folder, "model.safetensors", "")
    assert messages(vllm(node, model=folder)) == []

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    place = tmp_path / "hub" / "models--me--tiny"
    online, offline = vllm(node, model="me/tiny"), vllm(node, model="me/tiny", env={"HF_HUB_OFFLINE": "1"})
    assert (messages(online), machine.missing_model(online.engine)) == ([], place)
    (message,) = messages(offline)
    assert (
        f"'me/tiny': is neither a folder nor at {place}, and HF_HUB_OFFLINE forbids to download it" in message
    )
    write(place, "snapshots/0123/config.json", "{}")
    assert (messages(offline), machine.missing_model(online.engine)) == ([], None)


def test_nodes_of_vllm_on_one_gpu_must_not_want_more_than_all_of_its_memory(tmp_path, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable: {64 << 20} kB")
    here = [DecodeNode(name="a"), DecodeNode(name="b")]
    assert messages(vllm(*here), tmp_path) == [], "there is no GPU"
    for gpu in range(4):
        write(tmp_path, f"proc/driver/nvidia/gpus/{gpu}/information", "")
    (message,) = messages(vllm(*here), tmp_path)
    assert (
        "nodes[2]: a, b together want 180% of the memory of GPU 0 (gpu-memory-utilization); give each"
        in message
    )
    assert messages(vllm(*here, args={"gpu_memory_utilization": 0.45}), tmp_path) == []
    assert not [one for one in messages(load_config(example_file("vllm-local")), tmp_path) if "GPU" in one]
    first, second = ({"CUDA_VISIBLE_DEVICES": text} for text in ("0,1", "2,1"))
    apart = [DecodeNode(name="a", env=first), DecodeNode(name="b", env=second)]
    assert messages(vllm(*apart), tmp_path) == [], "each takes the first that it sees"
    assert "GPU 1" in messages(vllm(*apart, args={"tensor-parallel-size": 2}), tmp_path)[0]
    assert messages(vllm(here[0], DecodeNode(name="b", host=ELSEWHERE)), tmp_path) == []


def test_rdma_needs_devices_that_exist(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    monkeypatch.setattr(machine, "rdma_devices", lambda: ("mlx5_0",))
    config = cluster(transfer=TransferSettings(protocol="rdma", devices=("mlx5_0", "mlx5_7")))
    (message,) = messages(config)
    assert (
        "transfer.devices[1]: 'mlx5_7': is not an RDMA device of this machine; there are: mlx5_0" in message
    )
    monkeypatch.setattr(machine, "rdma_devices", lambda: ())
    assert "this machine has no RDMA device" in messages(config)[0]
