// SPDX-License-Identifier: MIT OR Apache-2.0
//! Lateness of timers, by the kernel's hrtimer events and by the messages of a test module.

use std::collections::HashMap;

use super::line::{TraceLine, number};
use crate::text::function;

/// Maximum number of timers with a known due time; those of sleeping threads come and go.
const MAX_TIMERS: usize = 64 << 10;
/// Maximum number of (CPU, function) pairs with a printed lateness that wait for their overrun message.
const MAX_PRINTED: usize = 1 << 10;

/// A timer that was called after its due time.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateTimer<'a> {
    /// Name of the timer's function.
    pub function: &'a str,
    /// Time of the call, in nanoseconds.
    pub at_ns: u64,
    pub lateness_ns: u64,
    /// Number of missed periods.
    pub missed: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Timer {
    /// Due time; 0 if unknown.
    due_ns: u64,
    /// Previous due time, while the timer's function runs.
    called_due_ns: u64,
    /// Shortest step between due times that its function set; 0 if unknown.
    period_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    by_address: HashMap<u64, Timer>,
    /// Time and value of the printed lateness, by CPU and function.
    printed_lateness: HashMap<(u32, Box<str>), (u64, u64)>,
}

impl Timers {
    /// Handles one of the kernel's events; returns the timer if it was called and its due time is known.
    pub(super) fn event<'a>(&mut self, line: &TraceLine<'a>) -> Option<LateTimer<'a>> {
        let address = line.field("hrtimer")?;
        let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).ok()?;
        match line.event {
            "hrtimer_start" => {
                let due_ns = number(line.field("expires")?)?;
                if self.by_address.len() >= MAX_TIMERS && !self.by_address.contains_key(&address) {
                    self.by_address.clear();
                }
                let timer = self.by_address.entry(address).or_default();
                timer.due_ns = due_ns;
                // Its function has restarted it: the step is one period, or several if it was late.
                if timer.called_due_ns > 0 && due_ns > timer.called_due_ns {
                    let step_ns = due_ns - timer.called_due_ns;
                    timer.period_ns = if timer.period_ns == 0 { step_ns } else { timer.period_ns.min(step_ns) };
                }
                None
            }
            "hrtimer_expire_entry" => {
                let now_ns: u64 = number(line.field("now")?)?;
                let timer = self.by_address.get_mut(&address).filter(|timer| timer.due_ns > 0)?;
                let lateness_ns = now_ns.saturating_sub(timer.due_ns);
                (timer.called_due_ns, timer.due_ns) = (timer.due_ns, 0);
                let missed = lateness_ns.checked_div(timer.period_ns).unwrap_or(0);
                let function = function(line.field("function")?);
                Some(LateTimer { function, at_ns: line.time_ns, lateness_ns, missed })
            }
            "hrtimer_expire_exit" => {
                self.by_address.get_mut(&address)?.called_due_ns = 0;
                None
            }
            // `hrtimer_cancel` also precedes each expiry.
            _ => None,
        }
    }

    /// Handles a function's message about its timer: `… delta: 9656, …` in microseconds, then `8 overruns`.
    pub(super) fn printed<'a>(&mut self, line: &TraceLine<'a>) -> Option<LateTimer<'a>> {
        let key = || (line.cpu, line.event.into());
        if line.text.contains("expires")
            && let Some(late_us) = line.text.split_once("delta: ").and_then(|(_, rest)| {
                number::<u64>(rest.split(|c: char| !c.is_ascii_digit()).next()?).filter(|&us| us > 0)
            })
        {
            if self.printed_lateness.len() >= MAX_PRINTED {
                self.printed_lateness.clear();
            }
            self.printed_lateness.insert(key(), (line.time_ns, late_us.saturating_mul(1_000)));
            return None;
        }
        let missed = number(line.text.strip_suffix("overruns").or_else(|| line.text.strip_suffix("overrun"))?.trim())?;
        let (at_ns, lateness_ns) = self.printed_lateness.remove(&key()).unwrap_or((line.time_ns, 0));
        Some(LateTimer { function: line.event, at_ns, lateness_ns, missed })
    }
}
