// SPDX-License-Identifier: MIT OR Apache-2.0
//! Triggers by pressure: the kernel reports when tasks were stalled for longer than a share of a window
//! (Documentation/accounting/psi.rst).

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::kernel::cgroups;

/// Windows that the kernel takes.
const MIN_WINDOW_US: u64 = 500_000;
const MAX_WINDOW_US: u64 = 10_000_000;

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
            return Err("give a share above 0 % and up to 100 %, or a time up to the window".to_owned());
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

/// A trigger that the kernel fires when its threshold is exceeded, at most once per window.
#[derive(Debug)]
pub struct PressureTrigger {
    file: OwnedFd,
}

impl PressureTrigger {
    /// Registers the threshold.
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
            _ => format!("cannot open {name}: {error}"),
        })?;
        let PressureThreshold { kind, stall_us, window_us, .. } = threshold;
        file.write_all(format!("{kind} {stall_us} {window_us}\0").as_bytes())
            .map_err(|error| format!("the kernel refuses the trigger in {name}: {error}"))?;
        Ok(PressureTrigger { file: file.into() })
    }

    /// Returns whether the threshold was exceeded since the last call.
    ///
    /// # Errors
    /// Fails if the cgroup is gone.
    pub fn has_fired(&self) -> Result<bool, String> {
        self.wait(Duration::ZERO)
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

#[cfg(test)]
mod tests {
    use super::*;

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
