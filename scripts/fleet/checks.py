# SPDX-License-Identifier: MIT OR Apache-2.0
"""Checks of a Prometheus and of a store that have the recordings of the fleet."""

import json
import re
from datetime import datetime, timezone

from recordings import CROWD, DEPLOY_S, HEAVY_MS, HOSTS, HOSTS_OF_FLEET, LIMITS, TICK_S

# Largest error of a quantile: half a bucket of Prometheus and one of whylate.
MAX_ERROR = 0.13
# Maximum delay between a culprit's first tick and the scrape that shows it.
LATE_BY_S = 15
COUNTERS = "whylate_.*_total|whylate_wait_seconds(_count|_sum|_bucket)?"
# An exporter shows 100 culprits, and all others as one series.
MAX_SERIES = 101
WINDOW_S = 40


class Checks:
    """Counts passed, failed and skipped checks."""

    def __init__(self):
        self.passed, self.failed, self.skipped = 0, 0, 0
        self.found = {}

    def check(self, name, holds, why=""):
        if holds:
            self.passed += 1
        else:
            self.failed += 1
        print(f"{'ok    ' if holds else 'FAILED'} {name}{'' if holds or not why else f': {why}'}", flush=True)

    def skip(self, name, why):
        self.skipped += 1
        print(f"skipped {name}: {why}", flush=True)

    def attempt(self, name, check):
        """Runs a check, which returns the reason if it fails."""
        try:
            why = check()
        except Exception as error:  # A check that cannot be made has failed, and others go on.
            why = f"{type(error).__name__}: {error}"
        self.check(name, not why, str(why)[:500])

    def found_by(self, engine, number):
        """Keeps the lowest number of hosts for which an engine has found the culprit."""
        self.found[engine] = min(number, self.found.get(engine, HOSTS))


def difference(found, expected):
    missing, more = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    return f"missing: {missing}, unexpected: {more}" if missing or more else ""


def of_fleet(results, label="instance"):
    """Returns the results for the hosts of the fleet: the culprits of this machine are not known."""
    names = {host.name for host in HOSTS_OF_FLEET}
    return [result for result in results if result["metric"].get(label) in names]


def panels(dashboard):
    with open(dashboard) as file:
        for panel in json.load(file)["panels"]:
            for target in panel.get("targets", []):
                expression = target["expr"]
                for name, value in [("$__rate_interval", f"{WINDOW_S}s"), ("$instance", ".*"), ("$job", "whylate")]:
                    expression = expression.replace(name, value)
                yield panel["title"], expression


def faster_rules(path):
    """The rules, with times for a run of minutes. rules-test.yml tests them with the times of a fleet."""
    with open(path) as file:
        text = file.read()
    times = [("[5m]", f"[{WINDOW_S}s]"), ("for: 10m", "for: 10s"), ("for: 15m", "for: 10s"), ("for: 5m", "for: 10s"), ("> 120", "> 45")]
    for time, faster in times:
        if time not in text:
            raise RuntimeError(f"{path} has no {time}")
        text = text.replace(time, faster)
    return text


ALERTS = {
    # In the last seconds, only heavy culprits exceed the limit of this alert.
    "WhylateLate": [host.name for host in HOSTS_OF_FLEET if host.is_heavy],
    "WhylateStale": [f"host-{number:02}" for number in LIMITS["ends_early"]],
    "WhylateSourceMissing": [f"host-{number:02}" for number in LIMITS["unmeasured"]],
    # All are up. rules-test.yml has one that is not.
    "WhylateDown": [],
    "WhylateLosesEvents": [f"host-{number:02}" for number in LIMITS["lossy"]],
}
RECORDED = ["whylate:caused_seconds:rate5m", "whylate:late_seconds:rate5m"]


class OfPrometheus:
    """Checks of one Prometheus, at a time `at` by which the exporters had run for long enough."""

    def __init__(self, checks, prometheus, page, run):
        self.checks, self.prometheus, self.page, self.run = checks, prometheus, page, run
        self.query = prometheus.query

    def all(self):
        name, attempt = self.prometheus.name, self.checks.attempt
        attempt(f"{name}: all targets are up", self.targets)
        for title, expression in panels(self.run.dashboard):
            attempt(f"{name}: panel {title}", lambda expression=expression: self.has_data(expression))
        for rule in RECORDED:
            attempt(f"{name}: rule {rule}", lambda rule=rule: self.covers(rule))
        for alert, hosts in ALERTS.items():
            attempt(f"{name}: alert {alert}", lambda alert=alert, hosts=hosts: self.fires(alert, hosts))
        attempt(f"{name}: the culprit of each host", self.culprits)
        attempt(f"{name}: the time of each culprit", self.times)
        attempt(f"{name}: the hosts that changed at the deploy", self.deploy)
        attempt(f"{name}: the culprits of the fleet", self.top)
        attempt(f"{name}: pods under pressure and who delays them", self.pods)
        attempt(f"{name}: native and classic quantiles", self.quantiles)
        attempt(f"{name}: counters do not fall", self.counters)
        attempt(f"{name}: counters do not fall in overflow, and start again after a restart", self.overflow)

    def has_data(self, expression):
        return "" if self.query(expression, self.run.at) else f"no data: {expression}"

    def targets(self):
        down = [target["labels"]["instance"] for target in self.prometheus.api("targets")["activeTargets"] if target["health"] != "up"]
        count = len(self.query('up{job="whylate"} == 1'))
        return f"down: {down}, {count} are up" if down or count < HOSTS + 1 else ""

    def covers(self, rule):
        results = of_fleet(self.query(rule))
        return difference({result["metric"]["instance"] for result in results}, [host.name for host in HOSTS_OF_FLEET])

    def fires(self, alert, hosts):
        results = of_fleet(self.query(f'ALERTS{{alertname="{alert}",alertstate="firing"}}'))
        return difference({result["metric"]["instance"] for result in results}, hosts)

    def culprits(self):
        query = self.page.query("Prometheus", "hosts", ("[1h]", "[10m]"))
        found = {result["metric"]["instance"]: result["metric"]["who"] for result in of_fleet(self.query(query))}
        wrong = {host.name: found.get(host.name) for host in HOSTS_OF_FLEET if found.get(host.name) != host.culprit}
        self.checks.found_by("PromQL", HOSTS - len(wrong))
        return f"wrong: {wrong}" if wrong else ""

    def times(self):
        wrong, seen = {}, 0
        for result in of_fleet(self.query('whylate_caused_seconds_total{who=~"hog.*"}[10m]')):
            host = HOSTS_OF_FLEET[int(result["metric"]["instance"].removeprefix("host-"))]
            late_by_s = float(result["values"][0][0]) - self.run.served_at[host.name] - host.replayed_since_s
            seen += result["metric"]["who"] == host.culprit
            if result["metric"]["who"] == host.culprit and not -2 <= late_by_s <= LATE_BY_S:
                wrong[host.name] = round(late_by_s, 1)
        return f"{seen} seen, too late by seconds: {wrong}" if wrong or seen < HOSTS else ""

    def deploy(self):
        # Exporters do not start simultaneously: the first ones reach the deploy before the last ones.
        first_at, last_at = self.run.deployed_at
        later_s = round(last_at - first_at) + WINDOW_S + TICK_S
        query = self.page.query(
            "Prometheus", "deploy", ("[30m]", f"[{WINDOW_S}s]"), ("offset -30m", f"offset -{later_s}s"),
            ("@ 1795701600", f"@ {round(first_at) - 1}"),
        )
        found = [result["metric"]["instance"] for result in of_fleet(self.query(query))]
        return difference(found, [host.name for host in HOSTS_OF_FLEET if host.is_deployed])

    def top(self):
        # Without this machine: its culprits are not known.
        of_fleet_alone = ('{who!="(other culprits)"}', '{who!="(other culprits)",instance=~"host-.*"}')
        query = self.page.query("Prometheus", "culprits", ("[1h]", "[10m]"), of_fleet_alone)
        found = {result["metric"]["who"] for result in self.query(query)}
        heavy = {host.culprit for host in HOSTS_OF_FLEET if host.is_heavy}
        return "" if len(found & heavy) == 9 and "agent" in found else f"not the heavy culprits and agent: {found}"

    def pods(self):
        found = self.query(self.page.query("Prometheus", "pods", ("[5m]", f"[{WINDOW_S}s]")), self.run.at)
        of_culprit = [(metric, metric["who"]) for metric in (result["metric"] for result in found)]
        wrong = [metric for metric, who in of_culprit if (metric["pod"], metric["node"]) != (f"{who}-0", f"node-of-{who}")]
        return "" if len(found) == 10 and not wrong else f"{len(found)} pods, wrong: {wrong}"

    def quantiles(self):
        wrong, compared = [], 0
        for source, of in self.run.quantiles.items():
            for quantile, seconds in of.items():
                native = f'histogram_quantile({quantile}, whylate_wait_seconds{{instance="quantiles",source="{source}"}})'
                found = self.query(native)
                error = abs(float(found[0]["value"][1]) / seconds - 1) if found else None
                compared += 1
                if error is None or error > MAX_ERROR:
                    wrong.append((source, quantile, error))
        return "" if compared >= 4 and not wrong else f"{compared} compared, wrong: {wrong}"

    def counters(self):
        # resets() drops the name of the metric, so each query is for one metric.
        names = [name for name in self.prometheus.api("label/__name__/values") if re.fullmatch(COUNTERS, name)]
        counters, fell = 0, {}
        for name in names:
            resets = self.query(f'resets({name}{{instance=~"host-.*"}}[10m])')
            counters += len(resets)
            fell |= {name: result["metric"] for result in resets if float(result["value"][1]) > 0}
        return f"{counters} counters, of which fell: {fell}" if fell or counters < 1000 else ""

    def overflow(self):
        series = self.query(f'{{__name__=~"{COUNTERS}",instance="crowd"}}[10m]')
        ended_at, served_at = self.run.restarted
        fell = restarted = 0
        for one in series:
            values = one.get("values", [])
            for (before_at, before), (after_at, after) in zip(values, values[1:]):
                if float(after) < float(before):
                    is_restart = before_at <= ended_at + 1 and after_at >= served_at - 1
                    restarted += is_restart
                    fell += not is_restart
        crowd = self.query('max_over_time(count(whylate_caused_seconds_total{instance="crowd"})[10m:2s])')
        pairs = self.query('max_over_time(count(whylate_stalled_seconds_total{instance="crowd"})[10m:2s])')
        overflow = self.query('min(whylate_series_overflow_total{instance="crowd"})')
        shown = [int(result["value"][1]) for result in crowd + pairs]
        names = {one["metric"].get("who") for one in series} - {None}
        problems = []
        if fell or not restarted:
            problems.append(f"{fell} falls, {restarted} at the restart")
        if not shown or max(shown) > MAX_SERIES or min(shown) < MAX_SERIES - 1:
            problems.append(f"{shown} series at a time")
        if not MAX_SERIES < len(names) <= CROWD + 10:
            problems.append(f"{len(names)} culprits were shown: places must change")
        if not overflow or float(overflow[0]["value"][1]) <= 0:
            problems.append(f"no overflow is counted: {overflow}")
        return ", ".join(problems)


def seconds_of(time):
    """A time of DuckDB or ClickHouse, in seconds since 1970."""
    time = datetime.fromisoformat(time) if isinstance(time, str) else time
    return time.replace(tzinfo=timezone.utc).timestamp()


class OfStore:
    """Checks of an SQL engine."""

    def __init__(self, checks, engine, page, run):
        self.checks, self.engine, self.page, self.run = checks, engine, page, run
        self.started = datetime.fromtimestamp(run.history_at, timezone.utc)

    def rows(self, name, *replaced):
        day = ("2026-11-26'", f"{self.started:%Y-%m-%d}'")
        query = self.page.query(self.engine.name, name, self.engine.replaced, *replaced, day)
        return self.engine.rows(query)

    def all(self):
        name, attempt = self.engine.name, self.checks.attempt
        attempt(f"{name}: the culprit of each host, and since when", self.culprits)
        attempt(f"{name}: the culprits of the fleet by hour", self.by_hour)
        attempt(f"{name}: the hosts that changed at the deploy", self.deploy)

    def culprits(self):
        rows = {row["host"]: row for row in self.rows("hosts")}
        wrong = {}
        for host in HOSTS_OF_FLEET:
            row = rows.get(host.name)
            since_s = seconds_of(row["since"]) - self.run.history_at - host.since_s if row else None
            # Its first late event is in the first tick.
            if not row or row["culprit"] != host.culprit or not 0 <= since_s <= 300:
                wrong[host.name] = (row, since_s)
        self.checks.found_by(self.engine.name, HOSTS - len(wrong))
        return f"wrong: {wrong}" if wrong else ""

    def by_hour(self):
        rows = self.rows("culprits")
        hours = sorted({str(row["hour"]) for row in rows})
        # A whole hour after the deploy: every heavy culprit has cost the same, and the top ten are some of them.
        second = [row for row in rows if str(row["hour"]) == hours[2]] if len(hours) >= 4 else []
        heavy = {host.culprit for host in HOSTS_OF_FLEET if host.is_heavy}
        expected_s = HEAVY_MS / 1000 / TICK_S * 3600
        problems = [row for row in second if row["culprit"] not in heavy | {"agent"} or row["culprit"] in heavy and abs(float(row["seconds"]) / expected_s - 1) > 0.02]
        return "" if len(second) == 10 and not problems else f"hours {hours}, rows {second}, wrong: {problems}"

    def deploy(self):
        at = datetime.fromtimestamp(self.run.history_at + DEPLOY_S, timezone.utc)
        rows = self.rows("deploy", ("2026-11-26 14:00:00", f"{at:%Y-%m-%d %H:%M:%S}"))
        found = [row["host"] for row in rows if row["host"].startswith("host-")]
        return difference(found, [host.name for host in HOSTS_OF_FLEET if host.is_deployed])
