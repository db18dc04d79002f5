// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is known of each kernel.

use crate::parts::{NO_IRQS_OFF, NO_LIMITS, NO_NULL_DISK, NO_TIMER, NO_TIMES};

pub struct Expected {
    pub kernel: &'static str,
    pub backend: &'static str,
    pub injects: bool,
    /// Why some disturbances cannot be made, or compared with.
    pub cannot_disturb: &'static [&'static str],
    /// There are events of preemption that is off, and a module that makes delays.
    pub tells_preemption: bool,
    /// What is tried of the timerlat tracer; nothing where there is none.
    pub of_tracer: &'static [&'static str],
    /// What is tried where something comes between `irqsoff` and its measuring, by which backends.
    pub of_irqsoff: &'static [&'static [&'static str]],
    /// How `sqpoll` tells work there, if that is tried.
    pub sqpoll: Option<&'static str>,
    /// It has the driver of the machine's disk, and of what is on it.
    pub has_disk: bool,
    /// Why disks of known times cannot be, or not in each way.
    pub no_null_disk: &'static [&'static str],
    /// Why some sources cannot be compared with trace lines there.
    pub no_trace_lines: &'static [&'static str],
}

/// It enters process_one_work() for items that it does not run, so `fentry` cannot be used, and has no bpf_wq.
pub static CLOUD_6_1: Expected = Expected {
    kernel: "6.1-cloud",
    backend: "tracepoint",
    injects: false,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF, "bpf_wq"],
    tells_preemption: false,
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
    tells_preemption: false,
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
    tells_preemption: false,
    of_tracer: &["threads", "readers", "trace", "cases", "others", "killed"],
    of_irqsoff: &[],
    sqpoll: None,
    has_disk: false,
    no_null_disk: &[],
    no_trace_lines: &[NO_TIMES],
};

/// It is built without histograms of events, which some parts of the tracer's script ask for.
pub static TRACERS_6_12: Expected = Expected {
    kernel: "6.12-tracers",
    backend: "fentry",
    injects: true,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
    tells_preemption: true,
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

/// Emulated arm64, on which the static program alone is tried.
pub static ARM64_6_12: Expected = Expected {
    kernel: "6.12-arm64",
    backend: "fentry",
    injects: true,
    cannot_disturb: &[NO_TIMES, NO_IRQS_OFF],
    tells_preemption: false,
    of_tracer: &[],
    of_irqsoff: &[],
    sqpoll: None,
    has_disk: false,
    no_null_disk: &[NO_NULL_DISK],
    no_trace_lines: &[NO_TIMES],
};
