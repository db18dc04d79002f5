// SPDX-License-Identifier: MIT OR Apache-2.0
//! Renders where threads wait: as a tree, a table, a flame graph, and in the formats of other tools.

pub mod blocked;
pub mod chains;
pub mod diff;
pub mod file;
pub mod flat;
pub mod pprof;
pub mod speedscope;
pub mod svg;
pub mod threads;
pub mod tree;

use std::io::{self, Write};

use whylate_model::folded::waiting;
use whylate_model::sources::count_lost;
use whylate_model::units::format_ns;
use whylate_model::{Snapshot, Stack, WaitClass};

/// Returns a value of the whole snapshot.
pub fn value(snapshot: &Snapshot, name: &str) -> f64 {
    snapshot.series.iter().filter_map(|series| series.values.get(name)).sum()
}

/// Renders the sampling rate.
fn rate(snapshot: &Snapshot) -> String {
    match value(snapshot, "rate_hz") {
        0.0 => "of every switch".to_owned(),
        // A rate that follows from a budget has one decimal.
        hz => format!("at {} Hz", (hz * 10.0).round() / 10.0),
    }
}

/// Renders the extent of the measurement: `2.00s at 9 Hz, 92 threads, 180s off CPU, 2.10s on CPU`.
pub fn summary(snapshot: &Snapshot, hide_idle: bool) -> String {
    let off_ns: u64 = waiting(snapshot, hide_idle).map(|stack| stack.weight_ns).sum();
    let on_ns: u64 = on_cpu(snapshot).map(|stack| stack.weight_ns).sum();
    let lost = count_lost(&snapshot.source, &snapshot.lost);
    let lost = if lost == 0 { String::new() } else { format!(", {lost} lost") };
    format!(
        "{} {}, {} threads, {} off CPU{}, {} on CPU{lost}",
        format_ns(snapshot.duration_ns),
        rate(snapshot),
        value(snapshot, "threads"),
        format_ns(off_ns),
        if hide_idle { " without those idle by design" } else { "" },
        format_ns(on_ns),
    )
}

fn on_cpu(snapshot: &Snapshot) -> impl Iterator<Item = &Stack> {
    snapshot.stacks.iter().filter(|stack| stack.wait.as_ref().is_some_and(|wait| wait.class == WaitClass::OnCpu))
}

/// Returns whether idle kernel threads get a branch of their own: only if there are other threads.
fn sets_idle_kernel_threads_apart(snapshot: &Snapshot) -> bool {
    snapshot.stacks.iter().any(|stack| !stack.labels.contains_key("kernel"))
}

pub fn write_lines(out: &mut dyn Write, lines: &[String]) -> io::Result<()> {
    lines.iter().try_for_each(|line| writeln!(out, "{line}"))
}

fn percent(part: u64, whole: u64) -> String {
    format!("{:.1}%", part as f64 * 100.0 / whole.max(1) as f64)
}

#[cfg(test)]
pub mod sample {
    //! Snapshots with everything that an output has to cope with.

    use whylate_model::wait::{Wait, WaitClass};
    use whylate_model::{Series, Snapshot, Stack, Waker, WokenBy};

    /// A name that breaks lines, JSON, XML and terminals.
    pub const EVIL: &str = "a;b \"c\" '\\\x1b[31m<script>alert(1)</script>";

    /// Returns the snapshot with wakers: a thread of a process, an interrupt, and none yet.
    pub fn with_wakers() -> Snapshot {
        let mut snapshot = snapshot();
        let labels = [("process", "db"), ("thread", "writer;"), ("pid", "7")].map(|(k, v)| (k.into(), v.into())).into();
        let (user, kernel) = (names("futex unlock work start"), names("wake_up_q futex_wake do_futex"));
        let wakers = [
            Waker { by: WokenBy::Thread, labels, kernel, user },
            Waker { by: WokenBy::NotYet, ..Waker::default() },
            Waker { by: WokenBy::Interrupt, ..Waker::default() },
        ];
        for (stack, waker) in snapshot.stacks.iter_mut().zip(wakers) {
            stack.waker = Some(waker);
        }
        snapshot
    }

    fn names(names: &str) -> Vec<String> {
        names.split_whitespace().map(str::to_owned).collect()
    }

    /// Returns a snapshot of four call sites of two processes.
    pub fn snapshot() -> Snapshot {
        let mut snapshot = Snapshot::new("offcpu", "sample", "host", 1_795_252_440_000_000_000);
        snapshot.duration_ns = 2_000_000_000;
        let values = [("rate_hz", 9.0), ("threads", 7.0), ("walks", 18.0)];
        snapshot.series =
            vec![Series { values: values.map(|(name, value)| (name.to_owned(), value)).into(), ..Series::default() }];
        snapshot.lost.insert("torn".to_owned(), 1);
        let stack =
            |process: &str, thread: &str, state: &str, class, user: &str, kernel: &str, ns, ages: &[u64]| Stack {
                labels: [("process", process), ("thread", thread), ("pid", "7")]
                    .map(|(k, v)| (k.into(), v.into()))
                    .into(),
                state: state.to_owned(),
                samples: ns / 100_000_000,
                weight_ns: ns,
                wait: Some(Wait { class, rule: "because".to_owned() }),
                user: names(user),
                kernel: names(kernel),
                age: ages.iter().copied().collect(),
                ..Stack::default()
            };
        let s = 1_000_000_000;
        snapshot.stacks = vec![
            stack(
                "db",
                "worker",
                "S",
                WaitClass::Lock,
                "futex lock work start",
                "futex_wait do_futex",
                6 * s,
                &[s, 5 * s],
            ),
            stack("db", "worker", "S", WaitClass::Idle, "poll work start", "do_poll", 4 * s, &[s]),
            stack(EVIL, EVIL, "D", WaitClass::Disk, "read main", "io_schedule", 2 * s, &[40 * s]),
            stack("db", "worker", "R", WaitClass::OnCpu, "", "", s, &[]),
        ];
        snapshot
    }

    /// Returns many processes with short waits, idle kernel threads, and a service with runnable threads.
    pub fn crowd() -> Snapshot {
        let mut snapshot = snapshot();
        snapshot.stacks.clear();
        let stack = |process: &str, class, frames: &str, ns: u64| Stack {
            labels: [("process", process), ("thread", process), ("pid", "7")].map(|(k, v)| (k.into(), v.into())).into(),
            state: if matches!(class, WaitClass::Cpu | WaitClass::Throttled) { "R" } else { "S" }.to_owned(),
            samples: 1,
            waits: ns / 100_000_000,
            weight_ns: ns,
            wait: Some(Wait { class, rule: "because".to_owned() }),
            kernel: names(frames),
            age: [ns].into_iter().collect(),
            ..Stack::default()
        };
        let ms = 1_000_000;
        for number in 0..150_u64 {
            let mut idle = stack(&format!("kworker/{number}"), WaitClass::Idle, "worker_thread kthread", 1000 * ms);
            idle.labels.insert("kernel".to_owned(), "yes".to_owned());
            snapshot.stacks.push(idle);
        }
        for number in 0..30_u64 {
            let name = format!("daemon{number}");
            snapshot.stacks.push(stack(&name, WaitClass::Idle, "do_poll", (700 - 20 * number) * ms));
            snapshot.stacks.push(stack(
                "service",
                WaitClass::Throttled,
                &format!("preempt_{number} irqentry_exit"),
                300 * ms,
            ));
        }
        snapshot.stacks.push(stack("service", WaitClass::Timer, "do_nanosleep", 16_000 * ms));
        snapshot.stacks.push(stack("service", WaitClass::Cpu, "do_nanosleep", 44_000 * ms));
        snapshot.stacks.push(stack("service", WaitClass::OnCpu, "", 7_000 * ms));
        snapshot.stacks.push(stack("spins", WaitClass::OnCpu, "", 2_000 * ms));
        snapshot
    }
}
