// SPDX-License-Identifier: MIT OR Apache-2.0
//! A real Prometheus reads the metrics: its checker finds no fault, and its quantiles are those of `whylate replay`.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::RECORDING;
use crate::client::{Received, Served, get};
use crate::crowd;
use crate::running::whylate;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Largest error of a quantile: half a bucket of Prometheus and one of whylate.
const MAX_ERROR: f64 = 0.13;

/// Returns the path of one of Prometheus' programs: installed, or unpacked by scripts/install-deps.
fn program(name: &str) -> Option<PathBuf> {
    let unpacked = Path::new(env!("CARGO_TARGET_TMPDIR")).join("../tools/usr/bin");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let path = std::env::split_paths(&path).chain([unpacked]).map(|directory| directory.join(name));
    path.into_iter().find(|path| path.exists())
}

fn has_prometheus() -> bool {
    let has = program("prometheus").is_some() && program("promtool").is_some();
    if !has {
        println!("skipped: there is no prometheus");
    }
    has
}

fn tool(name: &str) -> Command {
    Command::new(program(name).unwrap_or_default())
}

/// A Prometheus of this test, which ends with it.
struct Prometheus {
    process: Child,
    address: String,
    _directory: tempfile::TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Prometheus {
    /// Scrapes the exporter every second.
    fn scraping(served: &Served) -> Result<Self> {
        Self::scraping_all(&[("whylate", &served.address)], "1s")
    }

    /// Scrapes these jobs, of one target each.
    fn scraping_all(jobs: &[(&str, &str)], interval: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let config = directory.path().join("prometheus.yml");
        let jobs = jobs
            .iter()
            .map(|(job, target)| format!("  - {{job_name: {job}, static_configs: [{{targets: ['{target}']}}]}}\n"));
        let jobs: String = jobs.collect();
        fs::write(&config, format!("global: {{scrape_interval: {interval}}}\nscrape_configs:\n{jobs}"))?;
        // A port that is free now.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
        let process = tool("prometheus")
            .arg(format!("--config.file={}", config.display()))
            .arg(format!("--storage.tsdb.path={}", directory.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .arg("--enable-feature=native-histograms,exemplar-storage")
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Prometheus { process, address, _directory: directory })
    }

    fn get(&self, path: &str) -> Result<Value> {
        let mut stream = std::net::TcpStream::connect(&self.address)?;
        stream.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes())?;
        let mut received = String::new();
        stream.read_to_string(&mut received)?;
        let (_, body) = received.split_once("\r\n\r\n").context("a reply")?;
        Ok(serde_json::from_str(body)?)
    }

    /// Returns the result of an expression, once it has one.
    fn query(&self, expression: &str) -> Result<Vec<Value>> {
        let escaped: String = expression.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let deadline = Instant::now() + TIMEOUT;
        loop {
            let reply = self.get(&format!("/api/v1/query?query={escaped}"));
            let result = reply.as_ref().ok().and_then(|reply| reply["data"]["result"].as_array().cloned());
            match result {
                Some(result) if !result.is_empty() => return Ok(result),
                _ => ensure!(Instant::now() < deadline, "{expression} has no result: {reply:?}"),
            }
            thread::sleep(Duration::from_millis(200));
        }
    }
}

fn number(sample: &Value) -> Result<f64> {
    Ok(sample["value"][1].as_str().context("a sample")?.parse()?)
}

#[test]
fn checker_finds_no_fault() -> Result<()> {
    if !has_prometheus() {
        return Ok(());
    }
    let served = Served::replay(RECORDING, &[])?;
    let Received { body, .. } = get(&served, "/metrics", "text/plain")?;
    let mut checker =
        tool("promtool").args(["check", "metrics"]).stdin(Stdio::piped()).stderr(Stdio::piped()).spawn()?;
    checker.stdin.take().context("its input")?.write_all(&body)?;
    let output = checker.wait_with_output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

#[test]
fn quantiles_are_those_of_the_recording() -> Result<()> {
    if !has_prometheus() {
        return Ok(());
    }
    let served = Served::replay(RECORDING, &[])?;
    let prometheus = Prometheus::scraping(&served)?;
    let output = whylate(&["replay", RECORDING, "--json"]).output()?;
    let overview: Value = serde_json::from_slice(&output.stdout)?;
    let mut compared = 0;
    for of in overview["sources"].as_array().context("sources")? {
        // The quantile of few latencies depends on how it is interpolated.
        if of["count"].as_u64().is_none_or(|count| count < 500) {
            continue;
        }
        let source = of["source"].as_str().context("a name")?;
        for (quantile, field) in [("0.5", "p50_ns"), ("0.99", "p99_ns")] {
            let truth = of[field].as_f64().context("a quantile")? / 1e9;
            let seen = prometheus
                .query(&format!("histogram_quantile({quantile}, whylate_wait_seconds{{source=\"{source}\"}})"))?;
            let seen = number(seen.first().context("a sample")?)?;
            println!("{source} {field}: {seen} s, by whylate {truth} s");
            ensure!((seen / truth - 1.0).abs() <= MAX_ERROR, "{source} {field}: {seen} s, not {truth} s");
            compared += 1;
        }
    }
    ensure!(compared >= 4, "{compared} quantiles were compared");
    let culprits =
        prometheus.query("topk(3, sum by (who) (whylate_caused_seconds_total{who!=\"(other culprits)\"}))")?;
    ensure!(culprits.len() == 3, "{culprits:?}");
    Ok(())
}

#[test]
fn each_panel_of_the_dashboard_has_data() -> Result<()> {
    if !has_prometheus() {
        return Ok(());
    }
    let dashboard = fs::read_to_string(packaged("grafana-dashboard.json"))?;
    let dashboard: Value = serde_json::from_str(&dashboard)?;
    let served = Served::replay(RECORDING, &[])?;
    // The containers of one recording are those of which the kubelet reports pressure.
    let directory = tempfile::tempdir()?;
    let crowd = Served::replay(&crowd::recording(directory.path())?.to_string_lossy(), &[])?;
    let kubelet = kubelet()?;
    let jobs = [("whylate", &*served.address), ("containers", &*crowd.address), ("kubelet", &*kubelet)];
    let prometheus = Prometheus::scraping_all(&jobs, "1s")?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    let panels: Vec<&Value> = panels.iter().filter(|panel| panel["type"] != "row").collect();
    for panel in &panels {
        let expression = panel["targets"][0]["expr"].as_str().context("an expression")?;
        let variables = [("$__rate_interval", "10s"), ("$instance", ".*"), ("$job", "whylate")];
        let expression = variables.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
        prometheus.query(&expression).with_context(|| panel["title"].to_string())?;
    }
    ensure!(panels.len() >= 12, "{} panels", panels.len());
    Ok(())
}

/// Serves the pressure of three containers, as a kubelet does. Returns the address.
fn kubelet() -> Result<String> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?.to_string();
    let metric = "container_pressure_cpu_waiting_seconds_total";
    let mut body = format!("# TYPE {metric} counter\n");
    for culprit in 0..3 {
        let (id, cgroup) = (crowd::container(culprit), crowd::cgroup(culprit));
        let labels =
            format!("container=\"app\",id=\"{cgroup}\",name=\"{id}\",namespace=\"shop\",pod=\"app-{culprit}\"");
        body += &format!("{metric}{{{labels}}} {culprit}.5\n");
    }
    // It ends with the test program.
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let _ = stream.read(&mut [0; 4096]);
            let head = "HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n\r\n";
            let _ = stream.write_all(format!("{head}{body}").as_bytes());
        }
    });
    Ok(address)
}

/// Returns the samples of a series: times and values.
fn samples(series: &Value) -> Result<Vec<(f64, f64)>> {
    let samples = series["values"].as_array().context("samples")?;
    let sample = |of: &Value| Some((of[0].as_f64()?, of[1].as_str()?.parse().ok()?));
    samples.iter().map(|of| sample(of).context("a sample")).collect()
}

fn now_seconds() -> Result<f64> {
    Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?.as_secs_f64())
}

#[test]
fn counters_fall_neither_in_overflow_nor_but_at_a_restart() -> Result<()> {
    if !has_prometheus() {
        return Ok(());
    }
    let directory = tempfile::tempdir()?;
    let recording = crowd::recording(directory.path())?;
    // A port that is free now, and after the restart.
    let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?.to_string();
    let arguments = ["replay", "--speed", "8", &recording.to_string_lossy(), "serve", "--listen", &address];
    let mut served = Served::start(&arguments)?;
    let prometheus = Prometheus::scraping_all(&[("whylate", &address)], "100ms")?;
    let late = "whylate_late_seconds_total{source=\"offcpu\"}";
    let total = crowd::total_seconds();
    let has_all = format!("{late} > {}", total - 0.001);
    prometheus.query(&has_all)?;
    let stopped = now_seconds()?;
    served.stop()?;
    served = Served::start(&arguments)?;
    let restarted = now_seconds()?;
    ensure!(served.address == address, "{} is not {address}", served.address);
    prometheus.query(&format!("{late} > 0 and {late} < {}", total - 0.001))?;
    prometheus.query(&has_all)?;

    let counters = "{__name__=~\"whylate_.*_total|whylate_wait_seconds_(count|sum|bucket)\"}[5m]";
    let (mut restarts, mut names) = (0, BTreeSet::new());
    let mut shown: BTreeMap<u64, usize> = BTreeMap::new();
    for series in prometheus.query(counters)? {
        let samples = samples(&series)?;
        for pair in samples.windows(2) {
            let [(before_s, before), (after_s, after)] = pair else { continue };
            if after < before {
                let is_restart = *before_s <= stopped + 1.0 && *after_s >= stopped;
                ensure!(is_restart, "{} falls from {before} to {after}", series["metric"]);
                restarts += 1;
            }
        }
        if series["metric"]["__name__"] == "whylate_caused_seconds_total" {
            names.insert(series["metric"]["who"].to_string());
            samples.iter().for_each(|(at_s, _)| *shown.entry((at_s * 1e3) as u64).or_default() += 1);
        }
        // The sum of both runs has all delay once each.
        if series["metric"]["__name__"] == "whylate_late_seconds_total" {
            let last = samples.iter().rev().find(|(at_s, _)| *at_s <= stopped).context("a sample")?.1;
            ensure!((last - total).abs() < 1e-6, "{last} s before the restart, of {total} s");
        }
    }
    ensure!(restarts > 100, "{restarts} counters started again after {restarted}");
    let most = shown.values().max().context("culprits")?;
    ensure!(*most == 101, "{most} culprits at a time");
    ensure!(names.len() > 101, "{} culprits in all: places do not change", names.len());
    ensure!(number(&prometheus.query("min(whylate_series_overflow_total)")?[0])? > 0.0);
    Ok(())
}

#[test]
fn rules_fire_when_they_should() -> Result<()> {
    if !has_prometheus() {
        return Ok(());
    }
    let output = tool("promtool").args(["test", "rules"]).arg(packaged("rules-test.yml")).output()?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    Ok(())
}

/// The file of the rules' tests has the expressions of the panels about pressure, too.
#[test]
fn tested_expressions_are_those_of_the_dashboard() -> Result<()> {
    let dashboard: Value = serde_json::from_str(&fs::read_to_string(packaged("grafana-dashboard.json"))?)?;
    let tested = fs::read_to_string(packaged("rules-test.yml"))?;
    let mut expressions = 0;
    for panel in dashboard["panels"].as_array().context("panels")? {
        let Some(expression) = panel["targets"][0]["expr"].as_str() else { continue };
        if expression.contains("container_pressure") {
            let expression = expression.replace("$__rate_interval", "5m").replace("$instance", ".*");
            ensure!(tested.contains(&expression), "rules-test.yml does not have {expression}");
            expressions += 1;
        }
    }
    ensure!(expressions == 3, "{expressions} expressions");
    Ok(())
}

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/prometheus").join(name)
}
