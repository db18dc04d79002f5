// SPDX-License-Identifier: MIT OR Apache-2.0
//! Submission threads under loads whose work is known from outside. They run as root.

mod kernel;

use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kernel::late::Places;
use kernel::turn::turn_to_measure;
use kernel::undisturbed;
use kernel::urgent::patching;
use whylate_model::sqpoll::is_thread;
use whylate_model::{Series, Snapshot};
use whylate_sources::Attached as _;
use whylate_sources::inject::sqpoll::{Done, Load, Plan};
use whylate_sources::sqpoll::{AttachedSqpoll, SqpollOptions, attach};

const INTERVAL: Duration = Duration::from_secs(1);

fn options() -> SqpollOptions {
    SqpollOptions { backend: Some("bpf".to_owned()), pid: Some(std::process::id()), ..SqpollOptions::default() }
}

fn start(options: &SqpollOptions) -> Result<AttachedSqpoll> {
    Ok(patching(|| attach(options))?)
}

fn threads(snapshot: &Snapshot) -> Vec<&Series> {
    snapshot.series.iter().filter(|series| is_thread(series)).collect()
}

fn only_thread(snapshot: &Snapshot) -> Result<&Series> {
    let threads = threads(snapshot);
    ensure!(threads.len() == 1, "one thread is there, and {} are seen: {:?}", threads.len(), snapshot.series);
    Ok(threads[0])
}

fn value(series: &Series, name: &str) -> Result<f64> {
    series.values.get(name).copied().with_context(|| format!("no {name} in {series:?}"))
}

#[test]
fn the_share_of_work_is_that_of_the_load() -> Result<()> {
    let (Some(_turn), Some(places)) = (turn_to_measure(), Places::find()) else { return Ok(()) };
    for duty in [0.01, 0.1, 0.37, 0.99] {
        let load =
            Load::start(&Plan { duty, sq_cpu: Some(places.disturbed), app_cpu: Some(places.tool), ..Plan::default() })?;
        let mut source = start(&options())?;
        println!("work is told by {}", source.way());
        for _ in 0..5 {
            source.snapshot()?;
            let before = load.done()?;
            thread::sleep(INTERVAL);
            let snapshot = source.snapshot()?;
            let done = load.done()?.since(&before);
            let series = only_thread(&snapshot)?;
            println!("{duty}: {:?} {:?}", share(&done), series.values);
        }
    }
    Ok(())
}

fn share(done: &Done) -> (f64, f64) {
    (done.busy_ns as f64 / done.at_ns as f64, done.uncertain_ns as f64 / done.at_ns as f64)
}
