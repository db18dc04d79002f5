# SPDX-License-Identifier: MIT OR Apache-2.0
"""A fleet of 50 exporters and 50 recordings, of which 49 have a known culprit, and the engines that have to find it.

usage: fleet.py WHYLATE DIRECTORY PROMETHEUS...

Everything is on the loopback interface and below DIRECTORY, and ends with this program. scripts/fleet/run calls it.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import stores
from checks import WINDOW_S, Checks, OfPrometheus, OfStore, faster_rules
from page import Page
from processes import Exporter, Kubelet, Processes, Prometheus, free_ports
from recordings import (
    HISTORY_S, HOSTS, HOSTS_OF_FLEET, HOUR_S, REPLAYED_DEPLOY_S, TICK_S, Templates, container, rfc3339, write, write_crowd,
)

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
RECORDED = os.path.join(ROOT, "crates/whylate/tests/recordings")
PACKAGED = os.path.join(ROOT, "packaging/prometheus")
# No run takes longer.
MOST_S = 1500
# Time from the start until the exporter of the crowd is restarted, in seconds.
RESTART_S = 90


@dataclass
class Run:
    """Times of the events of a run, and what the checks need."""

    history_at: float
    replay_at: float
    dashboard: str
    served_at: dict = field(default_factory=dict)
    deployed_at: tuple = ()
    restarted: tuple = ()
    quantiles: dict = field(default_factory=dict)
    at: float = 0.0


def make_recordings(directory, templates):
    """Writes the recordings. Returns their paths, and the start times of their history and of their replayed part."""
    os.makedirs(directory)
    # The replayed part starts at about the time when the exporters start.
    began = time.time()
    history_at = (began // HOUR_S) * HOUR_S - HISTORY_S
    write(os.path.join(directory, "host-00.whylate"), templates, HOSTS_OF_FLEET[0], history_at, began)
    replay_at = round(time.time() + (time.time() - began) * (HOSTS + 5) + 5)
    paths = {}
    for host in HOSTS_OF_FLEET:
        paths[host.name] = os.path.join(directory, f"{host.name}.whylate")
        write(paths[host.name], templates, host, history_at, replay_at)
    return paths, history_at, replay_at


def overview_quantiles(whylate, recording):
    """The quantiles of a recording by whylate itself, in seconds by source."""
    printed = subprocess.run([whylate, "replay", recording, "--json"], capture_output=True, check=True, stdin=subprocess.DEVNULL)
    of_sources = json.loads(printed.stdout)["sources"]
    # The quantile of few latencies depends on how it is interpolated.
    return {
        of["source"]: {"0.5": of["p50_ns"] / 1e9, "0.99": of["p99_ns"] / 1e9}
        for of in of_sources if of.get("count", 0) >= 500
    }


def sleep_until(at):
    time.sleep(max(0.0, at - time.time()))


def samples_of(text):
    return sum(1 for line in text.splitlines() if line and not line.startswith(b"#"))


def figures(exporters, live, directory, recordings, prometheuses, exported):
    """Prints the figures on which the estimates in docs/fleet.md are based."""
    print("\nfigures:")
    for name, exporter in [("a host of the fleet", exporters["host-00"]), ("this machine", live)]:
        if exporter is None:
            continue
        text = exporter.get("/metrics", "text/plain")
        protobuf = exporter.get("/metrics", "application/vnd.google.protobuf;encoding=delimited")
        print(f"    {name}: {samples_of(text)} samples as text, a scrape has {len(text)} bytes as text, {len(protobuf)} as protobuf")
    for prometheus in prometheuses:
        for name in ["host-00", "live"]:
            series = prometheus.query(f'count({{job="whylate",instance="{name}"}})')
            if series:
                print(f"    {prometheus.name}: {series[0]['value'][1]} series of {name}")
        name = prometheus.api("admin/tsdb/snapshot", data=b"")["name"]
        sizes, samples, series = {"chunks": 0, "index": 0}, 0, 0
        for key, path in stores.files(os.path.join(prometheus.directory, "data/snapshots", name)):
            if key.endswith("meta.json"):
                with open(path) as file:
                    stats = json.load(file)["stats"]
                samples, series = samples + stats["numSamples"], series + stats["numSeries"]
            for part in sizes:
                sizes[part] += os.path.getsize(path) if f"/{part}" in key else 0
        print(f"    {prometheus.name}: {samples} samples of {series} series have {sizes['chunks']} bytes, their index {sizes['index']}")
        began = time.monotonic()
        prometheus.query("topk(10, sum by (who, kind) (increase(whylate_caused_seconds_total[10m])))")
        print(f"    {prometheus.name}: culprits of {HOSTS} hosts in {time.monotonic() - began:.3f} s")
    rows = {"recordings": [os.path.getsize(path) for path in recordings], "Parquet": [os.path.getsize(path) for _, path in stores.files(directory)]}
    for name, sizes in rows.items():
        print(f"    {name}: {len(sizes)} files, {sum(sizes)} bytes")
    print(f"    export: {exported:.1f} s for {len(recordings)} recordings, one after the other")


def prometheus_part(checks, prometheuses, page, run):
    for prometheus in prometheuses:
        OfPrometheus(checks, prometheus, page, run).all()


def store_part(checks, processes, page, run, directory, parquet):
    store = stores.ObjectStore(processes, os.path.join(directory, "moto.log"))
    objects, size = store.put(parquet)
    print(f"\n{objects} objects, {size} bytes are in the store")
    for engine in [stores.DuckDb(parquet), stores.ClickHouse(store)]:
        began = time.monotonic()
        OfStore(checks, engine, page, run).all()
        print(f"    {engine.name}: {time.monotonic() - began:.1f} s for its queries")


def run_fleet(whylate, directory, programs):
    checks, page = Checks(), Page(os.path.join(ROOT, "docs/fleet.md"))
    templates = Templates(os.path.join(RECORDED, "sources-6.18.whylate"))
    recordings, history_at, replay_at = make_recordings(os.path.join(directory, "recordings"), templates)
    run = Run(history_at, replay_at, os.path.join(PACKAGED, "grafana-dashboard.json"))
    crowd = os.path.join(directory, "crowd.whylate")
    write_crowd(crowd, templates, replay_at)
    quantiles = os.path.join(RECORDED, "late-6.18.whylate")
    run.quantiles = overview_quantiles(whylate, quantiles)
    live_recording = os.path.join(directory, "live.whylate")
    replay = [whylate, "replay", "--speed", "1"]
    commands = {name: [*replay, "--from", rfc3339(replay_at), path, "serve"] for name, path in recordings.items()}
    if os.geteuid() == 0:
        commands["live"] = [whylate, "serve", "--every", f"{TICK_S}s", "--record", live_recording]
    commands["crowd"] = [*replay, crowd, "serve"]
    commands["quantiles"] = [whylate, "replay", "--speed", "1000000", quantiles, "serve"]
    addresses = {name: f"127.0.0.1:{port}" for name, port in zip(commands, free_ports(len(commands)))}
    with ThreadPoolExecutor(1) as background, Processes() as processes:
        containers = [(name, container(name)) for host in HOSTS_OF_FLEET for name in (host.culprit, host.victim)]
        others = ("crowd", "quantiles")
        targets = {
            "whylate": {name: address for name, address in addresses.items() if name not in others},
            "others": {name: addresses[name] for name in others},
            "kubelet": {"kubelet": Kubelet(containers).address},
        }
        rules = os.path.join(directory, "rules.yml")
        with open(rules, "w") as file:
            file.write(faster_rules(os.path.join(PACKAGED, "rules.yml")))
        prometheuses = [
            Prometheus(processes, program, os.path.join(directory, f"prometheus{number}"), targets, rules)
            for number, program in enumerate(programs)
        ]
        # They scrape from the start of the exporters.
        for prometheus in prometheuses:
            prometheus.await_start()
        sleep_until(replay_at)
        exporters = {name: Exporter(processes, command, addresses[name]) for name, command in commands.items()}
        for name, exporter in exporters.items():
            # The exporter of this machine attaches to the kernel, which takes longer.
            if name != "live":
                exporter.await_start()
        live = exporters.get("live")
        run.served_at = {host.name: exporters[host.name].served_at for host in HOSTS_OF_FLEET}
        deploys = [run.served_at[host.name] + REPLAYED_DEPLOY_S for host in HOSTS_OF_FLEET]
        run.deployed_at = min(deploys), max(deploys)
        print(f"{HOSTS} exporters serve after {time.time() - replay_at:.0f} s", flush=True)
        # Concurrently, the recordings are exported as Parquet.
        parquet = os.path.join(directory, "fleet.parquet")
        exported = background.submit(stores.export, processes, whylate, list(recordings.values()), parquet)

        sleep_until(max(run.served_at.values()) + RESTART_S)
        ended_at = time.time()
        processes.end(exporters["crowd"].process)
        restarted = Exporter(processes, commands["crowd"], addresses["crowd"]).await_start()
        run.restarted = ended_at, restarted.served_at

        sleep_until(run.deployed_at[1] + WINDOW_S + 3 * TICK_S)
        if live:
            live.await_start()
        run.at = time.time()
        print(f"\n{run.at - replay_at:.0f} s have been scraped")
        prometheus_part(checks, prometheuses, page, run)
        for is_3, name, why in [(True, "Prometheus 3", "it is not built: there is no go, or its build failed"), (False, "Prometheus 2", "Debian's is neither installed nor unpacked")]:
            if not any(prometheus.is_3 == is_3 for prometheus in prometheuses):
                checks.skip(name, why)
        if live:
            checks.attempt("this machine has data", lambda: "" if b"whylate_caused_seconds_total" in live.get("/metrics") else "none")
        else:
            checks.skip("this machine", "it needs root")
        figures(exporters, live, parquet, list(recordings.values()), prometheuses, exported.result())
        if live:
            live.process.send_signal(signal.SIGINT)
            Processes.wait(live.process)
            alone = os.path.join(directory, "live.parquet")
            stores.export(processes, whylate, [live_recording], alone)
            size = sum(os.path.getsize(path) for _, path in stores.files(alone))
            ticks = (os.path.getmtime(live_recording) - live.served_at) / TICK_S
            print(f"    this machine: {ticks:.0f} ticks of {TICK_S} s, recording {os.path.getsize(live_recording)} bytes, Parquet {size} bytes")
            stores.export(processes, whylate, [live_recording], parquet)
    with Processes() as processes:
        store_part(checks, processes, page, run, directory, parquet)
    for query in sorted(set(page.queries) - page.executed):
        checks.check(f"the query {query} of docs/fleet.md is executed", False)
    return checks


def main():
    whylate, directory, *programs = sys.argv[1:]
    # Connections to the loopback interface use no proxy.
    for name in [name for name in os.environ if re.fullmatch(r"(https?|all)_proxy", name, re.I)]:
        del os.environ[name]
    # On a signal, or if the run takes too long, ends the programs that it has started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("fleet: it takes too long"))
    signal.alarm(MOST_S)
    checks = run_fleet(whylate, directory, programs)
    found = {engine: checks.found.get(engine, 0) for engine in ("PromQL", "ClickHouse", "DuckDB")}
    print()
    print(", ".join(f"{engine} {number} of {HOSTS}" for engine, number in found.items()))
    print(f"{checks.passed} passed, {checks.failed} failed, {checks.skipped} skipped")
    sys.exit(0 if checks.failed == 0 and set(found.values()) == {HOSTS} else 1)


main()
