// SPDX-License-Identifier: MIT OR Apache-2.0
//! What to do about interrupts that are off, in plain language.

use crate::units::format_ns;
use crate::{Histogram, LateEvent, Series, Snapshot};

/// What is late by less is no reason to change anything.
const MATTERS_NS: u64 = 1_000_000;

/// How functions that write to consoles, or hold their lock meanwhile, are named (kernel/printk, drivers/tty/serial).
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
/// And how drivers name the function that writes.
const CONSOLE_DRIVER: &str = "_console_write";

/// Sentences for the user, the most important first, by a snapshot and the latest events of its span. `console_level`
/// is the kernel's present one, where it is known.
pub fn advice(snapshot: &Snapshot, late: &[LateEvent], console_level: Option<u32>) -> Vec<String> {
    let told = [
        console(snapshot, late, console_level),
        handlers(snapshot),
        calls(snapshot),
        steal(snapshot),
        machine(snapshot),
    ];
    told.into_iter().flatten().collect()
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
    // Its lock is taken with interrupts off too where nothing is written.
    if longest_ns < MATTERS_NS {
        return None;
    }
    let now = level.map_or_else(String::new, |level| format!(", now {level}"));
    Some(format!(
        "console output keeps interrupts off, for {} or longer: lower the console log level (dmesg -n 1){now}; \
         drop console= on a slow line",
        format_ns(longest_ns)
    ))
}

/// Interrupts through which CPUs call functions of each other.
fn is_call(handler: &str) -> bool {
    handler.starts_with("call_function") || handler.contains("Function call")
}

fn handlers(snapshot: &Snapshot) -> Option<String> {
    let own = of_kind(snapshot, "irq").filter_map(|(series, length)| Some((series.labels.get("handler")?, length)));
    let (handler, length) = own.filter(|(name, _)| !is_call(name)).max_by_key(|(_, length)| length.max_ns())?;
    (length.max_ns() >= MATTERS_NS).then(|| {
        format!(
            "the handler {handler} runs for {} with interrupts off: give it a thread (boot with threadirqs), or serve \
             its interrupt on another CPU (/proc/irq)",
            format_ns(length.max_ns())
        )
    })
}

fn calls(snapshot: &Snapshot) -> Option<String> {
    let calls =
        of_kind(snapshot, "irq").filter(|(series, _)| series.labels.get("handler").is_some_and(|name| is_call(name)));
    let count: u64 = calls.map(|(_, length)| length.count()).sum();
    (count > 0).then(|| {
        format!("{count} times other CPUs' calls (IPIs) made interrupts late: isolate CPUs from those that change memory maps \
             or kernel code"
        )
    })
}

fn steal(snapshot: &Snapshot) -> Option<String> {
    let longest_ns = of_kind(snapshot, "steal").map(|(_, length)| length.max_ns()).max()?;
    (longest_ns >= MATTERS_NS).then(|| {
        format!(
            "the hypervisor had the CPU for {}: no setting in here helps; give this machine processors of its own",
            format_ns(longest_ns)
        )
    })
}

fn machine(snapshot: &Snapshot) -> Option<String> {
    // Of what may be stolen, or may not, nothing can be said.
    let of_machine = of_kind(snapshot, "unknown").filter(|(series, _)| !series.labels.contains_key("handler"));
    let longest_ns = of_machine.map(|(_, length)| length.max_ns()).max()?;
    (longest_ns >= MATTERS_NS).then(|| {
        format!(
            "user code ran, and an interrupt was late by {}: the firmware (SMI) or a hypervisor that does not \
             tell had the CPU; the hwlat tracer tells more",
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
    fn a_console_is_known_by_any_frame() {
        let held = &[
            ("kind", "irqs_off"),
            ("function", "_raw_spin_unlock_irqrestore"),
            ("caller", "serial8250_console_write"),
        ][..];
        let told = advice(&snapshot(&[(held, 11_000_000)]), &[], Some(7));
        assert_eq!(told.len(), 1);
        assert!(told[0].contains("11.0ms") && told[0].contains("now 7"), "{told:?}");
        assert!(advice(&snapshot(&[(held, 200_000)]), &[], Some(1)).is_empty());
        let mut by_stack = snapshot(&[(&[("kind", "irqs_off"), ("function", "a"), ("caller", "b")][..], 5_000_000)]);
        assert!(advice(&by_stack, &[], None).is_empty());
        let kernel = ["a", "b", "console_unlock", "vprintk_emit"].map(str::to_owned).to_vec();
        by_stack.stacks.push(Stack { samples: 2, weight_ns: 10_000_000, kernel, ..Stack::default() });
        let told = advice(&by_stack, &[], None);
        assert!(told.len() == 1 && told[0].contains("5.00ms") && !told[0].contains("now"), "{told:?}");
    }

    #[test]
    fn each_kind_has_its_advice_where_it_matters() {
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
