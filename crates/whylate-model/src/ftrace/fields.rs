// SPDX-License-Identifier: MIT OR Apache-2.0
//! Parses the text of an event, as the kernel prints it, and as trace-cmd does with its plugins.

use super::line::{LONGEST_COMM, number};
use crate::path::history::{Blocked, Operation, SwitchOut};
use crate::path::timer::TimerKind;
use crate::text::function;
use crate::wait::Stop;

/// A parsed event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TraceEvent<'a> {
    Switch {
        from: u32,
        from_name: &'a str,
        exit: SwitchOut,
        to: u32,
        to_name: &'a str,
    },
    Waking(u32),
    Awake(u32),
    /// A thread is created.
    New(u32, &'a str),
    /// `sched_migrate_task`: the thread, and the CPU that it leaves.
    Moved(u32, u32),
    /// The path of the program, and the thread's new and old TID.
    Exec {
        path: &'a str,
        tid: u32,
        old_tid: u32,
    },
    Irq(&'a str),
    IrqEnds,
    Softirq(u8),
    SoftirqEnds,
    SoftirqRaised(u8),
    TimerExpires(TimerKind),
    TimerEnds,
    /// A work item's address, or a hash of it.
    Queued(u64),
    /// A work item's address, if printed, and its function.
    Work(Option<u64>, &'a str),
    WorkEnds,
    Request {
        device: u32,
        sector: u64,
        operation: Operation,
        stage: Stage,
    },
    /// An event that does not matter here.
    Other,
}

/// The state of a block I/O request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Created,
    Issued,
    Done,
}

/// Interrupt vectors without a number, on x86 and on Arm.
const VECTORS: [&str; 12] = [
    "local_timer",
    "reschedule",
    "call_function",
    "call_function_single",
    "irq_work",
    "x86_platform_ipi",
    "thermal_apic",
    "threshold_apic",
    "deferred_error_apic",
    "error_apic",
    "spurious_apic",
    "ipi",
];

/// Parses an event; `None` if an event that matters cannot be read.
pub(super) fn parse_event<'a>(event: &'a str, text: &'a str) -> Option<TraceEvent<'a>> {
    Some(match event {
        "sched_switch" => switch(text)?,
        "sched_waking" => TraceEvent::Waking(thread(text)?.0),
        "sched_wakeup" => TraceEvent::Awake(thread(text)?.0),
        "sched_wakeup_new" => {
            let (tid, name) = thread(text)?;
            TraceEvent::New(tid, name)
        }
        "sched_process_fork" => {
            TraceEvent::New(last_number(text, " child_pid=")?, between(text, " child_comm=", " child_pid=")?)
        }
        "sched_migrate_task" => TraceEvent::Moved(thread(text)?.0, last_number(text, " orig_cpu=")?),
        "sched_process_exec" => {
            let tid = last_number(text, " pid=")?;
            let old_tid = last_number(text, " old_pid=").unwrap_or(tid);
            TraceEvent::Exec { path: between(text, "filename=", " pid=")?, tid, old_tid }
        }
        "irq_handler_entry" => TraceEvent::Irq(text.split_once("name=")?.1),
        "irq_handler_exit" => TraceEvent::IrqEnds,
        "softirq_entry" => TraceEvent::Softirq(softirq(text)?),
        "softirq_exit" => TraceEvent::SoftirqEnds,
        "softirq_raise" => TraceEvent::SoftirqRaised(softirq(text)?),
        "hrtimer_expire_entry" | "timer_expire_entry" => TraceEvent::TimerExpires(timer(text)),
        "hrtimer_expire_exit" | "timer_expire_exit" => TraceEvent::TimerEnds,
        "workqueue_queue_work" => item(text).map_or(TraceEvent::Other, TraceEvent::Queued),
        "workqueue_execute_start" => TraceEvent::Work(item(text), function(word(text.split_once("function ")?.1)?)),
        "workqueue_execute_end" => TraceEvent::WorkEnds,
        "block_io_start" | "block_rq_insert" => request(text, Stage::Created)?,
        "block_rq_issue" => request(text, Stage::Issued)?,
        "block_rq_complete" => request(text, Stage::Done)?,
        _ => match event.rsplit_once('_') {
            Some((vector, "entry")) if VECTORS.contains(&vector) => TraceEvent::Irq(vector),
            Some((vector, "exit")) if VECTORS.contains(&vector) => TraceEvent::IrqEnds,
            _ => TraceEvent::Other,
        },
    })
}

/// `hrtimer=00000000652fe2d8 function=hrtimer_wakeup now=1`, `timer=… function=process_timeout now=4295098624 baseclk=…`.
fn timer(text: &str) -> TimerKind {
    let name = text.split_once("function=").and_then(|(_, rest)| word(rest));
    name.map_or(TimerKind::Other, |name| TimerKind::of_function(function(name)))
}

/// `work struct=00000000de996d5a function=…`, `work struct 0xffff888003a4c1c0: function …`.
fn item(text: &str) -> Option<u64> {
    let address = text.strip_prefix("work struct")?.trim_start_matches(['=', ' ']);
    let address = word(address)?.trim_end_matches(':').trim_start_matches("0x");
    u64::from_str_radix(address, 16).ok()
}

/// `prev_comm=a prev_pid=1 prev_prio=120 prev_state=S ==> next_comm=b next_pid=2 next_prio=120`, or with trace-cmd's
/// plugin `a:1 [120] S ==> b:2 [120]`. Names may contain anything, so the fields are searched from the end.
fn switch(text: &str) -> Option<TraceEvent<'_>> {
    if let Some(rest) = text.strip_prefix("prev_comm=") {
        let (rest, to) = rest.rsplit_once(" next_pid=")?;
        let (rest, to_name) = rest.rsplit_once(" ==> next_comm=").or_else(|| rest.rsplit_once(" next_comm="))?;
        let (from_name, rest) = rest.rsplit_once(" prev_pid=")?;
        let (_, state) = rest.split_once(" prev_state=")?;
        return Some(TraceEvent::Switch {
            from: number(word(rest)?)?,
            from_name: comm(from_name)?,
            exit: exit(word(state)?)?,
            to: number(word(to)?)?,
            to_name: comm(to_name)?,
        });
    }
    let (from, to) = text.rsplit_once(" ==> ")?;
    let (from, state) = from.rsplit_once(' ')?;
    let ((from, from_name), (to, to_name)) = (thread(from)?, thread(to)?);
    Some(TraceEvent::Switch { from, from_name, exit: exit(state)?, to, to_name })
}

/// Returns a thread: `comm=a pid=1 prio=120 target_cpu=000`, or `a:1 [120] CPU:000`.
fn thread(text: &str) -> Option<(u32, &str)> {
    if let Some(name) = between(text, "comm=", " pid=") {
        return Some((last_number(text, " pid=")?, comm(name)?));
    }
    let (thread, _) = text.rsplit_once(" [")?;
    let (name, tid) = thread.rsplit_once(':')?;
    Some((number(tid)?, comm(name)?))
}

/// Checks a thread's name. A longer text contains more than one event.
fn comm(name: &str) -> Option<&str> {
    Some(name).filter(|name| name.chars().nth(LONGEST_COMM).is_none())
}

/// Returns how a thread is switched out, from its state.
fn exit(state: &str) -> Option<SwitchOut> {
    let blocked = |is_uninterruptible| SwitchOut::Blocked(Blocked { is_uninterruptible, ..Blocked::default() });
    let stopped = |stop| SwitchOut::Blocked(Blocked { stop: Some(stop), ..Blocked::default() });
    // Flags may follow, such as `|K` and `+`.
    Some(match state.bytes().next()? {
        b'R' => SwitchOut::Preempted,
        b'Z' | b'X' | b'x' => SwitchOut::Dead,
        b'D' => blocked(true),
        b'T' => stopped(Stop::Signal),
        b't' => stopped(Stop::Tracer),
        b'S' | b'I' | b'P' | b'K' | b'W' | b'N' => blocked(false),
        _ => return None,
    })
}

fn softirq(text: &str) -> Option<u8> {
    number(word(text.split_once("vec=")?.1)?)
}

/// `254,0 WS 4096 () 1234 + 8 none,0,0 [comm]`; a completed request has no size.
fn request(text: &str, stage: Stage) -> Option<TraceEvent<'_>> {
    let (head, tail) = text.split_once(" (")?;
    let (_, tail) = tail.split_once(") ")?;
    let mut words = head.split_ascii_whitespace();
    let (major, minor) = words.next()?.split_once(',')?;
    let (major, minor): (u32, u32) = (number(major)?, number(minor)?);
    let what = words.next()?.as_bytes();
    let size_bytes: Option<u64> = words.next().and_then(number);
    let operation = match what {
        // A write with a preflush is only a flush if it carries no data.
        [b'F', b'F', ..] | [b'F'] => Operation::Flush,
        [b'F', b'W', ..] if size_bytes == Some(0) => Operation::Flush,
        [b'W', ..] | [b'F', b'W', ..] => Operation::Write,
        [b'R', ..] => Operation::Read,
        _ => Operation::Other,
    };
    let device = (major < 1 << 12 && minor < 1 << 20).then_some(major << 20 | minor)?;
    Some(TraceEvent::Request { device, sector: number(word(tail)?)?, operation, stage })
}

fn word(text: &str) -> Option<&str> {
    text.split_ascii_whitespace().next()
}

fn between<'a>(text: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (head, _) = text.rsplit_once(after)?;
    Some(head.split_once(before)?.1)
}

fn last_number(text: &str, before: &str) -> Option<u32> {
    number(word(text.rsplit_once(before)?.1)?)
}

/// Returns whether an event that matters here can be read.
pub(super) fn is_readable(event: &str, text: &str) -> bool {
    parse_event(event, text).is_some()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ASLEEP: SwitchOut = SwitchOut::Blocked(Blocked {
        syscall: None,
        is_uninterruptible: false,
        in_iowait: false,
        is_kernel: false,
        stop: None,
    });

    #[test]
    fn parses_switches_of_kernel_and_trace_cmd_alike() {
        let expected =
            TraceEvent::Switch { from: 12, from_name: "a prev_pid=7", exit: ASLEEP, to: 0, to_name: "swapper/1" };
        let kernel = "prev_comm=a prev_pid=7 prev_pid=12 prev_prio=120 prev_state=S ==> next_comm=swapper/1 next_pid=0 next_prio=120";
        assert_eq!(parse_event("sched_switch", kernel), Some(expected));
        // Two events with joined lines.
        assert_eq!(
            parse_event("sched_switch", &format!("{kernel} job 7 [000] 1.5: sched:sched_switch: {kernel}")),
            None
        );
        assert_eq!(parse_event("sched_switch", "a prev_pid=7:12 [120] S ==> swapper/1:0 [120]"), Some(expected));
        let exit = |state: &str| {
            let text = format!(
                "prev_comm=a prev_pid=1 prev_prio=120 prev_state={state} ==> next_comm=b next_pid=2 next_prio=120"
            );
            parse_event("sched_switch", &text).map(|parsed| match parsed {
                TraceEvent::Switch { exit, .. } => exit,
                other => panic!("{other:?}"),
            })
        };
        for state in ["R", "R+"] {
            assert_eq!(exit(state), Some(SwitchOut::Preempted));
        }
        for state in ["Z", "X", "x", "X|K"] {
            assert_eq!(exit(state), Some(SwitchOut::Dead));
        }
        assert_eq!(exit("D|K"), Some(SwitchOut::Blocked(Blocked { is_uninterruptible: true, ..Blocked::default() })));
        assert_eq!(exit("I"), Some(ASLEEP));
        for (state, stop) in [("T", Stop::Signal), ("t", Stop::Tracer), ("T|W", Stop::Signal)] {
            assert_eq!(exit(state), Some(SwitchOut::Blocked(Blocked { stop: Some(stop), ..Blocked::default() })));
        }
        assert_eq!(exit("?"), None);
    }

    #[test]
    fn parses_threads_with_any_name() {
        assert_eq!(
            parse_event("sched_waking", "comm=a pid=1 b pid=12 prio=120 target_cpu=001"),
            Some(TraceEvent::Waking(12))
        );
        assert_eq!(
            parse_event("sched_waking", "comm=a pid=12 prio=120 success=1 target_cpu=001"),
            Some(TraceEvent::Waking(12))
        );
        assert_eq!(parse_event("sched_wakeup", "kworker/0:1:12 [120] success=1 CPU:000"), Some(TraceEvent::Awake(12)));
        assert_eq!(
            parse_event("sched_wakeup_new", "comm=sh pid=13 prio=120 target_cpu=000"),
            Some(TraceEvent::New(13, "sh"))
        );
        let fork = parse_event("sched_process_fork", "comm=a b pid=12 child_comm=a b child_pid=13");
        assert_eq!(fork, Some(TraceEvent::New(13, "a b")));
        let exec = parse_event("sched_process_exec", "filename=/usr/bin/a b pid=12 old_pid=11");
        assert_eq!(exec, Some(TraceEvent::Exec { path: "/usr/bin/a b", tid: 12, old_tid: 11 }));
    }

    #[test]
    fn parses_interrupts_timers_and_work_items() {
        assert_eq!(
            parse_event("irq_handler_entry", "irq=36 name=virtio1-req.0"),
            Some(TraceEvent::Irq("virtio1-req.0"))
        );
        assert_eq!(parse_event("local_timer_entry", "vector=236"), Some(TraceEvent::Irq("local_timer")));
        assert_eq!(parse_event("ipi_exit", "(Function call interrupts)"), Some(TraceEvent::IrqEnds));
        assert_eq!(parse_event("softirq_entry", "vec=9 [action=RCU]"), Some(TraceEvent::Softirq(9)));
        let delack = "timer=00000000652fe2d8 function=tcp_delack_timer now=4295098624 baseclk=4295098624";
        assert_eq!(parse_event("timer_expire_entry", delack), Some(TraceEvent::TimerExpires(TimerKind::TcpDelayedAck)));
        let sleep = "hrtimer=00000000652fe2d8 function=hrtimer_wakeup/0x0 now=1";
        assert_eq!(parse_event("hrtimer_expire_entry", sleep), Some(TraceEvent::TimerExpires(TimerKind::Wakeup)));
        for text in ["hrtimer=00000000652fe2d8", "function=", "function=0xffffffff81000000 now=1"] {
            assert_eq!(parse_event("hrtimer_expire_entry", text), Some(TraceEvent::TimerExpires(TimerKind::Other)));
        }
        let work = "work struct 00000000de996d5a: function vmstat_update";
        assert_eq!(
            parse_event("workqueue_execute_start", work),
            Some(TraceEvent::Work(Some(0xde99_6d5a), "vmstat_update"))
        );
        let old = "work struct 0xde996d5a: function vmstat_update/0x0";
        assert_eq!(
            parse_event("workqueue_execute_start", old),
            Some(TraceEvent::Work(Some(0xde99_6d5a), "vmstat_update"))
        );
        let queued = "work struct=00000000de996d5a function=vmstat_update workqueue=mm_percpu_wq req_cpu=8192 cpu=0";
        assert_eq!(parse_event("workqueue_queue_work", queued), Some(TraceEvent::Queued(0xde99_6d5a)));
        assert_eq!(parse_event("sys_entry", "1"), Some(TraceEvent::Other));
    }

    #[test]
    fn parses_block_requests() {
        let request = |event, text| match parse_event(event, text) {
            Some(TraceEvent::Request { device, sector, operation, stage }) => (device, sector, operation.name(), stage),
            other => panic!("{other:?}"),
        };
        let device = 254 << 20;
        let read = "254,0 RA 4096 () 172569504 + 8 be,0,6 [cargo]";
        assert_eq!(request("block_io_start", read), (device, 172_569_504, "read", Stage::Created));
        let flush = "254,0 FWS 0 () 0 + 0 none,0,0 [dd]";
        assert_eq!(request("block_rq_issue", flush), (device, 0, "flush", Stage::Issued));
        let done = "254,0 FF () 18446744073709551615 + 0 none,0,0 [0]";
        assert_eq!(request("block_rq_complete", done), (device, u64::MAX, "flush", Stage::Done));
        let command = "8,1 W 512 (2a 00) 77 + 1 [x]";
        assert_eq!(request("block_rq_issue", command), (8 << 20 | 1, 77, "write", Stage::Issued));
    }

    #[test]
    fn rejects_malformed_events() {
        for (event, text) in [
            ("sched_switch", ""),
            ("sched_switch", "prev_comm=a prev_pid=1 ==> next_comm=b next_pid=2"),
            ("sched_switch", "a:1 [120] S ==> b"),
            ("sched_waking", "comm=a pid=99999999999"),
            ("sched_wakeup_new", "a"),
            ("sched_process_fork", "comm=a pid=1"),
            ("sched_process_exec", "filename=/bin/a"),
            ("softirq_entry", "vec=300"),
            ("block_rq_issue", "254,0 W"),
            ("block_rq_issue", "9999,0 W 4096 () 1 + 8 [x]"),
        ] {
            assert_eq!(parse_event(event, text), None, "{event}: {text}");
        }
    }
}
