// SPDX-License-Identifier: MIT OR Apache-2.0
//! Expectations for each kernel.

use crate::parts::{NO_IRQS_OFF, NO_LIMITS, NO_NULL_DISK, NO_TIMER, NO_TIMES};

pub struct Expected {
    pub kernel: &'static str,
    pub backend: &'static str,
    pub injects: bool,
    /// Why some disturbances cannot be made, or compared.
    pub cannot_disturb: &'static [&'static str],
    /// It has preemptirq events, and the module that makes delays.
    pub has_preemption_events: bool,
    /// Parts of `tracer.sh` to run; none without the timerlat tracer.
    pub of_tracer: &'static [&'static str],
    /// Parts and backends of `irqsoff.sh` to run.
    pub of_irqsoff: &'static [&'static [&'static str]],
    /// How `sqpoll` measures work there, if that is tested.
    pub sqpoll: Option<&'static str>,
    /// It has drivers for the machine's disk and its file system.
    pub has_disk: bool,
    /// Why disks with known times are not possible, or only partly.
    pub no_null_disk: &'static [&'static str],
    /// Why some sources cannot be compared with trace lines there.
    pub no_trace_lines: &'static [&'static str],
}

/// It enters process_one_work() for items that it does not run, so `fentry` is not usable, and it has no bpf_wq.
pub static CLOUD_6_1: Expected = Expected {
    kernel: "6.1-cloud",
    backend: "tracepoint",
    injects: false,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF, "bpf_wq"],
    has_preemption_events: false,
    of_tracer: &[],
    of_irqsoff: &[],
    sqpoll: Some("samples"),
    has_disk: true,
    no_null_disk: &[NO_LIMITS],
    no_trace_lines: &[NO_TIMES],
};

pub static CLOUD_6_12: Expected = Expected {
    kernel: "6.12-cloud",
    backend: "fentry",
    injects: true,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
    has_preemption_events: false,
    of_tracer: &[],
    of_irqsoff: &[&["console", "ticks"]],
    sqpoll: Some("rounds"),
    has_disk: true,
    no_null_disk: &[],
    no_trace_lines: &[NO_TIMES],
};

pub static RT_6_12: Expected = Expected {
    kernel: "6.12-rt",
    backend: "fentry",
    injects: true,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF, NO_TIMER],
    has_preemption_events: false,
    of_tracer: &["threads", "readers", "trace", "cases", "others", "killed"],
    of_irqsoff: &[],
    sqpoll: None,
    has_disk: false,
    no_null_disk: &[],
    no_trace_lines: &[NO_TIMES],
};

/// Built without hist triggers, which some parts of `tracer.sh` need.
pub static TRACERS_6_12: Expected = Expected {
    kernel: "6.12-tracers",
    backend: "fentry",
    injects: true,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
    has_preemption_events: true,
    of_tracer: &["threads", "readers", "others"],
    of_irqsoff: &[
        &["killed", "events", "ticks", "tracer"],
        &["in_use", "events", "ticks", "tracer"],
        &["no_tracefs", "events", "ticks", "tracer"],
        &["console", "events", "ticks"],
        &["hotplug", "events", "ticks", "tracer"],
    ],
    sqpoll: None,
    has_disk: false,
    no_null_disk: &[NO_NULL_DISK],
    no_trace_lines: &[NO_TIMES],
};

/// Emulated arm64, where only the static program is tested.
pub static ARM64_6_12: Expected = Expected {
    kernel: "6.12-arm64",
    backend: "fentry",
    injects: true,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
    has_preemption_events: false,
    of_tracer: &[],
    of_irqsoff: &[],
    sqpoll: None,
    has_disk: false,
    no_null_disk: &[NO_NULL_DISK],
    no_trace_lines: &[NO_TIMES],
};
