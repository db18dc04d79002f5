// SPDX-License-Identifier: MIT OR Apache-2.0
//! One line of `trace` or `trace_pipe`: `comm-tid [cpu] flags seconds.micros: event: text`. With the option
//! `latency-format`, and from `trace-cmd report -l`, the CPU and the flags are one word without brackets.

/// An event as ftrace prints it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceLine<'a> {
    /// Name of the thread; `<...>` if the kernel had lost it.
    pub comm: &'a str,
    /// TID of the thread.
    pub tid: u32,
    /// CPU that it ran on.
    pub cpu: u32,
    /// Context flags, one letter each; empty if omitted.
    pub flags: &'a str,
    /// Timestamp of the buffer's clock.
    pub time_ns: u64,
    /// Name of the event; for `trace_printk()` the calling function.
    pub event: &'a str,
    /// Fields of the event.
    pub text: &'a str,
    /// Whether the name may be cut: the latency format has only its first 8 bytes.
    pub is_cut: bool,
}

/// Maximum length of a thread's name in bytes, except for a kworker with the name of its workqueue.
pub(crate) const LONGEST_COMM: usize = 15;
/// Length of a name in the latency format, in bytes.
const CUT_COMM_BYTES: usize = 8;
/// Characters of the irqs-off flag, which precedes the preemption depth (trace_print_lat_fmt() in
/// kernel/trace/trace_output.c).
const IRQ_FLAGS: &[u8] = b"dDbX.";

/// Why a line is not an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacks {
    /// The line has no CPU number.
    Cpu,
    /// The timestamp has no decimal point.
    Point,
}

impl<'a> TraceLine<'a> {
    /// Parses a line; `None` if it is not an event.
    pub fn parse(line: &'a str) -> Option<Self> {
        Self::parse_with(line, seconds)
    }

    fn parse_with(line: &'a str, stamp: ReadStamp) -> Option<Self> {
        // A name may contain brackets and colons: the CPU is the first bracket after a TID.
        let brackets = line.match_indices(" [").take(8);
        brackets
            .map(|(at, _)| at)
            .find_map(|at| Self::with_cpu_at(line, at, thread, stamp))
            .or_else(|| Self::in_latency_format(line, stamp))
    }

    /// Parses a line of `perf script`: `comm tid [cpu] seconds.micros: group:event: text`.
    pub fn parse_perf(line: &'a str) -> Option<Self> {
        let brackets = line.match_indices(" [").take(8);
        let of_group = brackets.map(|(at, _)| at).find_map(|at| Self::with_cpu_at(line, at, perf_thread, seconds))?;
        let Some((event, text)) = of_group.text.split_once(':').filter(|(event, _)| is_name(event)) else {
            return Some(of_group);
        };
        Some(TraceLine { event, text: text.trim(), ..of_group })
    }

    fn with_cpu_at(line: &'a str, at: usize, thread: ReadThread, stamp: ReadStamp) -> Option<Self> {
        let (cpu, rest) = line.get(at + 2..)?.split_once(']')?;
        let cpu = number(cpu)?;
        let (comm, tid) = thread(line.get(..at)?)?;
        // The option `noirq-info` omits flags.
        let (first, after) = next_word(rest)?;
        let (flags, (time_ns, after)) = match first.strip_suffix(':').and_then(stamp) {
            Some(time_ns) => ("", (time_ns, after)),
            None => {
                let (word, after) = next_word(after)?;
                (first, (stamp(word.strip_suffix(':')?)?, after))
            }
        };
        let (event, text) = event(after)?;
        Some(TraceLine { comm, tid, cpu, flags, time_ns, event, text, is_cut: false })
    }

    /// Parses `comm-tid 0d..2 100.000000: event: text`, and `comm-tid 0d..2 43817391us+: event: text`.
    fn in_latency_format(line: &'a str, stamp: ReadStamp) -> Option<Self> {
        let words = line
            .match_indices(' ')
            .map(|(at, _)| at)
            .filter(|&at| line[at + 1..].starts_with(|c: char| c.is_ascii_digit()));
        words.take(8).find_map(|at| {
            let (word, after) = next_word(&line[at..])?;
            let (cpu, flags) = word.split_at(word.find(|c: char| !c.is_ascii_digit())?);
            if !(4..=7).contains(&flags.len()) || !IRQ_FLAGS.contains(flags.as_bytes().first()?) {
                return None;
            }
            let (comm, tid) = thread(&line[..at])?;
            let (word, after) = next_word(after)?;
            let (time_ns, after) = match word.strip_suffix(':').and_then(stamp) {
                Some(time_ns) => (time_ns, after),
                None => {
                    // A delay mark follows, which shows how soon the next event came.
                    let (us, mark) = word.split_once("us")?;
                    let after = if mark.ends_with(':') { after } else { after.trim_start().strip_prefix(':')? };
                    (number::<u64>(us).filter(|_| !us.is_empty())?.checked_mul(1_000)?, after)
                }
            };
            let (event, text) = event(after)?;
            Some(TraceLine {
                comm,
                tid,
                cpu: number(cpu)?,
                flags,
                time_ns,
                event,
                text,
                is_cut: comm.len() >= CUT_COMM_BYTES,
            })
        })
    }

    /// Returns the missing part of a line that otherwise looks like an event.
    pub fn lacks(line: &'a str) -> Option<Lacks> {
        if Self::parse_with(line, whole_number).is_some_and(|line| line.is_credible()) {
            return Some(Lacks::Point);
        }
        // A line of perf that parses has a CPU number.
        if Self::parse_perf(line).is_some() {
            return None;
        }
        // Any colon may be that of the timestamp.
        line.match_indices(": ").take(8).find_map(|(at, _)| {
            let head = &line[..at];
            let (head, stamp) = head.rsplit_once(' ')?;
            seconds(stamp)?;
            event(&line[at + 1..])?;
            let head = head.trim_end();
            let without_flags = || head.rsplit_once(' ').map(|(head, _)| head.trim_end());
            let is_thread = |head: &str| {
                let perf = head.rsplit_once(' ').is_some_and(|(comm, _)| !comm.trim().is_empty())
                    && perf_thread(head).is_some();
                thread(head).is_some_and(|(comm, _)| !comm.is_empty()) || perf
            };
            (is_thread(head) || without_flags().is_some_and(is_thread)).then_some(Lacks::Cpu)
        })
    }

    /// Returns whether a line has the start of an event, at least up to its CPU.
    pub fn begins(line: &str) -> bool {
        line.match_indices(" [").take(8).any(|(at, _)| {
            let cpu = line[at + 2..].split_once(']').and_then(|(cpu, _)| number::<u32>(cpu).filter(|_| cpu.len() >= 3));
            cpu.is_some() && (thread(&line[..at]).is_some() || perf_thread(&line[..at]).is_some())
        })
    }

    /// Returns whether the name can be a thread's; if not, it includes other text before it.
    pub fn is_credible(&self) -> bool {
        let is_name = self.comm.len() <= LONGEST_COMM || !self.comm.contains(char::is_whitespace);
        let has_mark = |mark: &str| self.comm.len() > mark.len() && self.comm.ends_with(mark);
        is_name && !has_mark("<...>") && !has_mark("<idle>")
    }

    /// Returns the value after `name=`, up to the next space.
    pub fn field(&self, name: &str) -> Option<&'a str> {
        let mut words = self.text.split_ascii_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
}

/// Missing events of a CPU: `CPU:6 [LOST 12 EVENTS]`, `##### CPU 6 buffer started ####` and similar lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gap {
    /// The CPU.
    pub cpu: u32,
    /// Number of missing events: at least 1 if unknown, 0 if possibly none is missing.
    pub lost: u64,
}

impl Gap {
    /// Parses a line; `None` if it reports no gap.
    pub fn parse(line: &str) -> Option<Self> {
        let line = line.trim();
        if let Some((cpu, rest)) = line.strip_prefix("CPU:").and_then(|rest| rest.split_once(" [")) {
            let counted = rest.strip_suffix(']')?;
            // Formats of ftrace and trace-cmd.
            let count = counted.strip_prefix("LOST").and_then(|rest| rest.strip_suffix("EVENTS"));
            let count = count.or_else(|| counted.strip_suffix("EVENTS DROPPED"))?;
            // Without a number, the kernel does not know it.
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

type ReadThread = fn(&str) -> Option<(&str, u32)>;
type ReadStamp = fn(&str) -> Option<u64>;

fn seconds(stamp: &str) -> Option<u64> {
    stamp_ns(stamp)
}

/// Parses a timestamp without a decimal point.
fn whole_number(stamp: &str) -> Option<u64> {
    if stamp.is_empty() { None } else { number(stamp) }
}

/// Splits off the first word.
fn next_word(text: &str) -> Option<(&str, &str)> {
    let text = text.trim_start();
    let end = text.find(|c: char| c.is_ascii_whitespace()).unwrap_or(text.len());
    (end > 0).then(|| text.split_at(end))
}

/// Parses `event: text`; perf may print a period before it.
fn event(text: &str) -> Option<(&str, &str)> {
    let (event, text) = text.trim_start().split_once(':')?;
    let event = match event.split_once(' ') {
        Some((period, event)) if number::<u64>(period).is_some() => event.trim_start(),
        _ => event,
    };
    is_name(event).then(|| (event, text.trim()))
}

fn is_name(event: &str) -> bool {
    !event.is_empty() && event.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$".contains(&byte))
}

/// TID of a thread that was gone when perf looked it up.
pub const GONE: u32 = u32::MAX;

/// Parses a thread's name and TID, with its PID before the TID in some formats: `sleep 12`, `sleep 12/13`, `:-1 -1`.
fn perf_thread(text: &str) -> Option<(&str, u32)> {
    let (comm, numbers) = text.trim().rsplit_once(' ')?;
    let tid = numbers.split_once('/').map_or(numbers, |(_, tid)| tid);
    Some((comm.trim(), if tid == "-1" { GONE } else { number(tid)? }))
}

/// Parses a thread's name and TID; with the option `record-tgid` its PID follows in parentheses.
fn thread(text: &str) -> Option<(&str, u32)> {
    let text = text.trim();
    let text = match text.strip_suffix(')').and_then(|text| text.rsplit_once('(')) {
        Some((thread, _)) => thread.trim_end(),
        None => text,
    };
    let (comm, tid) = text.rsplit_once('-')?;
    Some((comm, number(tid)?))
}

/// Parses a number of decimal digits only.
pub(crate) fn number<T: std::str::FromStr>(digits: &str) -> Option<T> {
    if digits.bytes().all(|byte| byte.is_ascii_digit()) { digits.parse().ok() } else { None }
}

/// Parses `seconds.fraction` to nanoseconds; the fraction has three to nine digits.
pub(super) fn stamp_ns(stamp: &str) -> Option<u64> {
    let (seconds, fraction) = stamp.split_once('.')?;
    let digits = u32::try_from(fraction.len()).ok().filter(|digits| (3..=9).contains(digits))?;
    let fraction_ns = number::<u64>(fraction)? * 10_u64.pow(9 - digits);
    number::<u64>(seconds)?.checked_mul(1_000_000_000)?.checked_add(fraction_ns)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::function;

    #[test]
    fn parses_lines_with_and_without_flags_and_pids() {
        let expected = TraceLine {
            comm: "a b [1] c",
            tid: 6462,
            cpu: 6,
            flags: "d..1",
            time_ns: 14_372_732_649_000,
            event: "irq_disable",
            text: "caller=console_unlock+0xc0/0x510 parent=vprintk_emit+0x134/0x1d0",
            is_cut: false,
        };
        for head in [
            "[006] d..1 14372.732649:",
            "[006] d..1. 14372.732649000:",
            "[006]  14372.732649:",
            "(-----) [006] d..1 14372.732649:",
        ] {
            let line = format!("   a b [1] c-6462    {head} irq_disable: {}", expected.text);
            let read = TraceLine::parse(&line).map(|line| TraceLine { flags: "d..1", ..line });
            assert_eq!(read, Some(expected), "{line}");
        }
        assert_eq!(expected.field("parent").map(function), Some("vprintk_emit"));
        assert_eq!(expected.field("paren"), None);
    }

    #[test]
    fn parses_perf_line() {
        let expected = TraceLine {
            comm: "a b [1] c",
            tid: 13,
            cpu: 1,
            flags: "",
            time_ns: 1_789_134_152_000,
            event: "sched_waking",
            text: "comm=x pid=18",
            is_cut: false,
        };
        for head in ["13 [001]  1789.134152:  sched:", "12/13 [001] 1789.134152000: sched:"] {
            let line = format!("   a b [1] c    {head}sched_waking: comm=x pid=18");
            assert_eq!(TraceLine::parse_perf(&line), Some(expected), "{line}");
        }
        let gone = TraceLine::parse_perf(":-1    -1 [001] 1.500000: sched:sched_switch: a").expect("a line");
        assert_eq!((gone.tid, gone.event, gone.text), (GONE, "sched_switch", "a"));
        assert_eq!(TraceLine::parse_perf("sh-1 [000] d..1 1.500000: event: text"), None);
    }

    #[test]
    fn parses_all_formats_of_gaps() {
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
    fn parses_latency_format() {
        let expected = TraceLine {
            comm: "my task(",
            tid: 88,
            cpu: 12,
            flags: "dNh2.",
            time_ns: 100_040_010_000,
            event: "sched_wakeup",
            text: "job:10 [120] CPU:000",
            is_cut: true,
        };
        for stamp in ["100.040010:", "100040010us : ", "100040010us!: ", "100040010us+:"] {
            let line = format!(" my task(-88     12dNh2.   {stamp} sched_wakeup:         job:10 [120] CPU:000");
            assert_eq!(TraceLine::parse(&line), Some(expected), "{line}");
        }
        let short = TraceLine::parse("  sh-1  0....1  5.000000: a: b").expect("a line");
        assert_eq!((short.comm, short.cpu, short.flags, short.is_cut), ("sh", 0, "....1", false));
        for line in ["sh-1 0d..2", "sh-1 0q..2 5.000000: a: b", "sh-1 0d.2 5.00: a: b", "x 0d..2 5.000000: a: b"] {
            assert_eq!(TraceLine::parse(line), None, "{line}");
        }
    }

    #[test]
    fn names_what_an_event_lacks() {
        for (line, lacks) in [
            ("job-10    [000] d..2. 380784522000: sched_switch: a", Some(Lacks::Point)),
            ("job-10 0d..2. 380784522000: sched_switch: a", Some(Lacks::Point)),
            ("cache-srv  4735/4735    921.700317:       sched:sched_switch: a", Some(Lacks::Cpu)),
            ("a b 47 921.700317: sched:sched_switch: a", Some(Lacks::Cpu)),
            ("a b-47 d..2. 921.700317: sched_switch: a", Some(Lacks::Cpu)),
            ("cache-srv  4735/4735 [001]   921.700317:       sched:sched_switch: a", None),
            ("it was at 12.500000: a bad: time", None),
            ("12 12.500000: a: time", None),
            ("", None),
        ] {
            assert_eq!(TraceLine::lacks(line), lacks, "{line}");
        }
    }

    #[test]
    fn rejects_lines_without_event() {
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
            assert_eq!(TraceLine::parse(line), None, "{line}");
        }
    }
}
