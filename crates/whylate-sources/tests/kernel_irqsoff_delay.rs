// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interrupts and preemption that the kernel's own test module disables for a known time, by each backend. Runs as
//! root, where the module exists.

mod support;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use support::machine::cpus::{TestCpus, pin_to};
use support::machine::lock::lock_machine;
use support::oracles::chance::in_rounds;
use whylate_model::LateEvent;
use whylate_sources::irqsoff::{IrqsoffOptions, What};
use whylate_sources::kernel::tracefs;
use whylate_sources::{Session, Source as _};

const MODULE: &str = "/lib/modules/preemptirq_delay_test.ko";
const TRIGGER: &str = "/sys/kernel/preemptirq_delay_test/trigger";
const LENGTHS_US: [u64; 4] = [500, 1_000, 5_000, 20_000];
/// Number of delays; loading the module makes the first.
const TIMES: usize = 15;
/// Maximum time until a delay is reported: an emulated machine is slow.
const TIMEOUT: Duration = Duration::from_millis(500);

/// The loaded module, unloaded on drop.
struct Module;

impl Module {
    fn load(mode: &str, length_us: u64, cpu: u32) -> Result<Self> {
        let parameters = [format!("test_mode={mode}"), format!("delay={length_us}"), format!("cpu_affinity={cpu}")];
        let status = Command::new("insmod").arg(MODULE).args(parameters).status()?;
        ensure!(status.success(), "insmod failed: {status}");
        Ok(Module)
    }

    fn trigger(&self) -> Result<()> {
        fs::write(TRIGGER, "1").context("cannot trigger the module")
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // The next load fails, and says why, if it is still there.
        let _ = Command::new("rmmod").arg("preemptirq_delay_test").status();
    }
}

/// Returns `None`, and prints why, without the module.
fn module_is_there() -> Option<()> {
    if Path::new(MODULE).exists() {
        return Some(());
    }
    println!("skipped: this kernel has no {MODULE} (cargo xtask kernels builds one that has)");
    None
}

#[derive(Clone, Copy)]
struct Case {
    backend: &'static str,
    what: What,
    length_us: u64,
}

impl Case {
    fn mode(self) -> &'static str {
        if self.what == What::Irqs { "irq" } else { "preempt" }
    }

    /// Returns the events of the module's `TIMES` delays, and how often a longer section was reported instead.
    fn run(self, test_cpus: TestCpus) -> Result<(Vec<LateEvent>, usize)> {
        let Case { backend, what, length_us } = self;
        let length_ns = length_us * 1_000;
        let options = IrqsoffOptions {
            backend: Some(backend.to_owned()),
            what,
            late_over_ns: Some(length_ns / 2),
            // On an emulated CPU all is long: the tracer would be busy with other sections.
            from_ns: length_ns / 2,
            ..IrqsoffOptions::default()
        };
        pin_to(test_cpus.tool)?;
        let mut source = options.attach(&Session::of_one())?;
        let (mut events, mut hidden) = (Vec::new(), 0);
        let mut module = None;
        let thread = format!("{}_test:", self.mode());
        for _ in 0..TIMES {
            // So that two maxima stay separate.
            thread::sleep(Duration::from_millis(15));
            source.drain_late(Duration::ZERO, &mut |_| {})?;
            match &module {
                None => module = Some(Module::load(self.mode(), length_us, test_cpus.disturbed)?),
                Some(module) => module.trigger()?,
            }
            let (began, seen) = (Instant::now(), events.len());
            let mut longest_ns = 0;
            while events.len() == seen && began.elapsed() < TIMEOUT {
                source.drain_late(Duration::from_millis(20), &mut |event| {
                    // An interrupt during the delay does not count.
                    let is_named = event.labels.get("function").is_some_and(|name| name.contains("preemptirqtest"));
                    let is_of_module = event.labels.get("task").is_some_and(|task| task.starts_with(&thread));
                    if is_of_module && event.cpu == test_cpus.disturbed && is_named {
                        events.push(event);
                    } else {
                        longest_ns = longest_ns.max(event.latency_ns);
                    }
                })?;
            }
            hidden += usize::from(events.len() == seen && longest_ns > length_ns);
        }
        let snapshot = source.snapshot()?;
        println!("{backend} {}: lost {:?}", self.mode(), snapshot.lost);
        ensure!(snapshot.backend == backend, "the backend is {}", snapshot.backend);
        let longest_ns = events.iter().map(|event| event.latency_ns).max().unwrap_or(0);
        let counted_ns =
            snapshot.series.iter().filter_map(|series| Some(series.histograms.get("length")?.max_ns())).max();
        ensure!(counted_ns >= Some(longest_ns), "{longest_ns} ns are reported, and at most {counted_ns:?} counted");
        Ok((events, hidden))
    }

    /// Prints a row of a table, and checks the reported delays.
    fn check(self, test_cpus: TestCpus) -> Result<()> {
        let (events, hidden) = self.run(test_cpus)?;
        let length_ns = self.length_us * 1_000;
        let mut errors_ns: Vec<i64> = events.iter().map(|event| event.latency_ns as i64 - length_ns as i64).collect();
        errors_ns.sort_by_key(|error| error.abs());
        let of = |length: Option<&i64>| length.copied().unwrap_or(i64::MAX);
        let (median_ns, worst_ns) = (of(errors_ns.get(errors_ns.len() / 2)), of(errors_ns.last()));
        let function = events.first().and_then(|event| event.labels.get("function")).cloned().unwrap_or_default();
        println!(
            "row | {} | {} | {} | {} of {TIMES} | {:.1} | {:.1} | {function} |",
            self.backend,
            self.mode(),
            self.length_us,
            events.len(),
            median_ns as f64 / 1e3,
            worst_ns as f64 / 1e3
        );
        // The tracer reports the longest section of 10 ms, and an emulated CPU that stops makes long ones.
        let may_hide = self.backend == "tracer";
        let reported = events.len() + if may_hide { hidden } else { 0 };
        ensure!(reported >= TIMES, "{} of {TIMES} are reported, {hidden} hidden", events.len());
        ensure!(events.len() * 2 > TIMES, "only {} of {TIMES} are reported, {hidden} hidden", events.len());
        ensure!(events.len() <= TIMES, "{} of {TIMES} are reported", events.len());
        let allowed_ns = 20_000.max(length_ns as i64 / 50);
        ensure!((0..=allowed_ns).contains(&median_ns), "the length is {median_ns} ns off");
        Ok(())
    }
}

fn delays_are_reported(backend: &'static str) -> Result<()> {
    let (Some(()), Some(_lock), Some(test_cpus)) = (module_is_there(), lock_machine(), TestCpus::find()) else {
        return Ok(());
    };
    for what in [What::Irqs, What::Preemption] {
        for length_us in LENGTHS_US {
            // An emulated CPU may stop at any time.
            in_rounds(|| Case { backend, what, length_us }.check(test_cpus))?;
        }
    }
    Ok(())
}

#[test]
fn events_report_each_delay() -> Result<()> {
    delays_are_reported("events")
}

#[test]
fn tracer_in_use_is_reported_and_left_alone() -> Result<()> {
    let Some(_lock) = lock_machine() else { return Ok(()) };
    let directory = tracefs::find()?;
    let other = directory.join("instances/somebody-else");
    fs::create_dir(&other)?;
    let outcome = (|| {
        if fs::write(other.join("current_tracer"), "preemptirqsoff").is_err() {
            println!("skipped: this kernel has no preemptirqsoff tracer");
            return Ok(());
        }
        let options = IrqsoffOptions { backend: Some("tracer".to_owned()), ..IrqsoffOptions::default() };
        let Err(error) = options.attach(&Session::of_one()) else { bail!("two have the tracer") };
        let reported = error.to_string();
        ensure!(reported.contains("somebody-else uses the preemptirqsoff tracer"), "{reported}");
        ensure!(reported.ends_with("current_tracer)"), "{reported}");
        ensure!(fs::read_to_string(other.join("current_tracer"))?.trim() == "preemptirqsoff", "it was changed");
        let ours = fs::read_dir(directory.join("instances"))?.flatten();
        let left = ours.filter(|entry| entry.file_name().to_string_lossy().starts_with("whylate-")).count();
        ensure!(left == 0, "{left} instances are left");
        Ok(())
    })();
    fs::write(other.join("current_tracer"), "nop")?;
    fs::remove_dir(&other)?;
    outcome
}
