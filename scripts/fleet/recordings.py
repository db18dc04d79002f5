# SPDX-License-Identifier: MIT OR Apache-2.0
"""Recordings of a fleet: those of real kernels, rewritten as other hosts, each with a culprit of its own from a known time.

Each has a history of some hours with a tick every five minutes, and then minutes with a tick every five seconds, which an
exporter replays. Half of the hosts change at a deploy: once in the history, and once in the minutes.
"""

import functools
import hashlib
import json
import struct
import uuid
import zlib
from dataclasses import dataclass
from datetime import datetime, timezone

import zstandard

HOSTS = 49
HOUR_S = 3600
# Length and ticks of the history.
HISTORY_S = 3 * HOUR_S
HISTORY_TICK_S = 300
# Time of the deploy, after the start of the history. Hosts without it have their culprit from an earlier time on.
DEPLOY_S = 5400
# Length and ticks of the replayed part, and its deploy.
REPLAY_S = 420
TICK_S = 5
REPLAYED_DEPLOY_S = 150
# Delay that a culprit causes in a tick, in milliseconds: above and below the limit of the alert.
HEAVY_MS, LIGHT_MS = 600, 100
# Every host has this one.
BACKGROUND, BACKGROUND_MS = "agent", 25
# Number of culprits of the host that has more culprits than an exporter shows.
CROWD = 150
LIMITS = {"unmeasured": (45, 46), "lossy": (43, 44), "ends_early": (47,)}
ENDS_EARLY_S = 60


@functools.cache
def container(name):
    """The ID and the cgroup of a container."""
    number = hashlib.sha256(name.encode()).hexdigest()
    pod = uuid.uuid5(uuid.NAMESPACE_DNS, name)
    pod = f"kubepods-burstable-pod{str(pod).replace('-', '_')}.slice"
    return number, f"/kubepods.slice/kubepods-burstable.slice/{pod}/cri-containerd-{number}.scope"


def rfc3339(seconds):
    return datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


@dataclass
class Host:
    number: int

    @property
    def name(self):
        return f"host-{self.number:02}"

    @property
    def culprit(self):
        return f"hog{self.number:02}"

    @property
    def victim(self):
        return f"api{self.number:02}"

    @property
    def is_deployed(self):
        return self.number < HOSTS // 2

    @property
    def is_heavy(self):
        return self.number % 2 == 0

    @property
    def since_s(self):
        """When its culprit begins, after the start of the history."""
        return DEPLOY_S if self.is_deployed else HISTORY_TICK_S * (1 + self.number % 6)

    @property
    def replayed_since_s(self):
        """When its culprit resumes, after the start of the replayed part."""
        return REPLAYED_DEPLOY_S if self.is_deployed else 20 + TICK_S * (self.number % 3)


HOSTS_OF_FLEET = [Host(number) for number in range(HOSTS)]


def lines_of(path):
    """The lines of a recording."""
    with open(path, "rb") as file:
        text = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True).read()
    return [json.loads(line) for line in text.splitlines()]


def frame(lines, begin_s, end_s):
    """A frame of a recording after its index, as docs/recording.md describes both."""
    packed = zstandard.ZstdCompressor(level=3, write_checksum=True).compress("".join(lines).encode())
    begin_ns, end_ns = (round(seconds * 1e6) * 1000 for seconds in (begin_s, end_s))
    fields = struct.pack("<8sQQQII", b"whylate1", begin_ns, end_ns, len(packed), len(lines), zlib.crc32(packed))
    return struct.pack("<II", 0x184D2A5E, 48) + fields + struct.pack("<II", zlib.crc32(fields), 0) + packed


def line(of):
    return json.dumps(of, separators=(",", ":")) + "\n"


class Templates:
    """Ticks of a recording, as text into which host, time and late events are filled."""

    def __init__(self, path):
        lines = lines_of(path)
        self.header, self.clock = lines[0], lines[1]
        self.ticks = [[]]
        for one in lines[2:]:
            if "line" in one:
                continue
            if any(one["source"] == other["source"] for other in self.ticks[-1]):
                self.ticks.append([])
            one = {name: value for name, value in one.items() if name not in ("late", "host", "start", "duration_ns")}
            # Some series and the heaviest stacks are enough.
            one["series"], one["stacks"] = one["series"][:5], one.get("stacks", [])[:5]
            self.ticks[-1].append(one)
        self.text = [[(one["source"], one["lost"], self.without_head(one)) for one in tick] for tick in self.ticks]

    @staticmethod
    def without_head(one):
        rest = {name: value for name, value in one.items() if name not in ("schema", "source", "lost")}
        return json.dumps(rest, separators=(",", ":"))[1:]

    def tick(self, number, host, at_s, seconds, late, lost, without=()):
        """The snapshots of a tick. The history has only those with the culprits."""
        for source, template_lost, rest in self.text[number % len(self.text)]:
            if source in without or seconds > TICK_S and source != "offcpu":
                continue
            head = {
                "schema": 1, "source": source, "host": host, "start": rfc3339(at_s), "duration_ns": round(seconds * 1e9),
                "lost": template_lost | lost.get(source, {}), "late": late if source == "offcpu" else [],
            }
            yield json.dumps(head, separators=(",", ":"))[:-1] + "," + rest + "\n"


def late_event(at_s, cost_ms, culprit, tid, culprit_of, victim, victim_cgroup):
    """A thread that was ready to run and had to wait for another one."""
    ns = round(cost_ms * 1e6)
    container_id, cgroup = culprit_of
    cause = {"kind": "thread", "who": f"{culprit}:{tid}", "ns": ns - 50_000, "cgroup": cgroup}
    if container_id:
        cause["container"] = container_id
    return {
        "subject": f"{victim}:9100",
        "labels": {"cgroup": victim_cgroup, "pid": "9100", "process": victim, "thread": victim, "tid": "9100"},
        "at": rfc3339(at_s), "latency_ns": ns, "cpu": 1,
        "causes": [cause, {"kind": "irq", "who": "local_timer", "ns": 50_000}],
    }


def header(templates, name, start_s, every_s, unmeasured=()):
    of = dict(templates.header)
    sources = [one for one in of["sources"] if one["source"] not in unmeasured]
    of.update(
        host=name, start=rfc3339(start_s), boot_id=str(uuid.uuid5(uuid.NAMESPACE_DNS, name)), sources=sources,
        every_ns=every_s * 1_000_000_000,
    )
    of["unmeasured"] = [{"source": source, "reason": "left out of this recording"} for source in unmeasured]
    return line(of)


def clock(at_s, start_s):
    ns = round((1e6 + at_s - start_s) * 1e9)
    return line({"line": "clock", "at": rfc3339(at_s), "monotonic_ns": ns, "boottime_ns": ns})


def write(path, templates, host, start_s, replay_s):
    """Writes the recording of a host. Its history starts at `start_s`, and its replayed part at `replay_s`."""
    unmeasured = ("irqsoff",) if host.number in LIMITS["unmeasured"] else ()
    lost = {"wq": {"series_full": 200 * TICK_S}} if host.number in LIMITS["lossy"] else {}
    culprit_of, (_, victim_cgroup) = container(host.culprit), container(host.victim)
    length_s = ENDS_EARLY_S if host.number in LIMITS["ends_early"] else REPLAY_S
    ticks = []
    at_s = start_s
    while at_s < replay_s:
        seconds = min(HISTORY_TICK_S, replay_s - at_s)
        ticks.append((at_s, seconds, at_s - start_s >= host.since_s, 6))
        at_s += seconds
    for number in range(length_s // TICK_S):
        ticks.append((replay_s + number * TICK_S, TICK_S, number * TICK_S >= host.replayed_since_s, 2))
    with open(path, "wb") as file:
        file.write(frame([header(templates, host.name, start_s, TICK_S, unmeasured), clock(start_s, start_s)], start_s, start_s))
        lines, begin_s = [], start_s
        for number, (at_s, seconds, has_culprit, events) in enumerate(ticks):
            late = []
            if has_culprit:
                cost_ms = (HEAVY_MS if host.is_heavy else LIGHT_MS) * seconds / TICK_S / events
                for event in range(events):
                    ended_s = at_s + seconds * (event + 1) / (events + 1)
                    late.append(late_event(ended_s, cost_ms, host.culprit, 4100 + host.number, culprit_of, host.victim, victim_cgroup))
            cost_ms = BACKGROUND_MS * seconds / TICK_S
            background_of = ("", f"/system.slice/{BACKGROUND}.service")
            late.append(late_event(at_s + seconds * 0.99, cost_ms, BACKGROUND, 900, background_of, host.victim, victim_cgroup))
            lines += templates.tick(number, host.name, at_s, seconds, late, lost, unmeasured)
            if number % 2 == 1 or number + 1 == len(ticks):
                file.write(frame(lines, begin_s, at_s + seconds))
                lines, begin_s = [], at_s + seconds
        end_s = ticks[-1][0] + ticks[-1][1]
        file.write(frame([line({"line": "end", "at": rfc3339(end_s)})], end_s, end_s))


def write_crowd(path, templates, start_s):
    """Writes a recording with more culprits than an exporter shows. Different ones cause most in each tick."""
    with open(path, "wb") as file:
        file.write(frame([header(templates, "crowd", start_s, TICK_S), clock(start_s, start_s)], start_s, start_s))
        for number in range(REPLAY_S // TICK_S):
            at_s, late = start_s + number * TICK_S, []
            for one in range(CROWD):
                # Different culprits cause most in each tick, and some never do.
                cost_ms = 220 if (one - number * 30) % CROWD < 20 else 21
                of = container(f"crowd{one}")
                victim = container(f"crowd{(one + 1) % CROWD}")[1]
                late.append(late_event(at_s + 1 + one / 100, cost_ms, f"crowd{one}", 5000 + one, of, "api", victim))
            lines = list(templates.tick(number, "crowd", at_s, TICK_S, late, {}))
            file.write(frame(lines, at_s, at_s + TICK_S))
