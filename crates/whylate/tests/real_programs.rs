// SPDX-License-Identifier: MIT OR Apache-2.0
//! PostgreSQL under pgbench: its own wait statistics (`pg_stat_activity`) compared with what whylate reports.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/oracles/chance.rs"]
mod chance;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/support/machine/lock.rs"]
mod lock;
mod postgres;
mod running;

use std::process::Stdio;

use anyhow::{Context as _, Result, ensure};
use serde::Deserialize;
use whylate_model::path::budget::{Budget, EndedBy, Waits};

use chance::in_rounds;
use lock::lock_machine;
use postgres::{Cluster, Waiting};
use running::whylate;

const CLIENTS: u32 = 16;
/// Tolerance, as a share of the clients' time: both sample, at slightly different times.
const TOLERANCE: f64 = 0.15;
const LOOK: &str = "3s";
const LOOK_S: f64 = 3.0;

#[derive(Debug, Deserialize)]
struct Profile {
    span_ns: u64,
    #[serde(flatten)]
    budget: Budget,
}

impl Profile {
    /// Average number of threads in this wait.
    fn threads(&self, is_so: impl Fn(&Waits) -> bool) -> f64 {
        let waits = self.budget.waits.iter().filter(|waits| is_so(waits));
        waits.map(|waits| waits.ns).sum::<u64>() as f64 / self.span_ns as f64
    }

    /// PostgreSQL's term: row locks and client reads are waits in the same system call.
    fn waiting(&self) -> Waiting {
        let is_latch = |waits: &Waits| waits.via.starts_with("epoll_");
        let is_file = |waits: &Waits| ["sync", "read", "write"].iter().any(|call| waits.via.contains(call));
        Waiting {
            row_lock: self.threads(|waits| is_latch(waits) && waits.ended_by == Some(EndedBy::Own)),
            client: self.threads(|waits| is_latch(waits) && waits.ended_by == Some(EndedBy::Others)),
            inner_lock: self.threads(|waits| waits.via.starts_with("futex")),
            file: self.threads(is_file),
        }
    }
}

/// Parses the screen: the number of threads in its first line, `postgres (24 processes, 24 threads) spent …`, and the
/// shares of its table, such as `epoll_wait for its own threads  75.4s  53.9% …`.
fn table(screen: &str) -> Result<Waiting> {
    let (about, _) = screen.split_once(" threads)").with_context(|| screen.to_owned())?;
    let threads: f64 = about.rsplit_once(' ').context("no number")?.1.parse()?;
    let rows =
        screen.lines().skip_while(|line| !line.starts_with("STATE ")).skip(1).take_while(|line| !line.is_empty());
    let states: Vec<(&str, f64)> = rows
        .map(|row| {
            let mut cells = row.split("  ").filter(|cell| !cell.is_empty());
            let (name, share) = (cells.next().context("no name")?, cells.nth(1).context("no share")?);
            Ok((name, share.trim().trim_end_matches('%').parse()?))
        })
        .collect::<Result<_>>()?;
    let sum = |is_so: &dyn Fn(&str) -> bool| -> f64 {
        states.iter().filter(|(name, _)| is_so(name)).map(|(_, share)| share).sum::<f64>() / 100.0 * threads
    };
    let is_latch = |part: &str| part.starts_with("epoll_");
    let is_file = |part: &str| {
        let call = part.split(' ').next().unwrap_or_default();
        ["sync", "read", "write"].iter().any(|of| call.contains(of))
    };
    Ok(Waiting {
        row_lock: sum(&|part| is_latch(part) && part.ends_with(" for its own threads")),
        client: sum(&|part| is_latch(part) && part.ends_with(" for others")),
        inner_lock: sum(&|part| part.starts_with("futex")),
        file: sum(&is_file),
    })
}

/// Samples both during one workload.
fn both(cluster: &Cluster, workload: &str) -> Result<(Profile, Waiting)> {
    let _load = cluster.load(workload, CLIENTS)?;
    // All clients are connected, and the first waits are over.
    cluster.sample(1.0)?;
    let look = whylate(&["--comm", "postgres", "-d", LOOK, "--json"]).stdout(Stdio::piped()).spawn()?;
    let screen = whylate(&["--comm", "postgres", "-d", LOOK, "-v"]).stdout(Stdio::piped()).spawn()?;
    let truth = cluster.sample(LOOK_S);
    let (measured, screen) = (look.wait_with_output()?, screen.wait_with_output()?);
    let truth = truth?;
    ensure!(measured.status.success() && screen.status.success(), "whylate fails beside {workload}");
    let seen: Profile = serde_json::from_slice(&measured.stdout)?;
    let line = table(&String::from_utf8(screen.stdout)?)?;
    println!("the table says {line:?}");
    let is_alike = |measured: f64, truth: f64| (truth - measured).abs() <= TOLERANCE * f64::from(CLIENTS);
    let of_seen = seen.waiting();
    for (what, measured, seen) in [
        ("row locks", line.row_lock, of_seen.row_lock),
        ("clients", line.client, of_seen.client),
        ("locks within", line.inner_lock, of_seen.inner_lock),
        ("files", line.file, of_seen.file),
    ] {
        ensure!(is_alike(measured, seen), "{measured:.2} wait for {what} by the table, and {seen:.2} by JSON");
    }
    ensure!(is_alike(line.row_lock, truth.row_lock), "{:.2} wait for row locks by the table: {truth:?}", line.row_lock);
    Ok((seen, truth))
}

/// PostgreSQL counts a wait until the process runs again, whylate until its wakeup: the difference is run-queue wait.
fn ensure_alike(seen: &Profile, truth: &Waiting) -> Result<()> {
    let measured = seen.waiting();
    let ready = seen.budget.ready.ns as f64 / seen.span_ns as f64;
    println!("of {CLIENTS} clients, by whylate {measured:?} and {ready:.2} for a CPU, by PostgreSQL {truth:?}");
    let tolerance = TOLERANCE * f64::from(CLIENTS);
    for (what, measured, truth) in [
        ("row locks", measured.row_lock, truth.row_lock),
        ("clients", measured.client, truth.client),
        ("locks within", measured.inner_lock, truth.inner_lock),
        ("files", measured.file, truth.file),
    ] {
        let is_alike = (measured - tolerance..=measured + ready + tolerance).contains(&truth);
        ensure!(
            is_alike,
            "{measured:.2} wait for {what} by whylate, and {truth:.2} by PostgreSQL, {ready:.2} for a CPU"
        );
    }
    Ok(())
}

#[test]
fn postgres_waits_match_its_own_statistics() -> Result<()> {
    if std::env::var_os("WHYLATE_TRIAL").is_none() {
        println!("skipped: that is what `make trial` does");
        return Ok(());
    }
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let Some(cluster) = Cluster::start()? else { return Ok(()) };
    // All clients update the one row of pgbench_branches.
    in_rounds(|| {
        let (seen, truth) = both(&cluster, "tpcb-like")?;
        ensure_alike(&seen, &truth)?;
        let measured = seen.waiting();
        let largest = measured.client.max(measured.inner_lock).max(measured.file);
        // The expected waits, where they are beyond doubt.
        let is_clear = truth.row_lock > f64::from(CLIENTS) / 2.0;
        ensure!(!is_clear || measured.row_lock > largest, "the row locks are not the largest part: {measured:?}");
        Ok(())
    })?;
    // Any two clients update different rows, and all wait for the log to be written.
    in_rounds(|| {
        let (seen, truth) = both(&cluster, "simple-update")?;
        ensure_alike(&seen, &truth)?;
        ensure!(seen.waiting().row_lock < f64::from(CLIENTS) / 2.0, "rows are locked: {:?}", seen.waiting());
        Ok(())
    })
}
