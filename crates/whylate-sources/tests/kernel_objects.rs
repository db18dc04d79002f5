// SPDX-License-Identifier: MIT OR Apache-2.0
//! What threads of this process wait for, and which process could end the wait: an object of each kind.

#[allow(unsafe_code)]
#[path = "kernel_objects/kinds.rs"]
mod kinds;
#[path = "kernel_objects/replaced.rs"]
mod replaced;
mod support;

use std::collections::HashMap;
use std::env;
use std::io::{BufRead as _, BufReader, Write as _, stdin};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use support::machine::lock::share_machine;
use whylate_model::object::{Object, ObjectKind};
use whylate_model::{Snapshot, Stack};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use kinds::{Expected, Waits};

/// Maximum number of snapshots until all threads wait.
const MAX_SNAPSHOTS: u32 = 40;

/// Set for the process that observes this one, as no process observes its own threads: the PID.
const OBSERVED: &str = "WHYLATE_TEST_OBSERVED";

fn options(pid: u32) -> OffcpuOptions {
    OffcpuOptions {
        threads: Threads::of_process(pid),
        by_thread: true,
        holders: true,
        objects_over_ns: Some(1),
        user_stacks: false,
        ..OffcpuOptions::default()
    }
}

/// Prints a snapshot of the observed process for each line of input, if it is asked to.
#[test]
fn observer_process() -> Result<()> {
    let Ok(pid) = env::var(OBSERVED) else { return Ok(()) };
    let mut source = options(pid.parse()?).attach(&Session::of_one())?;
    for _ in stdin().lines() {
        println!("\n{}", serde_json::to_string(&source.snapshot()?)?);
    }
    Ok(())
}

/// A process that observes the threads of this one.
struct Observer {
    process: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Observer {
    fn start() -> Result<Self> {
        let mut command = Command::new(env::current_exe()?);
        command.args(["--exact", "observer_process", "--nocapture"]).env(OBSERVED, std::process::id().to_string());
        let mut process = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let output = BufReader::new(process.stdout.take().context("it has an output")?);
        Ok(Observer { input: process.stdin.take(), process, output })
    }

    fn snapshot(&mut self) -> Result<Snapshot> {
        writeln!(self.input.as_mut().context("it has an input")?)?;
        loop {
            let mut line = String::new();
            ensure!(self.output.read_line(&mut line)? > 0, "the observer has ended");
            if line.starts_with('{') {
                return Ok(serde_json::from_str(&line)?);
            }
        }
    }
}

impl Drop for Observer {
    fn drop(&mut self) {
        drop(self.input.take());
        let _ = self.process.wait();
    }
}

/// A process that holds the other end of something; killed on drop.
struct Holder(Child);

impl Holder {
    fn name(&self) -> String {
        format!("sleep:{}", self.0.id())
    }

    fn stop(&self) -> Result<()> {
        let pid = Pid::from_child(&self.0);
        kill_process(pid, Signal::STOP)?;
        waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT)?;
        Ok(())
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Returns what is wrong with the answers for these waits.
fn wrong(snapshot: &Snapshot, waits: &Waits, state: &str) -> Vec<String> {
    let by_thread: HashMap<&str, &Stack> =
        snapshot.stacks.iter().map(|stack| (stack.labels["thread"].as_str(), stack)).collect();
    let mut wrong = Vec::new();
    for (name, expected) in &waits.expected {
        let Some(stack) = by_thread.get(name.as_str()) else {
            wrong.push(format!("{name}: no thread"));
            continue;
        };
        match expected.check(stack, state) {
            Ok(text) => println!("{name}: {text}"),
            Err(error) => {
                wrong.push(format!("{name}: {error} in {:?} {:?}", stack.labels.get("syscall"), stack.kernel))
            }
        }
    }
    wrong
}

/// Takes snapshots until nothing is wrong.
fn check(waits: &Waits, state: &str) -> Result<()> {
    let mut observer = Observer::start()?;
    let mut last = Vec::new();
    for _ in 0..MAX_SNAPSHOTS {
        thread::sleep(Duration::from_millis(50));
        let snapshot = observer.snapshot()?;
        last = wrong(&snapshot, waits, state);
        if last.is_empty() {
            return Ok(());
        }
    }
    anyhow::bail!("with holders in state {state:?}: {last:#?}")
}

#[test]
fn waits_name_object_and_peer() -> Result<()> {
    let Some(_lock) = share_machine() else { return Ok(()) };
    let waits = Waits::start()?;
    check(&waits, "S")?;
    for holder in &waits.holders {
        holder.stop()?;
    }
    check(&waits, "T")
}

impl Expected {
    /// Compares the object or holder of a stack; returns it in words.
    fn check(&self, stack: &Stack, state: &str) -> Result<String> {
        let peer_is = |who: Option<(&str, &str)>| -> Result<()> {
            let wanted = self.peer.as_deref();
            ensure!(who.map(|(who, _)| who) == wanted, "{who:?}, not {wanted:?}");
            let wanted = self.state.unwrap_or(state);
            ensure!(who.is_none_or(|(_, state)| state == wanted), "{who:?}, not in state {wanted}");
            Ok(())
        };
        let Some(kind) = self.kind else {
            let chain = stack.waits_for.as_ref();
            let link = chain.and_then(|chain| chain.links.first());
            ensure!(link.is_some_and(|link| link.file == self.path), "{link:?}, not {:?}", self.path);
            peer_is(link.map(|link| (link.holder.who.as_str(), link.holder.state.as_str())))?;
            return Ok(format!("{link:?}"));
        };
        let Some(object) = &stack.object else { anyhow::bail!("no object") };
        // One of several objects.
        let within = object.any_of.iter().find(|within| within.kind == kind);
        let object = if object.kind == ObjectKind::AnyOf { within.unwrap_or(object) } else { object };
        ensure!(object.kind == kind, "{object:?}, not {kind:?}");
        ensure!(self.path.is_none() || object.path == self.path, "{object:?}, not {:?}", self.path);
        let peer = object.peers.first().map(|peer| (peer.process.who.as_str(), peer.process.state.as_str()));
        peer_is(peer)?;
        ensure!((self.is_so)(object), "{object:?}");
        Ok(object.to_string())
    }
}

fn any(_: &Object) -> bool {
    true
}
