// SPDX-License-Identifier: MIT OR Apache-2.0
//! Limits the idle states of CPUs during measurement: leaving a deep idle state takes long.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::Path;

use anyhow::{Context as _, bail};

use crate::kernel::restore::Restore;

const CPUS: &str = "/sys/devices/system/cpu";

/// Asks the kernel to use only idle states with an exit latency of at most `us`, for as long as the file is open.
///
/// # Errors
/// Fails if the caller lacks the privilege, or the kernel has no such file.
pub fn bound_exit_latency(us: u32) -> anyhow::Result<File> {
    let path = "/dev/cpu_dma_latency";
    let mut file = OpenOptions::new()
        .write(true)
        .open(path)
        .with_context(|| format!("cannot open {path} (run as root, or leave --dma-latency out)"))?;
    // The kernel reads a number of this type (kernel/power/qos.c).
    let us = i32::try_from(us).context("the latency is too long")?;
    file.write_all(&us.to_ne_bytes()).with_context(|| format!("cannot write to {path}"))?;
    Ok(file)
}

/// Disables idle states until it is dropped.
#[derive(Debug)]
pub struct Shallow {
    _settings: Restore,
}

impl Shallow {
    /// Disables the idle states of the CPUs that are deeper than state `deepest`; -1 for all.
    ///
    /// # Errors
    /// Fails if a CPU has no idle states to choose from, or the caller lacks the privilege.
    pub fn new(cpus: &[u32], deepest: i32) -> anyhow::Result<Self> {
        Self::below(Path::new(CPUS), Restore::default(), cpus, deepest)
    }

    fn below(root: &Path, mut settings: Restore, cpus: &[u32], deepest: i32) -> anyhow::Result<Self> {
        let mut deeper = Vec::new();
        for cpu in cpus {
            let directory = root.join(format!("cpu{cpu}/cpuidle"));
            let states = states(&directory).unwrap_or_default();
            if states.is_empty() {
                bail!("CPU {cpu} has no idle states to choose from: leave --deepest-idle-state out");
            }
            let states = states.into_iter().filter(|&state| state > deepest);
            deeper.extend(states.map(|state| directory.join(format!("state{state}/disable"))));
        }
        settings.set_each(&deeper, "1")?;
        Ok(Shallow { _settings: settings })
    }
}

fn states(directory: &Path) -> io::Result<Vec<i32>> {
    let names = fs::read_dir(directory)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
    let names = names.collect::<io::Result<Vec<String>>>()?;
    Ok(names.iter().filter_map(|name| name.strip_prefix("state")?.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disables_deeper_states_and_restores_them() {
        let root = tempfile::tempdir().expect("a directory");
        let state = |number: u32| root.path().join(format!("cpu1/cpuidle/state{number}/disable"));
        for (number, disabled) in [(0, "0\n"), (1, "0\n"), (2, "1\n"), (3, "0\n")] {
            fs::create_dir_all(state(number).parent().expect("a parent")).expect("created");
            fs::write(state(number), disabled).expect("written");
        }
        let restore = || Restore::recorded_in(&root.path().join("records"));
        let read = || [0, 1, 2, 3].map(|number| fs::read_to_string(state(number)).expect("read").trim().to_owned());
        let shallow = Shallow::below(root.path(), restore(), &[1], 0).expect("switched off");
        assert_eq!(read(), ["0", "1", "1", "1"]);
        drop(shallow);
        assert_eq!(read(), ["0", "0", "1", "0"]);
        assert!(Shallow::below(root.path(), restore(), &[7], 0).is_err());
    }
}
