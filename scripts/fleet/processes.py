# SPDX-License-Identifier: MIT OR Apache-2.0
"""Programs of this run, all on the loopback interface, which end with it: exporters, Prometheus, and a kubelet's metrics."""

import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# How long a program may take to start, here and on a busy machine.
START_S = 300
# How long it may take to end before it is killed.
END_S = 60


def free_ports(number):
    """Returns distinct ports that are currently free."""
    sockets = [socket.socket() for _ in range(number)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


class Processes:
    """Started programs. Leaving the context ends them."""

    def __init__(self):
        self.started, self.have_ended = [], False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.have_ended = True
        for process in self.started:
            process.terminate()
        for process in self.started:
            self.wait(process)

    @staticmethod
    def wait(process):
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def start(self, command, **options):
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **options)
        self.started.append(process)
        return process

    def end(self, process):
        process.terminate()
        self.wait(process)
        self.started.remove(process)


class Exporter:
    """A `whylate … serve`."""

    def __init__(self, processes, command, address):
        self.address, self.said, self.served_at = address, b"", None
        listen = ["--listen", address, "--duration", "20m"]
        self.process = processes.start([*command, *listen], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self.serves = threading.Event()
        threading.Thread(target=self.read, daemon=True).start()

    def read(self):
        """Reads its output to the end, and records when it starts to serve."""
        for line in self.process.stderr:
            self.said = (self.said + line)[-10_000:]
            if b"serving at" in line:
                self.served_at = time.time()
                self.serves.set()
        self.serves.set()

    def await_start(self):
        self.serves.wait(START_S)
        if self.served_at is None:
            raise RuntimeError(f"an exporter does not serve: {self.said.decode(errors='replace')}")
        return self

    def get(self, path, accept="*/*"):
        request = urllib.request.Request(f"http://{self.address}{path}", headers={"Accept": accept})
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.read()


class Kubelet:
    """A kubelet's metrics of the pressure of containers, and those of kube-state-metrics of their pods."""

    def __init__(self, containers):
        began = time.time()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                waited = (time.time() - began) * 0.2
                lines = ["# TYPE container_pressure_cpu_waiting_seconds_total counter"]
                for name, (container_id, cgroup) in containers:
                    labels = f'container="{name}",id="{cgroup}",image="{name}:2",name="{container_id}",namespace="shop",pod="{name}-0"'
                    lines.append(f"container_pressure_cpu_waiting_seconds_total{{{labels}}} {waited:.3f}")
                lines.append("# TYPE kube_pod_info gauge")
                lines += [f'kube_pod_info{{namespace="shop",pod="{name}-0",node="node-of-{name}"}} 1' for name, _ in containers]
                body = ("\n".join(lines) + "\n").encode()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


class Prometheus:
    """A Prometheus that scrapes every two seconds."""

    def __init__(self, processes, program, directory, targets, rules):
        version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        version = re.search(r"version (\d+)\.(\d+)\.(\d+)", version.stdout + version.stderr)
        # One that `go install` has built, for which scripts/fleet/run pins the version, does not know it.
        self.name = f"Prometheus {version[1]}.{version[2]}" if version else "Prometheus 3"
        self.is_3 = not version or int(version[1]) >= 3
        self.directory = directory
        os.makedirs(directory)
        # Native histograms: a setting since 3.8, a feature before.
        native = "  scrape_native_histograms: true\n" if self.is_3 else ""
        jobs = []
        for job, of in targets.items():
            static = [{"targets": [address], "labels": {"instance": name}} for name, address in of.items()]
            jobs.append({"job_name": job, "static_configs": static})
        shutil.copy(rules, os.path.join(directory, "rules.yml"))
        with open(os.path.join(directory, "prometheus.yml"), "w") as file:
            file.write("global:\n  scrape_interval: 2s\n  scrape_timeout: 2s\n  evaluation_interval: 2s\n" + native)
            file.write("rule_files: [rules.yml]\n")
            # JSON is YAML.
            file.write("scrape_configs: " + json.dumps(jobs) + "\n")
        self.address = f"127.0.0.1:{free_ports(1)[0]}"
        features = "exemplar-storage" if self.is_3 else "native-histograms,exemplar-storage"
        self.log = open(os.path.join(directory, "log"), "w")
        self.process = processes.start(
            [
                program, f"--config.file={directory}/prometheus.yml", f"--storage.tsdb.path={directory}/data",
                f"--web.listen-address={self.address}", f"--enable-feature={features}", "--web.enable-admin-api",
            ],
            stdout=self.log, stderr=self.log,
        )

    def api(self, path, data=None, **parameters):
        url = f"http://{self.address}/api/v1/{path}"
        if parameters:
            url += "?" + urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(urllib.request.Request(url, data=data), timeout=60) as reply:
            return json.load(reply)["data"]

    def query(self, expression, at=None):
        """The result of an expression: the samples of a vector or a matrix."""
        at = {"time": at} if at else {}
        return self.api("query", query=expression, **at)["result"]

    def await_start(self):
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            try:
                self.api("status/buildinfo")
                return self
            except OSError:
                time.sleep(0.2)
        raise RuntimeError(f"{self.name} does not start (see {self.log.name})")
