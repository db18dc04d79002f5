// SPDX-License-Identifier: MIT OR Apache-2.0
//! The kernel's role of a thread that waits for a CPU, whatever its name.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use rustix::thread::set_name;
use whylate_model::LateEvent;
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _};

use crate::support::is_emulated;
use crate::support::machine::cpus::{TestCpus, pin_to};
use crate::support::machine::lock::lock_machine;
use crate::support::machine::real_time::become_fifo_on;
use crate::support::oracles::chance::{Unjudged, in_rounds};

const LATE_NS: u64 = 3_000_000;
const PRETENDS: &str = "WHYLATE_PRETENDS";
/// The name of a kernel worker, which a process takes.
const NAME: &std::ffi::CStr = c"kworker/0:0";
const WATCHED: Duration = Duration::from_secs(2);
/// The hog's time on the CPU, and off it.
const SPINS: Duration = Duration::from_millis(12);
const RESTS: Duration = Duration::from_millis(4);
/// Enough for the writeback worker to need longer than the hog's pauses.
const DIRTY_BYTES: usize = 48 << 20;

/// Confines unbound workers to one CPU; restores their mask on drop.
struct UnboundOn(String);

const UNBOUND: &str = "/sys/devices/virtual/workqueue/cpumask";

impl UnboundOn {
    fn cpu(cpu: u32) -> Result<Self> {
        let before = fs::read_to_string(UNBOUND)?;
        ensure!(cpu < 32, "a mask of one word has no CPU {cpu}");
        fs::write(UNBOUND, format!("{:x}", 1_u32 << cpu))?;
        Ok(UnboundOn(before))
    }
}

impl Drop for UnboundOn {
    fn drop(&mut self) {
        let _ = fs::write(UNBOUND, self.0.trim());
    }
}

fn until_over(over: &AtomicBool, mut act: impl FnMut() -> Result<()>) -> Result<()> {
    while !over.load(Ordering::Relaxed) {
        act()?;
    }
    Ok(())
}

/// Returns the late waits beside a hog: of workers for writeback and for other items, and of a process that pretends to
/// be one. Also returns the PID of the latter.
fn beside_a_hog(test_cpus: TestCpus, file: &Path) -> Result<(Vec<LateEvent>, u32)> {
    let _unbound = UnboundOn::cpu(test_cpus.disturbed)?;
    let options = OffcpuOptions { explain_over_ns: Some(LATE_NS), ..OffcpuOptions::default() };
    let mut source = options.attach(&Session::of_one())?;
    let over = AtomicBool::new(false);
    let mut process = Command::new(std::env::current_exe()?)
        .args(["--exact", "roles::pretending_process", "--test-threads=1"])
        .env(PRETENDS, test_cpus.disturbed.to_string())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()?;
    let mut events = Vec::new();
    thread::scope(|scope| {
        let hog = scope.spawn(|| {
            become_fifo_on(test_cpus.disturbed, 40)?;
            until_over(&over, || {
                let began = Instant::now();
                while began.elapsed() < SPINS {
                    std::hint::spin_loop();
                }
                thread::sleep(RESTS);
                Ok(())
            })
        });
        let items = scope.spawn(|| {
            pin_to(test_cpus.tool)?;
            until_over(&over, || {
                let _ = fs::read("/proc/sys/vm/stat_refresh");
                thread::sleep(Duration::from_millis(5));
                Ok(())
            })
        });
        let writer = scope.spawn(|| {
            pin_to(test_cpus.tool)?;
            let content = vec![7_u8; DIRTY_BYTES];
            until_over(&over, || {
                File::create(file)?.write_all(&content)?;
                rustix::fs::sync();
                Ok(())
            })
        });
        thread::sleep(WATCHED);
        over.store(true, Ordering::Relaxed);
        for thread in [hog, items, writer] {
            thread.join().expect("none of them panics")?;
        }
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))
    })?;
    process.kill()?;
    process.wait()?;
    Ok((events, process.id()))
}

#[test]
fn role_does_not_depend_on_thread_name() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    if is_emulated() {
        println!("skipped: what writes back has no disk here");
        return Ok(());
    }
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    in_rounds(|| {
        let (events, pid) = beside_a_hog(test_cpus, &directory.path().join("dirty"))?;
        let label = |event: &LateEvent, name: &str| event.labels.get(name).cloned().unwrap_or_default();
        let (mut pretending, mut with_item, mut without) = (0, 0, 0);
        for event in &events {
            let role = label(event, "role");
            if label(event, "pid") == pid.to_string() {
                assert_ne!(role, "worker", "{event:?}");
                pretending += usize::from(label(event, "thread") == NAME.to_str()?);
            } else if role == "worker" {
                match label(event, "handler").as_str() {
                    "" => without += 1,
                    _ => with_item += 1,
                }
            }
        }
        println!("{pretending} of a process, workers with an item {with_item}, without {without}");
        let first =
            events.iter().find(|event| event.labels.contains_key("handler")).context("no worker had an item")?;
        ensure!(label(first, "role") == "worker" && label(first, "thread").starts_with("kworker/"), "{first:?}");
        ensure!(pretending > 10 && with_item > 0 && without > 0, Unjudged("too few to judge".to_owned()));
        Ok(())
    })
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn pretending_process() {
    let Ok(cpu) = std::env::var(PRETENDS) else { return };
    pin_to(cpu.parse().expect("a number")).expect("a thread may be pinned");
    set_name(NAME).expect("any name will do");
    loop {
        std::hint::spin_loop();
    }
}
