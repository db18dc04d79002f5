// SPDX-License-Identifier: MIT OR Apache-2.0
//! How late timers were: by the kernel's events of them, and by what a test module prints of its own.

use std::collections::HashMap;

use super::capture::LateTimer;
use super::line::{Line, number};
use crate::text::function;

/// Timers whose due time is kept; those of threads that sleep come and go with them.
const TIMERS: usize = 64 << 10;
/// CPUs and functions of which a printed lateness waits for the printed overruns.
const STATED: usize = 1 << 10;

#[derive(Clone, Copy, Debug, Default)]
struct Timer {
    /// 0: it is not known.
    due_ns: u64,
    /// The one before, while its function runs.
    called_due_ns: u64,
    /// The shortest time from one due time to the next that its function set; 0: not known.
    period_ns: u64,
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    by_address: HashMap<u64, Timer>,
    /// By CPU and function: when it printed how late it was, and that.
    stated: HashMap<(u32, Box<str>), (u64, u64)>,
}

impl Timers {
    /// Takes one of the kernel's events; a timer that is called and whose due time is known.
    pub(super) fn event<'a>(&mut self, line: &Line<'a>) -> Option<LateTimer<'a>> {
        let address = line.field("hrtimer")?;
        let address = u64::from_str_radix(address.trim_start_matches("0x"), 16).ok()?;
        match line.event {
            "hrtimer_start" => {
                let due_ns = number(line.field("expires")?)?;
                if self.by_address.len() >= TIMERS && !self.by_address.contains_key(&address) {
                    self.by_address.clear();
                }
                let timer = self.by_address.entry(address).or_default();
                timer.due_ns = due_ns;
                // Its function has set it anew: the time between is a period, or several if it was late.
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
            // `hrtimer_cancel` is told of each timer that expires too, just before.
            _ => None,
        }
    }

    /// Takes what a function prints of its timer: `… delta: 9656, …` in microseconds, and then `8 overruns`.
    pub(super) fn printed<'a>(&mut self, line: &Line<'a>) -> Option<LateTimer<'a>> {
        let key = || (line.cpu, line.event.into());
        if line.text.contains("expires")
            && let Some(late_us) = line.text.split_once("delta: ").and_then(|(_, rest)| {
                number::<u64>(rest.split(|c: char| !c.is_ascii_digit()).next()?).filter(|&us| us > 0)
            })
        {
            if self.stated.len() >= STATED {
                self.stated.clear();
            }
            self.stated.insert(key(), (line.time_ns, late_us.saturating_mul(1_000)));
            return None;
        }
        let missed = number(line.text.strip_suffix("overruns").or_else(|| line.text.strip_suffix("overrun"))?.trim())?;
        let (at_ns, lateness_ns) = self.stated.remove(&key()).unwrap_or((line.time_ns, 0));
        Some(LateTimer { function: line.event, at_ns, lateness_ns, missed })
    }
}
