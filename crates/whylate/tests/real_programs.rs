// SPDX-License-Identifier: MIT OR Apache-2.0
//! PostgreSQL under pgbench, which tells by itself what its processes wait for (`pg_stat_activity`), beside what whylate
//! tells of them.

#[allow(dead_code)]
#[path = "../../whylate-sources/tests/kernel/chance.rs"]
mod chance;
mod postgres;
mod running;
#[allow(dead_code)]
#[path = "../../whylate-sources/tests/kernel/turn.rs"]
mod turn;

use std::process::Stdio;

use anyhow::{Result, ensure};
use serde::Deserialize;
use whylate_model::path::budget::{Budget, EndedBy, Waits};

use chance::in_rounds;
use postgres::{Cluster, Waiting};
use running::whylate;
use turn::turn_to_measure;

const CLIENTS: u32 = 16;
/// What may lie between both, as a share of the clients' time: each takes samples or looks at slightly other moments.
const APART: f64 = 0.15;
const LOOK: &str = "3s";
const LOOK_S: f64 = 3.0;

/// Only the kernel tests run on emulated CPUs.
fn is_emulated() -> bool {
    false
}

#[derive(Debug, Deserialize)]
struct Seen {
    span_ns: u64,
    #[serde(flatten)]
    budget: Budget,
}

impl Seen {
    /// How many threads waited so, on average.
    fn threads(&self, is_so: impl Fn(&Waits) -> bool) -> f64 {
        let waits = self.budget.waits.iter().filter(|waits| is_so(waits));
        waits.map(|waits| waits.ns).sum::<u64>() as f64 / self.span_ns as f64
    }

    /// As PostgreSQL calls it: it waits for a row's lock and for its client in the same system call.
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

/// Both at once, of one workload.
fn both(cluster: &Cluster, workload: &str) -> Result<(Seen, Waiting)> {
    let _load = cluster.load(workload, CLIENTS)?;
    // All clients are connected, and the first waits are over.
    cluster.sample(1.0)?;
    let look = whylate(&["--comm", "postgres", "-d", LOOK, "--json"]).stdout(Stdio::piped()).spawn()?;
    let truth = cluster.sample(LOOK_S);
    let told = look.wait_with_output()?;
    ensure!(told.status.success(), "whylate fails beside {workload}");
    Ok((serde_json::from_slice(&told.stdout)?, truth?))
}

/// PostgreSQL counts a wait until the process goes on, whylate until it could: what lies between is its wait for a CPU.
fn ensure_alike(seen: &Seen, truth: &Waiting) -> Result<()> {
    let told = seen.waiting();
    let ready = seen.budget.ready.ns as f64 / seen.span_ns as f64;
    println!("of {CLIENTS} clients, by whylate {told:?} and {ready:.2} for a CPU, by PostgreSQL {truth:?}");
    let apart = APART * f64::from(CLIENTS);
    for (what, told, truth) in [
        ("row locks", told.row_lock, truth.row_lock),
        ("clients", told.client, truth.client),
        ("locks within", told.inner_lock, truth.inner_lock),
        ("files", told.file, truth.file),
    ] {
        let is_alike = (told - apart..=told + ready + apart).contains(&truth);
        ensure!(is_alike, "{told:.2} wait for {what} by whylate, and {truth:.2} by PostgreSQL, {ready:.2} for a CPU");
    }
    Ok(())
}

#[test]
fn postgres_is_told_to_wait_for_what_it_says_itself() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let Some(cluster) = Cluster::start()? else { return Ok(()) };
    // All clients update the one row of pgbench_branches.
    in_rounds(|| {
        let (seen, truth) = both(&cluster, "tpcb-like")?;
        ensure_alike(&seen, &truth)?;
        let told = seen.waiting();
        let largest = told.client.max(told.inner_lock).max(told.file);
        // The truth in words, where it is beyond doubt.
        let is_clear = truth.row_lock > f64::from(CLIENTS) / 2.0;
        ensure!(!is_clear || told.row_lock > largest, "the row locks are not the largest part: {told:?}");
        Ok(())
    })?;
    // Any two update different rows, and all wait for the log to be written.
    in_rounds(|| {
        let (seen, truth) = both(&cluster, "simple-update")?;
        ensure_alike(&seen, &truth)?;
        ensure!(seen.waiting().row_lock < f64::from(CLIENTS) / 2.0, "rows are locked: {:?}", seen.waiting());
        Ok(())
    })
}
