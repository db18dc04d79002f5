// SPDX-License-Identifier: MIT OR Apache-2.0
//! A thread that is preempted while it blocks: it is still queued, but its state is sleeping, and the scheduler does
//! not stamp the start of its run-queue wait. Kernels that preempt kernel code do that; on others it is preempted
//! elsewhere.
#![allow(unsafe_code)]

use std::process::{Child, Command, Stdio};
use std::thread::{self, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use whylate_model::{CauseKind, LateEvent};
use whylate_sources::offcpu::OffcpuOptions;
use whylate_sources::{Session, Source as _, Threads};

use crate::support::machine::cpus::{TestCpus, pin_to};
use crate::support::machine::lock::lock_machine;
use crate::support::machine::real_time::become_fifo_on;
use crate::support::oracles::chance::in_rounds;

/// Environment: the CPU of the process, and the CPU of the thread that wakes it, if any.
const CPU: &str = "WHYLATE_HALF_ASLEEP";
const WAKER: &str = "WHYLATE_HALF_ASLEEP_WAKER";
/// wait4() sets the sleeping state, and then checks each thread.
const THREADS: usize = 300;
const PERIOD: Duration = Duration::from_millis(20);
const TAKES: Duration = Duration::from_millis(5);
const LATE_NS: u64 = 3_000_000;
const WATCHED: Duration = Duration::from_secs(1);

extern "C" fn do_nothing(_signal: libc::c_int) {}

/// Has a thread on that CPU wake the calling thread each millisecond.
fn be_woken_from(cpu: u32) {
    // SAFETY: the handler does nothing, and has the type that is asked for.
    unsafe { libc::signal(libc::SIGUSR1, do_nothing as *const () as libc::sighandler_t) };
    let (process, tid) = (std::process::id(), rustix::thread::gettid().as_raw_nonzero().get());
    thread::spawn(move || {
        let _ = pin_to(cpu);
        loop {
            sleep(Duration::from_millis(1));
            // SAFETY: it takes numbers only.
            unsafe { libc::syscall(libc::SYS_tgkill, process, tid, libc::SIGUSR1) };
        }
    });
}

/// Runs in the process that the tests start; not a test by itself.
#[test]
fn half_asleep_process() {
    let cpu_of = |name| std::env::var(name).ok().and_then(|cpu| cpu.parse().ok());
    let Some(cpu) = cpu_of(CPU) else { return };
    if let Some(waker) = cpu_of(WAKER) {
        be_woken_from(waker);
    }
    for _ in 0..THREADS {
        let stack = thread::Builder::new().stack_size(16 << 10);
        if stack
            .spawn(|| {
                loop {
                    thread::park()
                }
            })
            .is_err()
        {
            return;
        }
    }
    let hog = thread::Builder::new().name("test-hog".to_owned());
    let spawned = hog.spawn(move || {
        if become_fifo_on(cpu, 90).is_err() {
            std::process::exit(1);
        }
        loop {
            sleep(PERIOD - TAKES);
            let began = Instant::now();
            while began.elapsed() < TAKES {
                std::hint::spin_loop();
            }
        }
    });
    if spawned.is_err() || pin_to(cpu).is_err() {
        return;
    }
    loop {
        // SAFETY: no status is asked for, and it has no children.
        unsafe { libc::waitpid(-1, std::ptr::null_mut(), libc::WNOHANG) };
    }
}

/// The process, killed on drop.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A wait that starts at a wakeup is mostly shorter than this, as wakeups come up to a millisecond after the hog.
const WHOLE_NS: u64 = 4_800_000;

/// Checks that most waits behind the hog are reported; with `is_woken` also that each starts when the thread is
/// preempted, not at a later wakeup.
fn check(test_cpus: TestCpus, is_woken: bool) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--exact", "preempted_blocking::half_asleep_process", "--test-threads=1"]);
    command.env(CPU, test_cpus.disturbed.to_string()).stdin(Stdio::null()).stdout(Stdio::null());
    if is_woken {
        command.env(WAKER, test_cpus.tool.to_string());
    }
    let process = Running(command.spawn()?);
    let threads = Threads::of_process(process.0.id());
    in_rounds(|| {
        let options =
            OffcpuOptions { threads: threads.clone(), explain_over_ns: Some(LATE_NS), ..OffcpuOptions::default() };
        let mut source = options.attach(&Session::of_one())?;
        sleep(WATCHED);
        let mut events: Vec<LateEvent> = Vec::new();
        source.drain_late(Duration::ZERO, &mut |event| events.push(event))?;
        let by_hog = |event: &&LateEvent| {
            let of_hog = event.causes.iter().filter(|cause| cause.kind == CauseKind::Thread);
            of_hog.filter(|cause| cause.who.comm() == Some("test-hog")).any(|cause| cause.ns >= LATE_NS)
                && (!is_woken || event.latency_ns >= WHOLE_NS)
        };
        let (behind_hog, runs) = (events.iter().filter(by_hog).count(), WATCHED.as_millis() / PERIOD.as_millis());
        println!("{behind_hog} of some {runs} waits behind the hog");
        ensure!(behind_hog as u128 * 5 >= runs * 4, "{behind_hog} of {runs} waits are reported: {:?}", events.first());
        Ok(())
    })
}

#[test]
fn thread_preempted_while_blocking_is_runnable() -> Result<()> {
    let (Some(_lock), Some(test_cpus)) = (lock_machine(), TestCpus::find()) else { return Ok(()) };
    check(test_cpus, false)?;
    check(test_cpus, true)
}
