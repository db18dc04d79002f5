// SPDX-License-Identifier: MIT OR Apache-2.0
//! Who keeps interrupts off, and for how long.
//!
//! Backend `ticks`: a timer of each CPU is due once in a period. When its interrupt comes late although no handler ran and no hypervisor
//! had the CPU, interrupts were off, and it comes in where they were enabled again: the stack that it finds names who did that.

mod ticks;
mod timers;

pub use timers::attach_timers;

use crate::attach;
use crate::source::{AttachError, Attached, BackendInfo, MapKind, Need, Options, Source, SourceInfo};

/// Periods that a timer may have, in nanoseconds: the kernel throttles timers that are due more often.
pub const PERIODS_NS: std::ops::RangeInclusive<u64> = 100_000..=1_000_000_000;
/// The period unless asked for another one.
pub const DEFAULT_PERIOD_NS: u64 = 1_000_000;
/// The shortest lateness that counts unless asked for another one: a hypervisor makes timers late by tens of microseconds.
pub const DEFAULT_FROM_NS: u64 = 100_000;

const TICKS: &str = "ticks";

/// Starts measuring in one way; the text is why a better one is not in use.
type Attach = fn(&IrqsoffOptions, Option<String>) -> Result<Box<dyn Attached>, AttachError>;

/// How each backend is started, by its name.
const BACKENDS: [(&str, Attach); 1] = [(TICKS, ticks::attach)];

/// The source's description.
pub static INFO: SourceInfo = SourceInfo {
    name: "irqsoff",
    waits: "an interrupt",
    from: "interrupts are disabled",
    to: "they are enabled",
    backends: &[BackendInfo {
        name: TICKS,
        needs: &[
            Need::Btf,
            Need::TpBtfPrograms,
            Need::Tracepoint("timer:hrtimer_expire_entry"),
            Need::Tracepoint("timer:hrtimer_expire_exit"),
            Need::Tracepoint("irq:irq_handler_entry"),
            Need::Map(MapKind::Array),
            Need::Map(MapKind::RingBuf),
            Need::Map(MapKind::StackTrace),
        ],
        weaker: "",
    }],
};

/// What to measure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IrqsoffOptions {
    /// Name of the backend to use; `None` takes the best that works.
    pub backend: Option<String>,
    /// How often each CPU's timer is due, for `ticks`.
    pub period_ns: u64,
    /// CPUs to measure; empty for all that are online.
    pub cpus: Vec<u32>,
    /// Shorter ones do not count.
    pub from_ns: u64,
    /// Yield a late event for each length of at least this.
    pub late_over_ns: Option<u64>,
    /// Yield a late event with its causes for each length of at least this.
    pub explain_over_ns: Option<u64>,
    /// Yield late events of which the longest with interrupts off, so many, are the longest there were since the last snapshot.
    pub worst: Option<usize>,
    /// With `ticks`, count all ticks of each CPU: how late they were, and the periods that they have missed.
    pub timer_test: bool,
    /// Late events also carry what their causes were told from.
    pub keep_evidence: bool,
}

impl Default for IrqsoffOptions {
    fn default() -> Self {
        IrqsoffOptions {
            backend: None,
            period_ns: DEFAULT_PERIOD_NS,
            cpus: Vec::new(),
            from_ns: DEFAULT_FROM_NS,
            late_over_ns: None,
            explain_over_ns: None,
            worst: None,
            timer_test: false,
            keep_evidence: false,
        }
    }
}

/// The source `irqsoff`.
#[derive(Debug)]
pub struct Irqsoff;

impl Source for Irqsoff {
    fn info(&self) -> &'static SourceInfo {
        &INFO
    }

    fn attach(&self, options: &Options) -> Result<Box<dyn Attached>, AttachError> {
        attach(&IrqsoffOptions {
            backend: options.backend.clone(),
            late_over_ns: options.late_over_ns,
            explain_over_ns: options.explain_over_ns,
            keep_evidence: options.keep_evidence,
            ..IrqsoffOptions::default()
        })
    }
}

/// Starts measuring.
///
/// # Errors
/// When the kernel or the caller's privileges do not allow it; nothing stays attached then.
pub fn attach(options: &IrqsoffOptions) -> Result<Box<dyn Attached>, AttachError> {
    if !PERIODS_NS.contains(&options.period_ns) {
        return Err(AttachError::Unsupported("a period is from 100 us to 1 s long".to_owned()));
    }
    let mut refused: Option<AttachError> = None;
    for name in attach::backends_to_try(&INFO, options.backend.as_deref())? {
        let reason = refused.as_ref().map(ToString::to_string);
        let Some((_, start)) = BACKENDS.iter().find(|(backend, _)| *backend == name) else { continue };
        match start(options, reason) {
            Ok(attached) => return Ok(attached),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| AttachError::Unsupported("there is no backend".to_owned())))
}

/// The level up to which the kernel prints messages on consoles; `None` where it does not tell.
pub fn console_level() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/printk").ok()?.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_backend_can_be_started() {
        let described: Vec<&str> = INFO.backends.iter().map(|backend| backend.name).collect();
        assert_eq!(BACKENDS.map(|(name, _)| name).to_vec(), described);
    }

    #[test]
    fn a_name_that_no_backend_has_is_refused() {
        let options = IrqsoffOptions { backend: Some("nonsense".to_owned()), ..IrqsoffOptions::default() };
        assert!(matches!(attach(&options), Err(AttachError::UnknownBackend { .. })));
        let senseless = IrqsoffOptions { period_ns: 1_000, ..IrqsoffOptions::default() };
        assert!(matches!(attach(&senseless), Err(AttachError::Unsupported(_))));
    }
}
