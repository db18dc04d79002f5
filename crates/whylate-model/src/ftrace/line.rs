// SPDX-License-Identifier: MIT OR Apache-2.0
//! One line of `trace` or `trace_pipe`: `comm-tid [cpu] flags seconds.micros: event: text`.

/// An event as ftrace prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Line<'a> {
    /// Name of the thread, `<...>` where the kernel had forgotten it.
    pub comm: &'a str,
    /// Its number.
    pub tid: u32,
    /// Where it ran.
    pub cpu: u32,
    /// In what context, a letter each; empty where that is left out.
    pub flags: &'a str,
    /// By the clock of the buffer.
    pub time_ns: u64,
    /// Name of the event; of `trace_printk()` the function that called it.
    pub event: &'a str,
    /// What it says.
    pub text: &'a str,
}

impl<'a> Line<'a> {
    /// `None` where it is no such line.
    pub fn parse(line: &'a str) -> Option<Self> {
        // A name may hold brackets and colons: the CPU is the first bracket that follows a thread's number.
        let brackets = line.match_indices(" [").take(8);
        brackets.map(|(at, _)| at).find_map(|at| Self::with_cpu_at(line, at, thread))
    }

    /// As `perf script` writes it: `comm tid [cpu] seconds.micros: group:event: text`.
    pub fn parse_perf(line: &'a str) -> Option<Self> {
        let brackets = line.match_indices(" [").take(8);
        let of_group = brackets.map(|(at, _)| at).find_map(|at| Self::with_cpu_at(line, at, perf_thread))?;
        let Some((event, text)) = of_group.text.split_once(':').filter(|(event, _)| is_name(event)) else {
            return Some(of_group);
        };
        Some(Line { event, text: text.trim(), ..of_group })
    }

    fn with_cpu_at(line: &'a str, at: usize, thread: fn(&str) -> Option<(&str, u32)>) -> Option<Self> {
        let (cpu, rest) = line.get(at + 2..)?.split_once(']')?;
        let cpu = number(cpu)?;
        let (comm, tid) = thread(line.get(..at)?)?;
        // Flags are left out with the option `noirq-info`.
        let mut words = rest.split_ascii_whitespace();
        let first = words.next()?;
        let stamp = |word: &'a str| Some((word, stamp_ns(word.strip_suffix(':')?)?));
        let (flags, (word, time_ns)) = match stamp(first) {
            Some(stamp) => ("", stamp),
            None => (first, stamp(words.next()?)?),
        };
        // Both are slices of one line.
        let after = word.as_ptr() as usize - line.as_ptr() as usize + word.len();
        let (event, text) = line.get(after..)?.trim_start().split_once(':')?;
        is_name(event).then(|| Line { comm, tid, cpu, flags, time_ns, event, text: text.trim() })
    }

    /// What stands after `name=`, up to the next space.
    pub fn field(&self, name: &str) -> Option<&'a str> {
        let mut words = self.text.split_ascii_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

/// Where events of a CPU are missing: `CPU:6 [LOST 12 EVENTS]`, `##### CPU 6 buffer started ####` and the like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// Of which CPU.
    pub cpu: u32,
    /// How many, as far as that is known; 0 where it is not known that any are.
    pub lost: u64,
}

impl Gap {
    /// `None` where it is no such line.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim();
        if let Some((cpu, rest)) = line.strip_prefix("CPU:").and_then(|rest| rest.split_once(" [")) {
            let counted = rest.strip_suffix(']')?;
            // ftrace and trace-cmd.
            let count = counted.strip_prefix("LOST").and_then(|rest| rest.strip_suffix("EVENTS"));
            let count = count.or_else(|| counted.strip_suffix("EVENTS DROPPED"))?;
            // Without a number the kernel does not know it.
            return Some(Gap {
                cpu: number(cpu.trim())?,
                lost: number(count.trim()).filter(|&lost| lost > 0).unwrap_or(1),
            });
        }
        if let Some(rest) = line.strip_prefix("##### CPU ") {
            let (cpu, _) = rest.split_once(" buffer started")?;
            return Some(Gap { cpu: number(cpu.trim())?, lost: 0 });
        }
        let (head, count) = line.split_once(": PERF_RECORD_LOST")?;
        let (_, cpu) = head.rsplit_once('[')?;
        let (_, lost) = count.rsplit_once("lost ")?;
        Some(Gap { cpu: number(cpu.split_once(']')?.0)?, lost: number(lost.trim())? })
    }
}

fn is_name(event: &str) -> bool {
    !event.is_empty() && event.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$".contains(&byte))
}

/// The number of a thread that has gone when perf asks for it.
pub const GONE: u32 = u32::MAX;

/// A thread's name and number, and before the number maybe its process: `sleep 12`, `sleep 12/13`, `:-1 -1`.
fn perf_thread(text: &str) -> Option<(&str, u32)> {
    let (comm, numbers) = text.trim().rsplit_once(' ')?;
    let tid = numbers.split_once('/').map_or(numbers, |(_, tid)| tid);
    Some((comm.trim(), if tid == "-1" { GONE } else { number(tid)? }))
}

/// A thread's name and number, and with the option `record-tgid` its process in parentheses after it.
fn thread(text: &str) -> Option<(&str, u32)> {
    let text = text.trim();
    let text = match text.strip_suffix(')').and_then(|text| text.rsplit_once('(')) {
        Some((thread, _)) => thread.trim_end(),
        None => text,
    };
    let (comm, tid) = text.rsplit_once('-')?;
    Some((comm, number(tid)?))
}

/// A number of decimal digits alone.
pub(super) fn number<T: std::str::FromStr>(digits: &str) -> Option<T> {
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// Of `seconds.fraction`, with three to nine digits of the fraction.
pub(super) fn stamp_ns(stamp: &str) -> Option<u64> {
    let (seconds, fraction) = stamp.split_once('.')?;
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| (3..=9).contains(digits))?;
    let fraction_ns = number::<u64>(fraction)? * 10_u64.pow(9 - digits);
    number::<u64>(seconds)?.checked_mul(1_000_000_000)?.checked_add(fraction_ns)
}

/// A function's name without offset, address and module: of `console_unlock+0xc0/0x510 [module] <ffff…>`.
pub(super) fn function(symbol: &str) -> &str {
    let name = symbol.split_ascii_whitespace().next().unwrap_or_default();
    name.split_once("+0x").map_or(name, |(name, _)| name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_read_with_and_without_flags_and_processes() {
        let expected = Line {
            comm: "a b [1] c",
            tid: 6462,
            cpu: 6,
            flags: "d..1",
            time_ns: 14_372_732_649_000,
            event: "irq_disable",
            text: "caller=console_unlock+0xc0/0x510 parent=vprintk_emit+0x134/0x1d0",
        };
        for head in [
            "[006] d..1 14372.732649:",
            "[006] d..1. 14372.732649000:",
            "[006]  14372.732649:",
            "(-----) [006] d..1 14372.732649:",
        ] {
            let line = format!("   a b [1] c-6462    {head} irq_disable: {}", expected.text);
            let read = Line::parse(&line).map(|line| Line { flags: "d..1", ..line });
            assert_eq!(read, Some(expected), "{line}");
        }
        assert_eq!(expected.field("parent").map(function), Some("vprintk_emit"));
        assert_eq!(expected.field("paren"), None);
    }

    #[test]
    fn a_line_of_perf_is_read() {
        let expected = Line {
            comm: "a b [1] c",
            tid: 13,
            cpu: 1,
            flags: "",
            time_ns: 1_789_134_152_000,
            event: "sched_waking",
            text: "comm=x pid=18",
        };
        for head in ["13 [001]  1789.134152:  sched:", "12/13 [001] 1789.134152000: sched:"] {
            let line = format!("   a b [1] c    {head}sched_waking: comm=x pid=18");
            assert_eq!(Line::parse_perf(&line), Some(expected), "{line}");
        }
        let gone = Line::parse_perf(":-1    -1 [001] 1.500000: sched:sched_switch: a").expect("a line");
        assert_eq!((gone.tid, gone.event, gone.text), (GONE, "sched_switch", "a"));
        assert_eq!(Line::parse_perf("sh-1 [000] d..1 1.500000: event: text"), None);
    }

    #[test]
    fn gaps_are_told_of_in_several_ways() {
        for (line, cpu, lost) in [
            ("CPU:6 [LOST 12 EVENTS]", 6, 12),
            ("CPU:6 [LOST EVENTS]", 6, 1),
            ("CPU:1 [34 EVENTS DROPPED]", 1, 34),
            ("CPU:1 [EVENTS DROPPED]", 1, 1),
            ("##### CPU 3 buffer started ####", 3, 0),
            ("   a [1] b   10993 [000]  1820.379218: PERF_RECORD_LOST lost 208", 0, 208),
            ("   rustc 10993 [001]  1820.379218: PERF_RECORD_LOST_SAMPLES lost 3", 1, 3),
        ] {
            assert_eq!(Gap::parse(line), Some(Gap { cpu, lost }), "{line}");
        }
        for line in ["", "CPU:x [LOST 1 EVENTS]", "CPU:1 [LOST]", "##### CPU ", "a: PERF_RECORD_LOST lost 1"] {
            assert_eq!(Gap::parse(line), None, "{line}");
        }
    }

    #[test]
    fn what_is_no_event_is_none() {
        for line in [
            "",
            "# tracer: nop",
            " => console_unlock",
            "CPU:6 [LOST 12 EVENTS]",
            "sh-1 [000] d..1 no.stamp: event: text",
            "sh-1 [000] d..1 1.5: event: text",
            "sh-x [000] d..1 1.500000: event: text",
            "sh-1 [000] d..1 99999999999999999999.500000: event: text",
            "sh-1 [000] d..1 1.500000: no name: text",
        ] {
            assert_eq!(Line::parse(line), None, "{line}");
        }
    }

    #[test]
    fn functions_lose_what_stands_around_their_names() {
        assert_eq!(function("qseecom_probe+0x1/0x2 [qseecom]"), "qseecom_probe");
        assert_eq!(function("operator <ffff8000>"), "operator");
        assert_eq!(function(""), "");
    }
}
