// SPDX-License-Identifier: MIT OR Apache-2.0
//! Advice on long sections with interrupts disabled.

use crate::units::format_ns;
use crate::{Histogram, LateEvent, Series, Snapshot};

/// Minimum delay to advise on.
const MIN_ADVISED_NS: u64 = 1_000_000;

/// Prefixes of functions that write to consoles or hold the console lock (kernel/printk, drivers/tty/serial).
const CONSOLE: [&str; 8] = [
    "console_unlock",
    "console_flush_all",
    "console_emit_next_record",
    "console_trylock_spinning",
    "uart_console_write",
    "nbcon_",
    "serial8250_console_",
    "vprintk_emit",
];
/// Suffix of the drivers' write functions.
const CONSOLE_DRIVER: &str = "_console_write";

/// Returns advice, most important first, from a snapshot and the latest events of its span. `console_level` is the
/// kernel's current log level, if known.
pub fn advice(snapshot: &Snapshot, late: &[LateEvent], console_level: Option<u32>) -> Vec<String> {
    let sentences = [
        console(snapshot, late, console_level),
        handlers(snapshot),
        calls(snapshot),
        steal(snapshot),
        machine(snapshot),
    ];
    sentences.into_iter().flatten().collect()
}

fn of_kind<'a>(snapshot: &'a Snapshot, kind: &'a str) -> impl Iterator<Item = (&'a Series, &'a Histogram)> {
    let is_of_kind = move |series: &&Series| series.labels.get("kind").is_some_and(|found| found == kind);
    snapshot.series.iter().filter(is_of_kind).filter_map(|series| Some((series, series.histograms.get("length")?)))
}

fn writes_to_console(frame: &str) -> bool {
    let function = frame.split(['+', ' ']).next().unwrap_or_default();
    CONSOLE.iter().any(|name| function.starts_with(name)) || function.ends_with(CONSOLE_DRIVER)
}

fn console(snapshot: &Snapshot, late: &[LateEvent], level: Option<u32>) -> Option<String> {
    let late = late.iter().flat_map(|event| [(&event.stack, event.latency_ns), (&event.inside, event.latency_ns)]);
    let summed = snapshot.stacks.iter().map(|stack| (&stack.kernel, stack.weight_ns / stack.samples.max(1)));
    let longest_ns = late.chain(summed).filter(|(frames, _)| frames.iter().any(|frame| writes_to_console(frame)));
    let named = of_kind(snapshot, "irqs_off").filter(|(series, _)| {
        ["function", "caller"].iter().any(|label| series.labels.get(*label).is_some_and(|name| writes_to_console(name)))
    });
    let longest_ns = longest_ns.map(|(_, ns)| ns).chain(named.map(|(_, length)| length.max_ns())).max()?;
    // The console lock is also taken with interrupts disabled when nothing is written.
    if longest_ns < MIN_ADVISED_NS {
        return None;
    }
    let now = level.map_or_else(String::new, |level| format!(", now {level}"));
    Some(format!(
        "console output keeps interrupts off, for {} or longer: lower the console log level (dmesg -n 1){now}; \
         drop console= on a slow line",
        format_ns(longest_ns)
    ))
}

/// Returns whether the interrupt is an IPI for a function call on another CPU.
fn is_call_ipi(handler: &str) -> bool {
    handler.starts_with("call_function") || handler.contains("Function call")
}

fn handlers(snapshot: &Snapshot) -> Option<String> {
    let own = of_kind(snapshot, "irq").filter_map(|(series, length)| Some((series.labels.get("handler")?, length)));
    let (handler, length) = own.filter(|(name, _)| !is_call_ipi(name)).max_by_key(|(_, length)| length.max_ns())?;
    (length.max_ns() >= MIN_ADVISED_NS).then(|| {
        format!(
            "the handler {handler} runs for {} with interrupts off: give it a thread (boot with threadirqs), or serve \
             its interrupt on another CPU (/proc/irq)",
            format_ns(length.max_ns())
        )
    })
}

fn calls(snapshot: &Snapshot) -> Option<String> {
    let calls = of_kind(snapshot, "irq")
        .filter(|(series, _)| series.labels.get("handler").is_some_and(|name| is_call_ipi(name)));
    let count: u64 = calls.map(|(_, length)| length.count()).sum();
    (count > 0).then(|| {
        format!(
            "calls of other CPUs (IPIs) made interrupts late {}: isolate CPUs from those that change memory maps or kernel code",
            if count == 1 { "once".to_owned() } else { format!("{count} times") }
        )
    })
}

fn steal(snapshot: &Snapshot) -> Option<String> {
    let longest_ns = of_kind(snapshot, "steal").map(|(_, length)| length.max_ns()).max()?;
    (longest_ns >= MIN_ADVISED_NS).then(|| {
        format!(
            "the hypervisor ran for {} in place of this machine: no setting in here helps; give this machine processors of its own",
            format_ns(longest_ns)
        )
    })
}

fn machine(snapshot: &Snapshot) -> Option<String> {
    // Possible steal time allows no conclusion.
    let of_machine = of_kind(snapshot, "unknown").filter(|(series, _)| !series.labels.contains_key("handler"));
    let longest_ns = of_machine.map(|(_, length)| length.max_ns()).max()?;
    (longest_ns >= MIN_ADVISED_NS).then(|| {
        format!(
            "user code ran, and an interrupt was late by {}: the firmware (SMI) or a hypervisor that \
             reports no steal time took the CPU; the hwlat tracer shows more",
            format_ns(longest_ns)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Labels, Stack};

    fn snapshot(series: &[(&[(&str, &str)], u64)]) -> Snapshot {
        let mut snapshot = Snapshot::new("irqsoff", "ticks", "host", 0);
        for (labels, length_ns) in series {
            let labels: Labels = labels.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
            let length: Histogram = [*length_ns].into_iter().collect();
            snapshot.series.push(Series {
                labels,
                histograms: [("length".to_owned(), length)].into(),
                ..Series::default()
            });
        }
        snapshot
    }

    #[test]
    fn detects_console_by_any_frame() {
        let held = &[
            ("kind", "irqs_off"),
            ("function", "_raw_spin_unlock_irqrestore"),
            ("caller", "serial8250_console_write"),
        ][..];
        let sentences = advice(&snapshot(&[(held, 11_000_000)]), &[], Some(7));
        assert_eq!(sentences.len(), 1);
        assert!(sentences[0].contains("11.0ms") && sentences[0].contains("now 7"), "{sentences:?}");
        assert!(advice(&snapshot(&[(held, 200_000)]), &[], Some(1)).is_empty());
        let mut by_stack = snapshot(&[(&[("kind", "irqs_off"), ("function", "a"), ("caller", "b")][..], 5_000_000)]);
        assert!(advice(&by_stack, &[], None).is_empty());
        let kernel = ["a", "b", "console_unlock", "vprintk_emit"].map(str::to_owned).to_vec();
        by_stack.stacks.push(Stack { samples: 2, weight_ns: 10_000_000, kernel, ..Stack::default() });
        let sentences = advice(&by_stack, &[], None);
        assert!(
            sentences.len() == 1 && sentences[0].contains("5.00ms") && !sentences[0].contains("now"),
            "{sentences:?}"
        );
    }

    #[test]
    fn each_kind_has_advice_above_threshold() {
        let kinds: [&[(&str, &str)]; 4] = [
            &[("kind", "irq"), ("handler", "nvme0q1")],
            &[("kind", "irq"), ("handler", "call_function_single")],
            &[("kind", "steal")],
            &[("kind", "unknown")],
        ];
        let long = advice(&snapshot(&kinds.map(|labels| (labels, 3_000_000))), &[], None);
        for (sentence, part) in long.iter().zip(["nvme0q1", "IPIs", "hypervisor", "SMI"]) {
            assert!(sentence.contains(part), "{sentence}");
        }
        assert_eq!(long.len(), 4);
        let short = advice(&snapshot(&kinds.map(|labels| (labels, 200_000))), &[], None);
        assert_eq!(short.len(), 1, "{short:?}");
    }
}
