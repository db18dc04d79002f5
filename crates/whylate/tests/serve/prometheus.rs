// SPDX-License-Identifier: MIT OR Apache-2.0
//! A real Prometheus reads the metrics: its checker finds no fault, and its quantiles are those of `whylate replay`.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::RECORDING;
use crate::client::{Received, Served, get};
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
        let directory = tempfile::tempdir()?;
        let config = directory.path().join("prometheus.yml");
        let target = &served.address;
        fs::write(
            &config,
            format!(
                "global: {{scrape_interval: 1s}}\n\
                 scrape_configs: [{{job_name: whylate, static_configs: [{{targets: ['{target}']}}]}}]\n"
            ),
        )?;
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
        use std::io::Read as _;
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
    let prometheus = Prometheus::scraping(&served)?;
    let panels = dashboard["panels"].as_array().context("panels")?;
    for panel in panels {
        let expression = panel["targets"][0]["expr"].as_str().context("an expression")?;
        let variables = [("$__rate_interval", "10s"), ("$instance", ".*"), ("$job", "whylate")];
        let expression = variables.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value));
        prometheus.query(&expression).with_context(|| panel["title"].to_string())?;
    }
    ensure!(panels.len() >= 9, "{} panels", panels.len());
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

fn packaged(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/prometheus").join(name)
}
