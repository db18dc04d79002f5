// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares each backend of `whylate irqsoff` with delays of known length, in a virtual machine with a kernel that has
//! the events, the tracers and a module that makes the delays.

use anyhow::{Result, ensure};
use whylate_model::{LateEvent, Snapshot};

use crate::results::{Arguments, Section};
use crate::table::{Figure, median};
use crate::vm;

const KERNEL: &str = "6.12-tracers";
/// Delays, kinds of delays and backends of the script, of which one backend does not measure one kind.
const MEASURED: usize = 4 * (2 * 4 - 1);
/// Suffix of a backend that measures all CPUs, the default. The others measure the CPU with the delays only.
const ALL_CPUS: &str = "-all";
/// Gives the module and the backends one clock: on a busy host the kernel calibrates each wrongly.
const ONE_CLOCK: &str = "tsc=reliable clocksource=tsc";
/// Part of the names of the module's functions that make a delay.
const MAKER: &str = "preemptirqtest";
/// Maximum error of the median length by exact backends: one of the two.
const APART_PERCENT: f64 = 2.0;
const APART_US: f64 = 20.0;

/// What a backend reported of the delays of one kind.
#[derive(Clone, Debug, Default)]
struct Row {
    backend: String,
    mode: String,
    length_us: u64,
    /// Reported length less the real one, per delay.
    errors_us: Vec<f64>,
    /// How many name the function that made the delay; all of them, for exact lengths.
    named: usize,
    /// For backends with an upper bound: how many delays lie between the bounds.
    within: Option<usize>,
    /// Other sections that were at least as long.
    longer: usize,
    function: String,
    lost: u64,
}

pub fn run(arguments: &Arguments) -> Result<bool> {
    let times = arguments.rounds as usize;
    let before = ["--timeout", "3000", "--append", ONE_CLOCK, "--"];
    let text = vm::run(KERNEL, &before, include_str!("irqsoff_vm.sh"), &[&times.to_string()])?;
    let rows = rows(&text)?;
    ensure!(rows.len() == MEASURED, "{} of {MEASURED} were measured", rows.len());
    let title = "Interrupts and preemption that are off for a known time, in a virtual machine";
    let command = format!("irqsoff-vm --rounds {times}");
    Section::new(arguments, "irqsoff-vm", title, "bench-irqsoff-vm", &command)
        .fact(&format!("in the machine: Linux {KERNEL}, CPUs that QEMU emulates"))
        .figures(figures(&rows, times))
        .text(&format!(
            "The kernel's `preemptirq_delay_test` makes {times} delays of each kind on one CPU. \"Error\" is the reported length less the \
             requested one; a CPU that the host stops makes a delay longer. `ticks` reports bounds: its error is that of the \
             lower one, and the delay has to lie between both; a delay that is shorter than its period of 1 ms is seen by chance, \
             and the time of delivering an interrupt is subtracted, which is much in an emulator. All measure the CPU of the delays \
             (`-c 1`), but for `tracer{ALL_CPUS}`, which measures both, as it does by default. The tracer keeps the longest section alone, and \
             drops one during which another CPU that it measures had a longer one: \"longer\" is the number of reported sections of others \
             that were at least as long, which hide delays from it. Emulated CPUs stop all the time."
        ))
        .lines(
            "backend | off | >delay (us) | >reported | function | within bounds | >median error (us) | >worst error (us) | >longer | >lost",
            rows.iter().map(|row| row.cells(times)),
        )
        .row("ticks | preempt | any | cannot know: its timer comes in where preemption is off | | | | | |")
        .publish()
}

fn rows(text: &str) -> Result<Vec<Row>> {
    let parse = |(words, rest): (Vec<&str>, _)| {
        let [backend, mode, length_us] = words[..] else { return None };
        Some(row(backend, mode, length_us.parse().ok()?, rest))
    };
    vm::parts(text).filter_map(parse).collect()
}

fn row(backend: &str, mode: &str, length_us: u64, json: &str) -> Result<Row> {
    let mut row = Row { backend: backend.to_owned(), mode: mode.to_owned(), length_us, ..Row::default() };
    let mut snapshots = 0;
    for line in json.lines().filter(|line| line.starts_with('{')) {
        let snapshot: Snapshot = serde_json::from_str(line)?;
        let wanted = backend.trim_end_matches(ALL_CPUS);
        ensure!(snapshot.backend == wanted, "{} measured, not {wanted}", snapshot.backend);
        snapshots += 1;
        // `late_events` counts events that did not fit into a line, or were not read in time.
        let reasons = ["traces", "late_events", "unseen"];
        row.lost += reasons.iter().filter_map(|reason| snapshot.lost.get(*reason)).sum::<u64>();
        snapshot.late.iter().for_each(|event| row.add(event));
    }
    ensure!(snapshots > 0, "{backend} printed nothing");
    Ok(row)
}

impl Row {
    fn add(&mut self, event: &LateEvent) {
        let label = |name: &str| event.labels.get(name).map_or("", String::as_str);
        let latency_us = event.latency_ns as f64 / 1e3;
        let length_us = self.length_us as f64;
        let is_of_thread = label("task").starts_with(&format!("{}_test:", self.mode));
        // A backend with exact lengths also reports sections of interrupts that came in during a delay.
        let is_delay = match event.at_most_ns {
            Some(_) => event.stack.iter().any(|frame| frame.contains(MAKER)),
            None => label("function").contains(MAKER),
        };
        if !is_of_thread || !is_delay {
            self.longer += usize::from(latency_us >= length_us);
            return;
        }
        self.errors_us.push(latency_us - length_us);
        if label("function").contains(MAKER) {
            self.named += 1;
            self.function = label("function").to_owned();
        }
        if let Some(at_most_ns) = event.at_most_ns {
            let is_within = latency_us <= length_us + self.allowed_us() && at_most_ns as f64 / 1e3 >= length_us;
            *self.within.get_or_insert(0) += usize::from(is_within);
        }
    }

    fn worst_us(&self) -> f64 {
        self.errors_us.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0)
    }

    fn allowed_us(&self) -> f64 {
        APART_US.max(self.length_us as f64 * APART_PERCENT / 100.0)
    }

    fn cells(&self, times: usize) -> String {
        let Row { backend, mode, length_us, errors_us, named, function, longer, lost, .. } = self;
        let reported = errors_us.len();
        let within = self.within.map_or_else(|| "exact".to_owned(), |within| format!("{within} of {reported}"));
        let about = match reported {
            0 => "none |  |  | ".to_owned(),
            _ => format!("`{function}` in {named} | {within} | {:.1} | {:.1}", median(errors_us), self.worst_us()),
        };
        format!("{backend} | {mode} | {length_us} | {reported} of {times} | {about} | {longer} | {lost}")
    }
}

/// Returns the figures with limits: those of the backends with exact lengths.
fn figures(rows: &[Row], times: usize) -> Vec<Figure> {
    let exact = rows.iter().filter(|row| row.backend != "ticks" && !row.backend.ends_with(ALL_CPUS));
    let errors = exact.map(|row| {
        let name = format!("median error of `{}`, {} us, {} (us)", row.backend, row.length_us, row.mode);
        let error_us = if row.errors_us.is_empty() { f64::NAN } else { median(&row.errors_us).abs() };
        Figure::new(name, error_us, 1).at_most(row.allowed_us())
    });
    let events = rows.iter().filter(|row| row.backend == "events");
    let missed = events.clone().map(|row| times.abs_diff(row.errors_us.len())).sum::<usize>();
    let name = format!("delays that `events` missed, of {}", events.count() * times);
    errors.chain([Figure::new(name, missed as f64, 0).at_most(0.0)]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "2026-01-01T00:00:00.000Z";

    #[test]
    fn distinguishes_delays_from_other_sections() {
        let event = |task: &str, function: &str, ns: u64| {
            let labels = format!(r#"{{"task":"{task}","function":"{function}"}}"#);
            format!(r#"{{"labels":{labels},"at":"{START}","latency_ns":{ns},"cpu":1,"stack":["{function}"]}}"#)
        };
        let late =
            [event("irq_test:7", "execute_preemptirqtest", 1_010_000), event("sh:8", "other", 2_000_000)].join(",");
        let line = format!(
            r#"{{"schema":1,"source":"irqsoff","backend":"events","host":"","start":"{START}","duration_ns":1,"series":[],"late":[{late}],"lost":{{}},"probe":{{"run_ns":0,"runs":0}}}}"#
        );
        let rows = rows(&format!("@ events irq 1000\n{line}\n@ end\n")).expect("read");
        assert_eq!(
            rows[0].cells(1),
            "events | irq | 1000 | 1 of 1 | `execute_preemptirqtest` in 1 | exact | 10.0 | 10.0 | 1 | 0"
        );
        assert!(figures(&rows, 1).iter().all(Figure::is_within) && (rows[0].allowed_us() - 20.0).abs() < 1e-9);
        assert!(!figures(&rows, 2)[1].is_within());
    }
}
