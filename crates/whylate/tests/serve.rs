// SPDX-License-Identifier: MIT OR Apache-2.0
//! `whylate serve`: what a client gets, and what it cannot do. Most tests replay a recording, which needs no root.

#[path = "serve/client.rs"]
mod client;
#[path = "serve/crowd.rs"]
mod crowd;
#[path = "serve/live.rs"]
mod live;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
#[path = "running/memory_limit.rs"]
mod memory_limit;
#[path = "serve/pressure.rs"]
mod pressure;
#[path = "serve/prometheus.rs"]
mod prometheus;
mod running;
#[path = "serve/units.rs"]
mod units;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::{Result, ensure};

use client::{Served, get, request};

/// A recording with late events of all sources.
const RECORDING: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/recordings/late-6.18.whylate");

#[test]
fn metrics_are_served_in_the_form_that_is_asked_for() -> Result<()> {
    let served = Served::replay(RECORDING, &[])?;
    let text = get(&served, "/metrics", "text/plain")?;
    ensure!(text.status == 200 && text.field("content-type").starts_with("text/plain; version=0.0.4"), "{text:?}");
    ensure!(text.text().contains("whylate_caused_seconds_total{source="), "{text:?}");
    let open = get(&served, "/metrics", "application/openmetrics-text;version=1.0.0;q=0.5,*/*;q=0.1")?;
    ensure!(open.text().ends_with("# EOF\n") && open.text().contains(" # {kind="), "{open:?}");
    let messages = get(&served, "/metrics", "application/vnd.google.protobuf;encoding=delimited")?;
    ensure!(messages.field("content-type").starts_with("application/vnd.google.protobuf"), "{messages:?}");
    ensure!(text.body.len() < 300_000 && messages.body.len() < 300_000, "a scrape is at most 300 KB");
    let head = request(&served, b"HEAD /metrics HTTP/1.1\r\n\r\n")?;
    ensure!(head.status == 200 && head.body.is_empty(), "{head:?}");
    Ok(())
}

#[test]
fn replay_has_the_requested_sources() -> Result<()> {
    let served = Served::replay(RECORDING, &["--sources", "wq"])?;
    let text = get(&served, "/metrics", "")?.text();
    ensure!(text.contains("whylate_late_total{source=\"wq\"}"), "{text}");
    ensure!(text.contains("whylate_attached{source=\"wq\",backend=\"tracepoint\"} 1"), "{text}");
    for other in ["block", "timerlat", "irqsoff", "offcpu", "sqpoll"] {
        ensure!(!text.contains(&format!("source=\"{other}\"")), "{other}: {text}");
    }
    // An old recording is not stale while it is replayed.
    let last = text.lines().find_map(|line| line.strip_prefix("whylate_last_interval_timestamp_seconds "));
    let age = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64() - last.unwrap_or_default().parse::<f64>()?;
    ensure!((0.0..120.0).contains(&age), "{age}");
    Ok(())
}

#[test]
fn other_requests_are_refused_with_a_reason() -> Result<()> {
    let served = Served::replay(RECORDING, &[])?;
    for (sent, status) in [
        ("GET /-/healthy HTTP/1.1\r\n\r\n", 200),
        ("GET /-/ready HTTP/1.1\r\n\r\n", 200),
        ("GET / HTTP/1.0\r\n\r\n", 200),
        ("GET http://localhost:9797/-/healthy HTTP/1.1\r\n\r\n", 200),
        ("GET http://web1.example:9797/-/healthy HTTP/1.1\r\n\r\n", 403),
        ("GET /metrics HTTP/1.1\r\nHost: web1.example:9797\r\n\r\n", 403),
        ("GET /etc/passwd HTTP/1.1\r\n\r\n", 404),
        ("DELETE /metrics HTTP/1.1\r\n\r\n", 405),
        ("POST /-/keep HTTP/1.1\r\nContent-Length: 0\r\n\r\n", 403),
        ("GET /debug/report?seconds=0 HTTP/1.1\r\n\r\n", 400),
        ("GET /debug/pprof/offcpu?seconds=301 HTTP/1.1\r\n\r\n", 400),
        ("\x16\x03\x01\x02\x01\r\n\r\n", 400),
    ] {
        let reply = request(&served, sent.as_bytes())?;
        ensure!(reply.status == status, "{sent:?}: {reply:?}");
    }
    let refused = request(&served, b"POST /metrics HTTP/1.1\r\n\r\n")?;
    ensure!(refused.field("Allow") == "GET, HEAD", "{refused:?}");
    let served = Served::replay(RECORDING, &["--no-debug"])?;
    for path in ["/debug/report?seconds=1", "/debug/pprof/offcpu?seconds=1"] {
        let reply = get(&served, path, "")?;
        ensure!(reply.status == 404 && reply.text().contains("--no-debug"), "{reply:?}");
    }
    let long = format!("GET /metrics HTTP/1.1\r\nA: {}\r\n\r\n", "x".repeat(9_000));
    ensure!(request(&served, long.as_bytes())?.status == 431);
    Ok(())
}

#[test]
fn stuck_clients_do_not_keep_others_out() -> Result<()> {
    let served = Served::replay(RECORDING, &[])?;
    // Some say nothing, and some do not read their reply.
    let mut stuck = Vec::new();
    for number in 0..300 {
        let mut stream = TcpStream::connect(&served.address)?;
        if number % 2 == 0 {
            stream.write_all(b"GET /metrics HTTP/1.1\r\n\r\n")?;
        }
        stuck.push(stream);
        if number % 50 == 0 {
            ensure!(get(&served, "/metrics", "")?.status == 200, "after {number} clients");
        }
    }
    let reply = get(&served, "/-/healthy", "")?;
    ensure!(reply.status == 200, "{reply:?}");
    Ok(())
}

#[test]
fn unix_socket_is_its_owners() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("serve.sock");
    let address = format!("unix:{}", path.display());
    let mut served = Served::replay(RECORDING, &["--listen", &address])?;
    ensure!(std::fs::metadata(&path)?.permissions().mode() & 0o777 == 0o600);
    let mut stream = UnixStream::connect(&path)?;
    stream.write_all(b"POST /-/keep HTTP/1.1\r\n\r\n")?;
    let mut reply = String::new();
    stream.read_to_string(&mut reply)?;
    ensure!(reply.starts_with("HTTP/1.1 404 ") && reply.contains("no flight recorder"), "{reply}");
    served.stop()?;
    ensure!(!path.exists(), "the socket is left behind");
    Ok(())
}

#[test]
fn address_in_use_is_an_error() -> Result<()> {
    let served = Served::replay(RECORDING, &[])?;
    let output = running::whylate(&["replay", RECORDING, "serve", "--listen", &served.address]).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(1) && said.contains("choose another one with --listen"), "{said}");
    Ok(())
}
