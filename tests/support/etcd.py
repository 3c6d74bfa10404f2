"""A real etcd for tests: on ports of its own, with or without users and TLS, to be stopped and started
again."""

import shutil
import subprocess
from contextlib import closing

from launch.discovery.etcd import load_etcd3, prefix_of
from launch.run.supervise import spawn_child
from pd_cache.cluster import EtcdDiscovery
from tests.support.pool import free_port
from tests.support.waiting import wait_for

USER, PASSWORD = "pd-cache", "pass:word"


class Etcd:
    """One member; its data survive `stop` and `start`, unless `wipe` is called between them."""

    def __init__(self, folder, *, tls=None, server=("", ""), host=None):
        """Nothing is started yet. `server`: certificate and key, where there is `tls` for clients."""
        self._host = host
        self._address = "127.0.0.1" if host is None else host.address
        self.port, self._peer_port = free_port(), free_port()
        self._data = folder / f"etcd-{self.port}"
        self._folder = folder
        self.tls, self._server = tls, server
        self.process = None
        self.user = None

    @property
    def endpoint(self):
        return f"{self._address}:{self.port}"

    def start(self):
        scheme = "https" if self.tls else "http"
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            "etcd",
            f"--data-dir={self._data}",
            f"--listen-client-urls={scheme}://{self.endpoint}",
            f"--advertise-client-urls={scheme}://{self.endpoint}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            # where a machine is busy, the usual login takes longer than its deadline, again and again
            "--bcrypt-cost=4",
        ]
        if self.tls is not None:
            cert, key = self._server
            command += [f"--cert-file={cert}", f"--key-file={key}"]
            if self.tls.cert_file:
                command += [f"--trusted-ca-file={self.tls.ca_file}", "--client-cert-auth"]
        if self._host is not None:
            command = [*self._host.inside(*command)]
        self.process = spawn_child(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(self._answers, "etcd answering")
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self):
        """SIGKILL: what an etcd that goes away does to those that talk to it."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def send(self, number):
        self.process.send_signal(number)

    def wipe(self):
        """What an etcd on a new disk knows."""
        shutil.rmtree(self._data)

    def settings(self, **changes):
        """Its section of the cluster's file."""
        options = {"endpoints": (self.endpoint,), "ttl_s": 2, "tls": self.tls}
        if self.user is not None:
            options |= {"user": self.user, "password_file": str(self._folder / "password")}
        return EtcdDiscovery(**{**options, **changes})

    def client(self):
        """A bare client."""
        tls = self.tls
        files = {"ca_cert": tls.ca_file, "cert_cert": tls.cert_file, "cert_key": tls.key_file} if tls else {}
        return load_etcd3().client(port=self.port, host=self._address, timeout=60, **files)

    def enable_users(self, cluster):
        """From now on only `USER` may do something, and only with what pd-cache keeps for `cluster`."""
        load_etcd3()
        from etcd3 import etcdrpc, utils

        (self._folder / "password").write_text(PASSWORD + "\n")
        prefix = prefix_of(cluster).encode()
        with closing(self.client()) as client:
            auth = etcdrpc.AuthStub(client.channel)
            from etcd3.etcdrpc import auth_pb2

            everything = {"key": prefix, "range_end": utils.increment_last_byte(prefix)}
            allowed = auth_pb2.Permission(permType=auth_pb2.Permission.READWRITE, **everything)
            auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name="nodes"))
            auth.RoleGrantPermission(etcdrpc.AuthRoleGrantPermissionRequest(name="nodes", perm=allowed))
            for user, role in (("root", "root"), (USER, "nodes")):
                auth.UserAdd(etcdrpc.AuthUserAddRequest(name=user, password=PASSWORD))
                auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role=role))
            auth.AuthEnable(etcdrpc.AuthEnableRequest())
        self.user = USER

    def _answers(self):
        assert self.process.poll() is None, "etcd ended"
        etcd3 = load_etcd3()
        import grpc

        with closing(self.client()) as client:
            try:
                client.get("/")
            except etcd3.Etcd3Exception:
                return False
            except grpc.RpcError:
                return True  # it wants to know who asks
        return True


def make_certificates(folder):
    """Certificate and key, in files, by whom they are of: `ca`, and signed by it `server` (for 127.0.0.1) and
    `client`."""
    pairs = {
        name: (str(folder / f"{name}.pem"), str(folder / f"{name}.key"))
        for name in ("ca", "server", "client")
    }

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=180)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca, ca_key = pairs["ca"]
    # from Python 3.13 on, TLS asks for both of these, as RFC 5280 does
    signs = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
    signed = "authorityKeyIdentifier=keyid\n"
    openssl("req", "-x509", *key, "-keyout", ca_key, "-out", ca, "-days", "2", "-subj", "/CN=test ca", *signs)
    for name, usage in (("server", "serverAuth,clientAuth"), ("client", "clientAuth")):
        cert, its_key = pairs[name]
        request, extensions = str(folder / f"{name}.csr"), folder / f"{name}.ext"
        extensions.write_text(
            f"subjectAltName=IP:127.0.0.1,DNS:localhost\nextendedKeyUsage={usage}\n{signed}"
        )
        openssl("req", *key, "-keyout", its_key, "-out", request, "-subj", f"/CN={name}")
        openssl(
            "x509", "-req", "-in", request, "-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-days", "2",
            "-extfile", str(extensions), "-out", cert,
        )  # fmt: skip
    return pairs
