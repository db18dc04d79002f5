// SPDX-License-Identifier: MIT OR Apache-2.0
//! Compares each backend of `whylate irqsoff` with delays of known length, in a virtual machine with a kernel that has
//! the events, the tracers and a module that makes the delays.

use anyhow::{Result, ensure};
use whylate_model::{LateEvent, Snapshot};

use crate::figures::{Check, median};
use crate::{figures, results, vm};

const KERNEL: &str = "6.12-tracers";
const LENGTHS_US: [u64; 4] = [500, 1_000, 5_000, 20_000];
const MODES: [&str; 2] = ["irq", "preempt"];
const BACKENDS: [&str; 4] = ["events", "tracer", "tracer-all", "ticks"];
/// Suffix of a backend that measures all CPUs, the default. The others measure the CPU with the delays only.
const OF_ALL: &str = "-all";
/// Gives the module and the backends one clock: on a busy host the kernel calibrates each wrongly.
const ONE_CLOCK: &str = "tsc=reliable clocksource=tsc";
/// Part of the names of the module's functions that make a delay.
const MAKER: &str = "preemptirqtest";
/// Maximum error of the median length by exact backends: one of the two.
const APART_PERCENT: f64 = 2.0;
const APART_US: f64 = 20.0;

/// Runs each backend with each kind of delay. Pauses leave time to report a delay before the next; everything else runs
/// on the other CPU.
const SCRIPT: &str = r#"
    cd /tmp
    taskset -p 1 $$ >/dev/null
    one() {
        backend=$1 mode=$2 us=$3
        [ $mode = irq ] && what= || what=--preempt
        [ $backend = tracer-all ] && cpus= || cpus='-c 1'
        floor=$(($us / 2))us
        rm -f out
        whylate irqsoff $what --backend ${backend%-all} $cpus --json --slower $floor --from $floor --period 1ms 1 >out 2>err &
        measuring=$!
        # Its first line comes a second after its start.
        until [ -s out ]; do
            sleep 0.2
        done
        insmod /lib/modules/preemptirq_delay_test.ko test_mode=$mode delay=$us cpu_affinity=1
        for number in $(seq 2 $times); do
            usleep 50000
            echo 1 >/sys/kernel/preemptirq_delay_test/trigger
        done
        usleep 200000
        rmmod preemptirq_delay_test
        kill -INT $measuring
        wait $measuring || { cat err; exit 1; }
        echo "@ $backend $mode $us"
        cat out
    }
    times=$1
    for us in 500 1000 5000 20000; do
        for mode in irq preempt; do
            one events $mode $us
            one tracer $mode $us
            one tracer-all $mode $us
            # Its timer comes in with preemption off, too.
            [ $mode = preempt ] || one ticks $mode $us
        done
    done
    echo "@ end"
"#;

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

impl Row {
    fn median_us(&self) -> f64 {
        median(&self.errors_us)
    }

    fn worst_us(&self) -> f64 {
        self.errors_us.iter().copied().max_by(|a, b| a.abs().total_cmp(&b.abs())).unwrap_or(0.0)
    }

    /// Returns the cells about the reported delays.
    fn cells(&self) -> [String; 4] {
        if self.errors_us.is_empty() {
            return ["none", "", "", ""].map(str::to_owned);
        }
        let (reported, within) = (self.errors_us.len(), self.within);
        let within = within.map_or_else(|| "exact".to_owned(), |within| format!("{within} of {reported}"));
        let errors = [self.median_us(), self.worst_us()].map(|us| format!("{us:.1}"));
        let [median, worst] = errors;
        [format!("`{}` in {}", self.function, self.named), within, median, worst]
    }

    fn allowed_us(&self) -> f64 {
        APART_US.max(self.length_us as f64 * APART_PERCENT / 100.0)
    }
}

pub fn run(arguments: &results::Arguments) -> Result<bool> {
    let times = arguments.rounds as usize;
    let before = ["--timeout", "3000", "--append", ONE_CLOCK, "--"];
    let text = vm::run(KERNEL, &before, SCRIPT, &[&times.to_string()])?;
    let rows = rows(&text)?;
    let measured = LENGTHS_US.len() * (MODES.len() * BACKENDS.len() - 1);
    ensure!(rows.len() == measured, "{} of {measured} were measured", rows.len());
    let checks = checks(&rows, times);
    arguments.publish("irqsoff-vm", &markdown(&rows, &checks, times))?;
    Ok(checks.iter().all(Check::is_within))
}

fn rows(text: &str) -> Result<Vec<Row>> {
    let of_part = |(words, rest): (Vec<&str>, _)| {
        let [backend, mode, length_us] = words[..] else { return None };
        Some(row(backend, mode, length_us.parse().ok()?, rest))
    };
    vm::parts(text).filter_map(of_part).collect()
}

fn row(backend: &str, mode: &str, length_us: u64, json: &str) -> Result<Row> {
    let mut row = Row { backend: backend.to_owned(), mode: mode.to_owned(), length_us, ..Row::default() };
    let mut snapshots = 0;
    for line in json.lines().filter(|line| line.starts_with('{')) {
        let snapshot: Snapshot = serde_json::from_str(line)?;
        let wanted = backend.trim_end_matches(OF_ALL);
        ensure!(snapshot.backend == wanted, "{} measured, not {wanted}", snapshot.backend);
        snapshots += 1;
        // `late_events` counts events that did not fit into a line, or were not read in time.
        row.lost +=
            ["traces", "late_events", "unseen"].iter().filter_map(|reason| snapshot.lost.get(*reason)).sum::<u64>();
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
}

/// Checks the backends with exact lengths.
fn checks(rows: &[Row], times: usize) -> Vec<Check> {
    let exact = rows.iter().filter(|row| row.backend != "ticks" && !row.backend.ends_with(OF_ALL));
    let errors = exact.map(|row| {
        let name = format!("median error of `{}`, {} us, {} (us)", row.backend, row.length_us, row.mode);
        let error_us = if row.errors_us.is_empty() { f64::MAX } else { row.median_us().abs() };
        Check::new(name, error_us, "", row.allowed_us())
    });
    let events = rows.iter().filter(|row| row.backend == "events");
    let missed = events.clone().map(|row| times.abs_diff(row.errors_us.len())).sum::<usize>();
    let name = format!("delays that `events` missed, of {}", events.count() * times);
    errors.chain([Check::new(name, missed as f64, "", 0.0)]).collect()
}

fn markdown(rows: &[Row], checks: &[Check], times: usize) -> String {
    let title = "Interrupts and preemption that are off for a known time, in a virtual machine";
    let mut text = results::heading(title, "bench-irqsoff-vm", &format!("irqsoff-vm --rounds {times}"));
    text += &format!("- in the machine: Linux {KERNEL}, CPUs that QEMU emulates\n{}", figures::table(checks, [1, 1]));
    text += &format!(
        "\nThe kernel's `preemptirq_delay_test` makes {times} delays of each kind on one CPU. \"Error\" is what is told less the length \
         that was asked for; a CPU that the host stops meanwhile makes a delay longer. `ticks` tells bounds: its error is that of the \
         lower one, and the delay has to lie between both; a delay that is shorter than its period of 1 ms is seen by chance, \
         and what delivering an interrupt takes is taken off, which is much in an emulator. All measure the CPU of the delays \
         (`-c 1`), but for `tracer{OF_ALL}`, which measures both, as it does unasked. The tracer keeps the longest section alone, and \
         drops one during which another CPU that it measures had a longer one: \"longer\" is how many sections of others at least as \
         long were told meanwhile, which hide delays from it. Emulated CPUs stop all the time.\n\n\
         | backend | off | delay (us) | told | function | within bounds | median error (us) | worst error (us) | longer | lost |\n\
         |---|---|--:|--:|---|--:|--:|--:|--:|--:|\n"
    );
    for row in rows {
        let Row { backend, mode, length_us, errors_us, longer, lost, .. } = row;
        let (told, cells) = (errors_us.len(), row.cells().join(" | "));
        text += &format!("| {backend} | {mode} | {length_us} | {told} of {times} | {cells} | {longer} | {lost} |\n");
    }
    text += "| ticks | preempt | any | cannot tell: its timer comes in where preemption is off | | | | | | |\n";
    text
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
        let told: Vec<_> = rows.iter().map(|row| (row.errors_us.len(), row.named, row.longer)).collect();
        assert_eq!(told, [(1, 1, 1)]);
        assert!((rows[0].median_us() - 10.0).abs() < 1e-9 && (rows[0].allowed_us() - 20.0).abs() < 1e-9);
    }
}
