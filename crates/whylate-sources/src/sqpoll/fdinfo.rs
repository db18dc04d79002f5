// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parser of the text that the kernel prints for a ring in `/proc/PID/fdinfo/FD`.

/// Relevant lines of the text. Dumps of pending requests and completions stand between them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct RingText {
    /// Identifies the ring: descriptors of one ring have the same.
    pub inode: Option<u64>,
    pub sq_head: Option<u32>,
    pub sq_tail: Option<u32>,
    pub sq_mask: Option<u32>,
    /// TID of the submission thread. A busy ring prints -1, or no such line (6.15); a ring without such a thread prints
    /// -1.
    pub thread: Option<u32>,
    /// Time that the kernel counts as work (6.9), in microseconds.
    pub work_us: Option<u64>,
    /// Time that includes `work_us`, in microseconds: the thread's system time since 6.18, and its whole process's
    /// before.
    pub total_us: Option<u64>,
}

pub(super) fn parse(text: &str) -> RingText {
    let mut ring = RingText::default();
    for line in text.lines() {
        let Some((name, value)) = line.split_once(':') else { continue };
        let value = value.trim();
        match name {
            "ino" => ring.inode = value.parse().ok(),
            "SqHead" => ring.sq_head = value.parse().ok(),
            "SqTail" => ring.sq_tail = value.parse().ok(),
            "SqMask" => ring.sq_mask = value.strip_prefix("0x").and_then(|hex| u32::from_str_radix(hex, 16).ok()),
            "SqThread" => ring.thread = value.parse().ok().filter(|&tid| tid > 0),
            "SqWorkTime" => ring.work_us = microseconds(value),
            "SqTotalTime" => ring.total_us = microseconds(value),
            _ => {}
        }
    }
    // A busy ring prints zeros beside -1: those are no times, and no reset.
    if ring.thread.is_none() {
        (ring.work_us, ring.total_us) = (None, None);
    }
    ring
}

fn microseconds(value: &str) -> Option<u64> {
    // Only some kernels print the unit.
    value.strip_suffix("us").unwrap_or(value).parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const QUIET: &str = "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t7034\nSqMask:\t0x3\nSqHead:\t3197153\nSqTail:\t3197155\n\
        CachedSqHead:\t3197153\nCqMask:\t0x7\nSQEs:\t1\n    0: opcode:READ, fd:5, flags:0\nCQEs:\t0\nSqThread:\t9231\n\
        SqThreadCpu:\t11\nSqTotalTime:\t18099614us\nSqWorkTime:\t16748316us\nUserFiles:\t0\n";

    #[test]
    fn parses_idle_ring() {
        let expected = RingText {
            inode: Some(7034),
            sq_head: Some(3_197_153),
            sq_tail: Some(3_197_155),
            sq_mask: Some(3),
            thread: Some(9231),
            work_us: Some(16_748_316),
            total_us: Some(18_099_614),
        };
        assert_eq!(parse(QUIET), expected);
    }

    #[test]
    fn busy_ring_has_no_times() {
        let zeros = "SqHead:\t5\nSqThread:\t-1\nSqThreadCpu:\t-1\nSqTotalTime:\t0us\nSqWorkTime:\t0us\n";
        let nothing = "pos:\t0\nflags:\t02000002\nmnt_id:\t16\nino:\t7034\n";
        for text in [zeros, nothing] {
            let ring = parse(text);
            assert_eq!((ring.thread, ring.work_us), (None, None), "{text}");
        }
    }

    #[test]
    fn parses_times_without_unit() {
        let ring = parse("SqThread:\t12\nSqTotalTime:\t597415\nSqWorkTime:\t116758\n");
        assert_eq!(ring.work_us, Some(116_758));
    }

    #[test]
    fn kernel_before_6_9_has_no_times() {
        let ring = parse("SqHead:\t5\nSqThread:\t12\nSqThreadCpu:\t1\n");
        assert_eq!((ring.thread, ring.work_us), (Some(12), None));
    }
}
