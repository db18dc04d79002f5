// SPDX-License-Identifier: MIT OR Apache-2.0
//! Interrupts and preemption that the kernel's own test module keeps off for a known time, by each backend. They run as
//! root, where the module is.

mod kernel;

use std::fs;
use std::path::Path;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use kernel::chance::in_rounds;
use kernel::late::{Places, stay_on};
use kernel::turn::turn_to_measure;
use whylate_model::LateEvent;
use whylate_sources::irqsoff::{IrqsoffOptions, What};
use whylate_sources::{Session, Source as _, tracefs};

const MODULE: &str = "/lib/modules/preemptirq_delay_test.ko";
const TRIGGER: &str = "/sys/kernel/preemptirq_delay_test/trigger";
const LENGTHS_US: [u64; 4] = [500, 1_000, 5_000, 20_000];
/// The first when the module is loaded.
const TIMES: usize = 15;
/// How long a delay may take to be told: an emulated machine is slow.
const PATIENCE: Duration = Duration::from_millis(500);

/// The module, until it is dropped.
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
        // Whoever loads it the next time is told if it is still there.
        let _ = Command::new("rmmod").arg("preemptirq_delay_test").status();
    }
}

/// `None`, and a line that says why, where there is no module.
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

    /// What was told of the module while it kept either off `TIMES` times, and how often something longer was instead.
    fn run(self, places: Places) -> Result<(Vec<LateEvent>, usize)> {
        let Case { backend, what, length_us } = self;
        let length_ns = length_us * 1_000;
        let options = IrqsoffOptions {
            backend: Some(backend.to_owned()),
            what,
            late_over_ns: Some(length_ns / 2),
            // On an emulated CPU all is long: the tracer would be busy with what is not asked for.
            from_ns: length_ns / 2,
            ..IrqsoffOptions::default()
        };
        stay_on(places.tool)?;
        let mut source = options.attach(&Session::of_one())?;
        let (mut events, mut hidden) = (Vec::new(), 0);
        let mut module = None;
        let thread = format!("{}_test:", self.mode());
        for _ in 0..TIMES {
            // So that two maxima are not one.
            thread::sleep(Duration::from_millis(15));
            source.drain_late(Duration::ZERO, &mut |_| {})?;
            match &module {
                None => module = Some(Module::load(self.mode(), length_us, places.disturbed)?),
                Some(module) => module.trigger()?,
            }
            let (began, seen) = (Instant::now(), events.len());
            let mut longest_ns = 0;
            while events.len() == seen && began.elapsed() < PATIENCE {
                source.drain_late(Duration::from_millis(20), &mut |event| {
                    // An interrupt that comes in there is none of it.
                    let is_named = event.labels.get("function").is_some_and(|name| name.contains("preemptirqtest"));
                    let is_of_module = event.labels.get("task").is_some_and(|task| task.starts_with(&thread));
                    if is_of_module && event.cpu == places.disturbed && is_named {
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
        ensure!(counted_ns >= Some(longest_ns), "{longest_ns} ns are told, and at most {counted_ns:?} counted");
        Ok((events, hidden))
    }

    /// A row of a table: what is told of the delays.
    fn check(self, places: Places) -> Result<()> {
        let (events, hidden) = self.run(places)?;
        let length_ns = self.length_us * 1_000;
        let mut errors_ns: Vec<i64> = events.iter().map(|event| event.latency_ns as i64 - length_ns as i64).collect();
        errors_ns.sort_by_key(|error| error.abs());
        let of = |place: Option<&i64>| place.copied().unwrap_or(i64::MAX);
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
        // The tracer tells the longest section of 10 ms, and an emulated CPU that stops makes long ones.
        let may_hide = self.backend == "tracer";
        let told = events.len() + if may_hide { hidden } else { 0 };
        ensure!(told >= TIMES, "{} of {TIMES} are told, {hidden} hidden", events.len());
        ensure!(events.len() * 2 > TIMES, "only {} of {TIMES} are told, {hidden} hidden", events.len());
        ensure!(events.len() <= TIMES, "{} of {TIMES} are told", events.len());
        let allowed_ns = 20_000.max(length_ns as i64 / 50);
        ensure!((0..=allowed_ns).contains(&median_ns), "the length is {median_ns} ns off");
        Ok(())
    }
}

fn delays_are_told(backend: &'static str) -> Result<()> {
    let (Some(()), Some(_turn), Some(places)) = (module_is_there(), turn_to_measure(), Places::find()) else {
        return Ok(());
    };
    for what in [What::Irqs, What::Preemption] {
        for length_us in LENGTHS_US {
            // An emulated CPU may stop at any time.
            in_rounds(|| Case { backend, what, length_us }.check(places))?;
        }
    }
    Ok(())
}

#[test]
fn events_tell_each_delay() -> Result<()> {
    delays_are_told("events")
}

#[test]
fn a_tracer_in_use_is_told_and_left_alone() -> Result<()> {
    let Some(_turn) = turn_to_measure() else { return Ok(()) };
    let folder = tracefs::find()?;
    let other = folder.join("instances/somebody-else");
    fs::create_dir(&other)?;
    let outcome = (|| {
        if fs::write(other.join("current_tracer"), "preemptirqsoff").is_err() {
            println!("skipped: this kernel has no preemptirqsoff tracer");
            return Ok(());
        }
        let options = IrqsoffOptions { backend: Some("tracer".to_owned()), ..IrqsoffOptions::default() };
        let Err(error) = options.attach(&Session::of_one()) else { bail!("two have the tracer") };
        let told = error.to_string();
        ensure!(told.contains("somebody-else uses the preemptirqsoff tracer"), "{told}");
        ensure!(told.ends_with("current_tracer)"), "{told}");
        ensure!(fs::read_to_string(other.join("current_tracer"))?.trim() == "preemptirqsoff", "it was changed");
        let ours = fs::read_dir(folder.join("instances"))?.flatten();
        let left = ours.filter(|entry| entry.file_name().to_string_lossy().starts_with("whylate-")).count();
        ensure!(left == 0, "{left} instances are left");
        Ok(())
    })();
    fs::write(other.join("current_tracer"), "nop")?;
    fs::remove_dir(&other)?;
    outcome
}
