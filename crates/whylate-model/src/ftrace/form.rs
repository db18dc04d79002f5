// SPDX-License-Identifier: MIT OR Apache-2.0
//! Classifies lines as events, and detects events that are cut off.

use super::fields::is_readable;
use super::latency;
use super::line::{Gap, Lacks, TraceLine};
use crate::paste::{Form, Piece};
use crate::text::function;

/// Text format of ftrace, trace-cmd and perf.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Events;

/// Last field that is used of each event.
const LAST_FIELDS: [(&str, &str); 11] = [
    ("sched_switch", " next_prio="),
    ("sched_waking", " prio="),
    ("sched_wakeup", " prio="),
    ("sched_wakeup_new", " prio="),
    ("sched_process_exec", " old_pid="),
    ("irq_disable", "parent="),
    ("irq_enable", "parent="),
    ("preempt_disable", "parent="),
    ("preempt_enable", "parent="),
    ("hrtimer_start", "expires="),
    ("irq_handler_entry", " name="),
];

impl Form for Events {
    fn piece(&self, line: &str) -> Piece {
        let of_perf = TraceLine::parse_perf(line);
        if let Some(event) = of_perf.or_else(|| TraceLine::parse(line)) {
            // A group and the start of an event name.
            let is_group = of_perf.is_some() && !event.text.is_empty() && !event.text.contains([' ', ':', '=']);
            return match event.is_credible() {
                true if !is_group && is_whole(event.event, event.text) => Piece::Whole,
                true => Piece::Begins,
                false => Piece::Other,
            };
        }
        if latency::is_cut(line) {
            return Piece::Begins;
        }
        if latency::is_part(line) {
            return Piece::Whole;
        }
        if Gap::parse(line).is_some()
            || super::is_blank(line)
            || super::is_heading(line)
            || latency::is_heading(line.trim())
        {
            return Piece::Own;
        }
        // Timestamps without a point and events without a CPU are refused with a reason, so they count as events too.
        match TraceLine::lacks(line) {
            Some(Lacks::Point | Lacks::Cpu) => Piece::Whole,
            None if TraceLine::begins(line) => Piece::Begins,
            None => Piece::Other,
        }
    }

    fn subject<'a>(&self, line: &'a str) -> Option<&'a str> {
        TraceLine::parse_perf(line).or_else(|| TraceLine::parse(line)).map(|event| event.comm)
    }

    fn lacks_end(&self, line: &str) -> bool {
        let event = TraceLine::parse_perf(line).or_else(|| TraceLine::parse(line));
        event.is_none_or(|event| !has_end(event.event, event.text))
    }

    fn can_continue(&self, _line: &str) -> bool {
        true
    }

    fn has_open_end(&self, line: &str, is_at_edge: bool) -> bool {
        let Some(event) = TraceLine::parse_perf(line).or_else(|| TraceLine::parse(line)) else {
            return is_at_edge && latency::is_part(line);
        };
        let last = event.text.rsplit([' ', '=']).next().unwrap_or_default();
        match event.event {
            // A function with its offset is complete.
            "irq_disable" | "irq_enable" | "preempt_disable" | "preempt_enable" | "workqueue_execute_start" => {
                function(last) == last
            }
            "sched_process_fork" | "sched_process_exec" | "irq_handler_entry" => true,
            "hrtimer_start" | "hrtimer_expire_entry" => function(last) == last && !event.text.contains(" mode="),
            // Other events are unknown.
            name => is_at_edge && LAST_FIELDS.iter().all(|(known, _)| *known != name),
        }
    }
}

fn is_whole(event: &str, text: &str) -> bool {
    // The kernel prints all functions with offsets or none.
    let lacks_offset = || {
        let parent = text.rsplit_once("parent=").map(|(_, parent)| parent);
        parent.is_some_and(|parent| text.contains("+0x") && !parent.contains("+0x") && !parent.starts_with("0x"))
    };
    has_end(event, text) && is_readable(event, text) && !lacks_offset()
}

/// Returns whether an event has all the fields that are used, as far as its text shows.
pub(crate) fn has_end(event: &str, text: &str) -> bool {
    let Some((_, last)) = LAST_FIELDS.iter().find(|(name, _)| *name == event) else {
        return match event {
            "irq_handler_exit" => text.ends_with("handled"),
            "block_rq_insert" | "block_rq_issue" | "block_rq_complete" => text.ends_with(']'),
            _ => true,
        };
    };
    // With trace-cmd's plugins: `a:1 [120] S ==> b:2 [120]`, `b:2 [120] CPU:000`.
    let with_plugin =
        || event.starts_with("sched_") && !text.contains("pid=") && text.contains(" [") && text.contains(']');
    let is_module_or_field = |word: &str| word.contains('=') || word.starts_with('[');
    let has_last = text.rsplit_once(last).is_some_and(|(_, value)| {
        let are_fields = || text.split_ascii_whitespace().all(is_module_or_field);
        !value.is_empty() && !value.starts_with(' ') && (*last != "parent=" || are_fields())
    });
    let is_switch = || event != "sched_switch" || text.split_once(" ==> ").is_some_and(|(_, next)| next.ends_with(']'));
    has_last || with_plugin() && is_switch()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn event_without_its_end_is_incomplete() {
        let whole = |text: &str| Events.piece(&format!("job-10 [000] d..2. 5.000000: {text}"));
        let switch =
            "sched_switch: prev_comm=a prev_pid=1 prev_prio=120 prev_state=S ==> next_comm=b next_pid=20 next_prio=120";
        for (text, rest) in [
            (switch, "=120"),
            ("sched_switch: a:1 [120] S ==> b:20 [120]", "0 [120]"),
            ("sched_waking: comm=x pid=18 prio=120 target_cpu=000", "8 prio=120 target_cpu=000"),
            ("sched_wakeup: x:18 [120] CPU:000", " [120] CPU:000"),
            ("irq_disable: caller=a+0x1 parent=b+0x2", " parent=b+0x2"),
            ("block_rq_issue: 254,0 W 512 () 77 + 1 [x]", "7 + 1 [x]"),
            ("softirq_entry: vec=9 [action=RCU]", "vec=9 [action=RCU]"),
        ] {
            assert_eq!(whole(text), Piece::Whole, "{text}");
            let cut = text.strip_suffix(rest).expect("its end");
            assert_eq!(whole(cut), Piece::Begins, "{cut}");
        }
        // One function lacks the offset that the other one has.
        assert_eq!(whole("irq_disable: caller=a+0x1 parent=tty_ldi"), Piece::Begins);
        assert_eq!(whole("irq_disable: caller=a parent=tty_ldisc"), Piece::Whole);
        assert_eq!(Events.piece("# tracer: nop"), Piece::Own);
        assert_eq!(Events.piece("CPU:1 [LOST 4 EVENTS]"), Piece::Own);
        assert_eq!(Events.piece("          job-10 [000] d..2. "), Piece::Begins);
        assert_eq!(Events.piece("Analysis: it is late."), Piece::Other);
        assert_eq!(Events.piece("   job  10 [000]  5.000000:   sched:sched_sw"), Piece::Begins);
        // No thread has such a name.
        assert_eq!(Events.piece("[    4.5]     job-10 [000] d..2. 5.000000: sys_enter: 1"), Piece::Other);
    }
}
