// SPDX-License-Identifier: MIT OR Apache-2.0
//! How much longer a scheduler benchmark takes while `whylate irqsoff` watches, in a virtual machine: for what the
//! running kernel may lack, the preemptirq events and the irqsoff tracer.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};

use crate::figures::{Spread, first_quartile};
use crate::{results, vm};

const KERNEL: &str = "6.12-tracers";
/// The watchers, with the names of their rows.
const SUBJECTS: [(&str, &str); 5] = [
    ("events", "`whylate irqsoff --backend events`"),
    ("tracer", "`whylate irqsoff --backend tracer`"),
    ("bare", "the kernel's tracer `irqsoff` alone, `function-trace` off"),
    ("bpftrace", "bpftrace script on `preemptirq:irq_disable` and `irq_enable`"),
    ("ticks", "`whylate irqsoff --backend ticks`"),
];
/// Takes a second or two there.
const LOAD: &str = "perf bench sched messaging -g 1 -l 100";

/// A minimal script for the question.
const BPFTRACE: &str = "BEGIN { printf(\"ready\\n\"); } tracepoint:preemptirq:irq_disable { @start[cpu] = nsecs; } \
                        tracepoint:preemptirq:irq_enable /@start[cpu]/ { @length = hist(nsecs - @start[cpu]); delete(@start[cpu]); }";

/// Each watched run lies between two unwatched ones. The very first run fills caches.
const SCRIPT: &str = r#"
    cd /tmp
    instance=/sys/kernel/tracing/instances/bare
    load() {
        $LOAD >load.out 2>&1 || { cat load.out; exit 1; }
        echo "@ $1 $(sed -n 's/.*Total time: *\([0-9.]*\).*/\1/p' load.out)"
    }
    watched() {
        name=$1
        shift
        rm -f out
        "$@" >out 2>err &
        watcher=$!
        tries=0
        until [ -s out ]; do
            sleep 0.5
            tries=$((tries + 1))
            [ $tries -lt 240 ] || { cat err; exit 1; }
        done
        sleep 1
        load $name
        kill -INT $watcher
        wait $watcher || { cat err; exit 1; }
        sleep 1
    }
    bare_tracer() {
        mkdir $instance
        echo 0 >$instance/options/function-trace
        echo irqsoff >$instance/current_tracer
        load bare
        echo nop >$instance/current_tracer
        rmdir $instance
        sleep 1
    }
    one() {
        case $1 in
        bare) bare_tracer ;;
        bpftrace) watched bpftrace bpftrace -e "$SCRIPT" ;;
        *) watched $1 whylate irqsoff --backend $1 ;;
        esac
    }
    load first >/dev/null
    round=0
    while [ $round -lt $1 ]; do
        load nobody
        # The watchers take turns at being first.
        for turn in 0 1 2 3 4; do
            case $(((turn + round) % 5)) in
            0) one events ;;
            1) one tracer ;;
            2) one bare ;;
            3) one bpftrace ;;
            4) one ticks ;;
            esac
            load nobody
        done
        round=$((round + 1))
    done
    echo "@ end"
"#;

/// No figure has a limit: only the order of emulated figures means anything.
pub fn run(arguments: &results::Arguments) -> Result<bool> {
    let rounds = arguments.rounds;
    let samples = samples(rounds)?;
    let title = "What `whylate irqsoff` costs beside the kernel's tracer, in a virtual machine";
    let mut text = results::heading(title, "bench-irqsoff", &format!("irqsoff-vm-cost --rounds {rounds}"));
    text += &format!(
        "- in the machine: Linux {KERNEL}, CPUs that QEMU emulates, \
         which are slower for BPF programs than for the kernel: only the order of the watchers tells anything\n\
         \nSlowdown of `{LOAD}`, {rounds} rounds: each watched run is compared with the mean of the runs right before and right after \
         it, which nobody watches; the watchers take turns at being first. Medians; in brackets the smallest and the largest.\n\n\
         | watcher | slowdown | first quartile | limit | |\n|---|--:|--:|--:|---|\n"
    );
    for (key, name) in SUBJECTS {
        let of = samples.get(key).with_context(|| format!("{key} was not measured"))?;
        let slowdowns: Vec<f64> = of.iter().map(Sample::slowdown_percent).collect();
        let (Spread { median, min, max }, quartile) = (Spread::from_values(&slowdowns), first_quartile(&slowdowns));
        text += &format!("| {name} | {median:.2} % ({min:.2} to {max:.2}) | {quartile:.2} % | | |\n");
    }
    arguments.publish("irqsoff-vm-cost", &text)?;
    Ok(true)
}

/// A watched run, and the mean of the unwatched runs right before and right after it, in seconds.
#[derive(Clone, Copy, Debug)]
struct Sample {
    watched_s: f64,
    bare_s: f64,
}

impl Sample {
    fn slowdown_percent(&self) -> f64 {
        100.0 * (self.watched_s / self.bare_s - 1.0)
    }
}

/// Runs the script; returns the samples by subject.
fn samples(rounds: u32) -> Result<BTreeMap<String, Vec<Sample>>> {
    let (load, script) = (format!("LOAD={LOAD}"), format!("SCRIPT={BPFTRACE}"));
    let before = ["--timeout", "3000", "--with", "perf", "--with", "bpftrace", "--", &load, &script];
    let text = vm::run(KERNEL, &before, SCRIPT, &[&rounds.to_string()])?;
    ensure!(text.contains("@ end"), "the virtual machine failed: {text}");
    parse_lines(&text)
}

/// Parses lines such as `@ nobody 1.234` and `@ ticks 1.235`, in the order in which they ran.
fn parse_lines(text: &str) -> Result<BTreeMap<String, Vec<Sample>>> {
    let runs: Vec<(&str, f64)> = text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("@ ")?.split_once(' '))
        .map(|(name, seconds)| Ok((name, seconds.parse().with_context(|| format!("{name} tells no time: {seconds}"))?)))
        .collect::<Result<_>>()?;
    let mut samples: BTreeMap<String, Vec<Sample>> = BTreeMap::new();
    for neighbors in runs.windows(3) {
        if let [("nobody", before_s), (name, watched_s), ("nobody", after_s)] = *neighbors {
            samples.entry(name.to_owned()).or_default().push(Sample { watched_s, bare_s: (before_s + after_s) / 2.0 });
        }
    }
    Ok(samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compares_each_run_with_its_neighbors() {
        let samples =
            parse_lines("@ nobody 1.0\n@ ticks 2.2\nx\n@ nobody 1.2\n@ bare 3.3\n@ nobody 1.0\n@ end\n").expect("read");
        let slowdowns: Vec<(&str, f64)> =
            samples.iter().map(|(name, samples)| (name.as_str(), samples[0].slowdown_percent().round())).collect();
        assert_eq!(slowdowns, [("bare", 200.0), ("ticks", 100.0)]);
        assert!(parse_lines("@ nobody nothing\n@ ticks 1\n").is_err());
    }

    #[test]
    fn slowdown_is_relative_to_unwatched_runs() {
        let sample = Sample { watched_s: 1.02, bare_s: 1.0 };
        assert!((sample.slowdown_percent() - 2.0).abs() < 1e-9);
    }
}
