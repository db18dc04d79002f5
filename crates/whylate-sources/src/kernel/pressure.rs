// SPDX-License-Identifier: MIT OR Apache-2.0
//! Triggers by pressure: the kernel reports when tasks were stalled for longer than a share of a window
//! (Documentation/accounting/psi.rst).

use std::collections::VecDeque;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::kernel::{cgroups, clock};

/// Windows that the kernel takes.
const MIN_WINDOW_US: u64 = 500_000;
const MAX_WINDOW_US: u64 = 10_000_000;
/// Without `CAP_SYS_RESOURCE`, windows are multiples of this.
const UNPRIVILEGED_WINDOW_US: u64 = 2_000_000;
/// Maximum number of readings that are kept for a trigger.
const MAX_TOTALS: usize = 256;

/// A threshold of pressure, such as `cpu.some>20%/2s`, or `memory.full>100ms/1s in /system.slice`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PressureThreshold {
    resource: &'static str,
    kind: &'static str,
    stall_us: u64,
    window_us: u64,
    /// Path of a cgroup of version 2; the whole system without one.
    cgroup: Option<String>,
}

impl FromStr for PressureThreshold {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let how =
            || "write it like 'cpu.some>20%/2s', 'memory.full>100ms/1s' or 'io.some>50%/1s in /web.slice'".to_owned();
        let (condition, cgroup) = match text.split_once(" in ") {
            Some((condition, cgroup)) if cgroup.starts_with('/') => (condition, Some(cgroup.trim().to_owned())),
            Some(_) => return Err(how()),
            None => (text, None),
        };
        let (what, limit) = condition.split_once('>').ok_or_else(how)?;
        let (stall, window) = limit.split_once('/').ok_or_else(how)?;
        let (resource, kind) = what.trim().split_once('.').ok_or_else(how)?;
        let resource = ["cpu", "memory", "io"].into_iter().find(|known| *known == resource).ok_or_else(how)?;
        let kind = ["some", "full"].into_iter().find(|known| *known == kind).ok_or_else(how)?;
        if (resource, kind, &cgroup) == ("cpu", "full", &None) {
            return Err("the kernel has no cpu.full of the whole system: use cpu.some, or name a cgroup".to_owned());
        }
        let us = |text: &str| {
            whylate_model::units::parse_duration_ns(text.trim(), None).map(|ns| ns / 1_000).map_err(|_| how())
        };
        let window_us = us(window)?;
        if !(MIN_WINDOW_US..=MAX_WINDOW_US).contains(&window_us) {
            return Err("give a window from 500ms to 10s".to_owned());
        }
        let stall_us = match stall.trim().strip_suffix('%') {
            Some(percent) => {
                let percent: f64 = percent.trim().parse().map_err(|_| how())?;
                (window_us as f64 * percent / 100.0) as u64
            }
            None => us(stall)?,
        };
        if stall_us == 0 || stall_us > window_us {
            return Err("give a share above 0% and up to 100%, or a time up to the window".to_owned());
        }
        Ok(PressureThreshold { resource, kind, stall_us, window_us, cgroup })
    }
}

impl PressureThreshold {
    fn file(&self) -> Result<PathBuf, String> {
        let Some(cgroup) = &self.cgroup else { return Ok(Path::new("/proc/pressure").join(self.resource)) };
        let root = cgroups::unified_root().ok_or("cgroup version 2 is not mounted")?;
        Ok(root.join(cgroup.trim_start_matches('/')).join(format!("{}.pressure", self.resource)))
    }
}

impl fmt::Display for PressureThreshold {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PressureThreshold { resource, kind, cgroup, .. } = self;
        write!(out, "{resource}.{kind}")?;
        cgroup.as_ref().map_or(Ok(()), |cgroup| write!(out, " in {cgroup}"))
    }
}

/// A trigger that the kernel fires when its threshold is exceeded, at most once per window.
#[derive(Debug)]
pub struct PressureTrigger {
    threshold: PressureThreshold,
    file: File,
    /// Times on CLOCK_MONOTONIC at which the pressure was read, with the total stall until then in microseconds: the
    /// last one before the window, and those in it.
    totals: VecDeque<(u64, u64)>,
}

impl PressureTrigger {
    /// Registers the threshold. Without `CAP_SYS_RESOURCE`, the kernel takes windows of a multiple of 2 s.
    ///
    /// # Errors
    /// Fails with a reason if the kernel keeps no account of pressure, or refuses the threshold.
    pub fn register(threshold: &PressureThreshold) -> Result<Self, String> {
        let path = threshold.file()?;
        let name = path.display();
        let mut file = OpenOptions::new().read(true).write(true).open(&path).map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                format!("{name} does not exist: boot the kernel with psi=1, or check the path of the cgroup")
            }
            std::io::ErrorKind::ReadOnlyFilesystem => {
                format!("{name} is read-only here: a systemd unit needs ProtectControlGroups=no for that")
            }
            _ => format!("cannot open {name}: {error}"),
        })?;
        let PressureThreshold { kind, stall_us, window_us, .. } = threshold;
        file.write_all(format!("{kind} {stall_us} {window_us}\0").as_bytes()).map_err(|error| {
            let privilege = if window_us.is_multiple_of(UNPRIVILEGED_WINDOW_US) {
                ""
            } else {
                " (without CAP_SYS_RESOURCE, give a window of 2s, 4s, 6s, 8s or 10s)"
            };
            format!("the kernel refuses the trigger in {name}: {error}{privilege}")
        })?;
        let mut trigger = PressureTrigger { threshold: threshold.clone(), file, totals: VecDeque::new() };
        trigger.read_total();
        Ok(trigger)
    }

    /// Forgets what came before: attaching all sources takes CPU time and memory itself.
    pub fn restart(&mut self) {
        self.totals.clear();
        // The kernel's report is forgotten once it is read; an error is seen at the next call.
        let _ = self.exceeded();
    }

    /// Returns the pressure, e.g. `cpu.some 35 % over 2.1 s`, if the threshold was exceeded since the last call.
    ///
    /// # Errors
    /// Fails if the cgroup is gone.
    pub fn exceeded(&mut self) -> Result<Option<String>, String> {
        self.read_total();
        Ok(self.wait(Duration::ZERO)?.then(|| format!("{}{}", self.threshold, share(&self.totals))))
    }

    /// Reads the total stall, and drops readings before the window but the last one.
    fn read_total(&mut self) {
        let mut text = [0; 256];
        let Ok(length) = self.file.read_at(&mut text, 0) else { return };
        let text = String::from_utf8_lossy(&text[..length]).into_owned();
        let Some(total_us) = total_us(&text, self.threshold.kind) else { return };
        let now_ns = clock::monotonic_ns();
        self.totals.push_back((now_ns, total_us));
        let begin_ns = now_ns.saturating_sub(self.threshold.window_us * 1_000);
        while self.totals.len() > MAX_TOTALS || self.totals.get(1).is_some_and(|&(ns, _)| ns <= begin_ns) {
            self.totals.pop_front();
        }
    }

    fn wait(&self, timeout: Duration) -> Result<bool, String> {
        let mut watched = [PollFd::new(&self.file, PollFlags::PRI)];
        let timeout = Timespec::try_from(timeout).map_err(|error| error.to_string())?;
        match poll(&mut watched, Some(&timeout)) {
            Ok(0) | Err(rustix::io::Errno::INTR) => Ok(false),
            Ok(_) if watched[0].revents().contains(PollFlags::ERR) => {
                Err("the cgroup of --on-pressure is gone".to_owned())
            }
            Ok(_) => Ok(watched[0].revents().contains(PollFlags::PRI)),
            Err(error) => Err(format!("cannot wait for pressure: {error}")),
        }
    }
}

/// Returns the total stall of a kind in the text of a pressure file.
fn total_us(text: &str, kind: &str) -> Option<u64> {
    let line = text.lines().find(|line| line.split(' ').next() == Some(kind))?;
    line.split(' ').find_map(|field| field.strip_prefix("total=")?.parse().ok())
}

/// Returns the share of time in which tasks were stalled, between the first and the last reading.
fn share(totals: &VecDeque<(u64, u64)>) -> String {
    let (Some((from_ns, from_us)), Some((to_ns, to_us))) = (totals.front(), totals.back()) else {
        return String::new();
    };
    let ns = to_ns.saturating_sub(*from_ns);
    if ns == 0 {
        return String::new();
    }
    let percent = to_us.saturating_sub(*from_us) as f64 * 1e5 / ns as f64;
    format!(" {:.0}% over {:.1} s", percent.min(100.0), ns as f64 / 1e9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn share_is_that_of_the_readings() {
        let text =
            "some avg10=1.00 avg60=0.00 avg300=0.00 total=5000\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n";
        assert_eq!(
            (total_us(text, "some"), total_us(text, "full"), total_us("", "full")),
            (Some(5_000), Some(7), None)
        );
        let totals = VecDeque::from([(1_000_000_000, 5_000), (2_000_000_000, 9_000), (3_000_000_000, 705_000)]);
        assert_eq!(share(&totals), " 35% over 2.0 s");
        assert_eq!(share(&VecDeque::from([(1, 2)])), "");
    }

    #[test]
    fn thresholds_are_named_with_their_cgroup() {
        let named = |text: &str| text.parse::<PressureThreshold>().map(|threshold| threshold.to_string());
        assert_eq!(named("cpu.some>20%/2s").as_deref(), Ok("cpu.some"));
        assert_eq!(named("memory.full>1%/2s in /web.slice").as_deref(), Ok("memory.full in /web.slice"));
    }

    #[test]
    fn thresholds_are_parsed() {
        let of = |resource, kind, stall_us, window_us, cgroup: Option<&str>| PressureThreshold {
            resource,
            kind,
            stall_us,
            window_us,
            cgroup: cgroup.map(str::to_owned),
        };
        for (text, threshold) in [
            ("cpu.some>20%/2s", of("cpu", "some", 400_000, 2_000_000, None)),
            ("memory.full > 100ms / 1s", of("memory", "full", 100_000, 1_000_000, None)),
            ("io.some>50%/500ms in /web.slice", of("io", "some", 250_000, 500_000, Some("/web.slice"))),
        ] {
            assert_eq!(text.parse(), Ok(threshold), "{text}");
        }
        for wrong in [
            "cpu",
            "cpu.some",
            "cpu.some>20%",
            "disk.some>1%/1s",
            "cpu.any>1%/1s",
            "cpu.some>0%/1s",
            "cpu.full>1%/1s",
            "cpu.some>101%/1s",
            "cpu.some>1s/500ms",
            "cpu.some>1%/1m",
            "cpu.some>1%/1",
            "cpu.some>1%/1s in web",
        ] {
            assert!(wrong.parse::<PressureThreshold>().is_err(), "{wrong}");
        }
    }
}
