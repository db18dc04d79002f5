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
        brackets.map(|(at, _)| at).find_map(|at| Self::with_cpu_at(line, at))
    }

    fn with_cpu_at(line: &'a str, at: usize) -> Option<Self> {
        let (cpu, rest) = line.get(at + 2..)?.split_once(']')?;
        let cpu = number(cpu)?;
        let (comm, tid) = thread(line.get(..at)?)?;
        // Flags are left out with the option `noirq-info`.
        let mut words = rest.split_ascii_whitespace();
        let stamp = words.by_ref().take(2).find_map(|word| Some((word, stamp_ns(word.strip_suffix(':')?)?)));
        let (word, time_ns) = stamp?;
        // Both are slices of one line.
        let after = word.as_ptr() as usize - line.as_ptr() as usize + word.len();
        let (event, text) = line.get(after..)?.trim_start().split_once(':')?;
        let is_name =
            !event.is_empty() && event.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_.$".contains(&byte));
        is_name.then(|| Line { comm, tid, cpu, time_ns, event, text: text.trim() })
    }

    /// What stands after `name=`, up to the next space.
    pub fn field(&self, name: &str) -> Option<&'a str> {
        let mut words = self.text.split_ascii_whitespace();
        words.find_map(|word| word.strip_prefix(name)?.strip_prefix('='))
    }
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
            assert_eq!(Line::parse(&line), Some(expected), "{line}");
        }
        assert_eq!(expected.field("parent").map(function), Some("vprintk_emit"));
        assert_eq!(expected.field("paren"), None);
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
