// SPDX-License-Identifier: MIT OR Apache-2.0
//! The subjects that watch the load: whylate's account of the CPUs, and common tools.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::loads::TOOLS_CPU;
use crate::child::{Running, Tool, wait_until};
use crate::{floor, machine};

/// Time from when programs or events are there until they are surely attached, and from their end until the kernel has
/// patched its code back.
const SETTLE: Duration = Duration::from_millis(300);
/// Minimum size of a switch in `perf`'s file: a sample's header, its fixed fields and the event's own.
const PERF_BYTES_PER_SWITCH: u64 = 64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Subject {
    /// What any BPF program at a context switch costs.
    Floor,
    Whylate,
    PerfSched,
    Runqlat,
}

pub struct Tools {
    pub whylate: PathBuf,
    /// From libbpf-tools; bcc's if that is not installed.
    pub runqlat: &'static str,
    /// Directory for perf's file.
    scratch: PathBuf,
}

impl Tools {
    pub fn find(whylate: PathBuf) -> Result<Self> {
        let runqlat = ["runqlat", "runqlat-bpfcc"].into_iter().find(|name| machine::has(name));
        let runqlat = runqlat.context("no runqlat to compare with: run `scripts/install-deps bench`")?;
        let scratch = env::temp_dir().join(format!("whylate-bench.{}", process::id()));
        fs::create_dir(&scratch).with_context(|| format!("cannot create {}", scratch.display()))?;
        Ok(Self { whylate, runqlat, scratch })
    }

    fn recording(&self) -> PathBuf {
        self.scratch.join("perf.data")
    }
}

impl Drop for Tools {
    fn drop(&mut self) {
        // Temporary files only.
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

impl Subject {
    pub const ALL: [Self; 4] = [Self::Floor, Self::Whylate, Self::PerfSched, Self::Runqlat];
    /// Subjects with BPF programs.
    pub const WITH_PROGRAMS: [Self; 3] = [Self::Floor, Self::Whylate, Self::Runqlat];

    pub fn name(self) -> &'static str {
        match self {
            Self::Floor => "floor",
            Self::Whylate => "`whylate wq --why 10s`",
            Self::PerfSched => "`perf sched record`",
            Self::Runqlat => "`runqlat`",
        }
    }

    pub fn what(self, tools: &Tools) -> &'static str {
        match self {
            Self::Floor => "an empty `tp_btf/sched_switch`",
            Self::Whylate => "occupancy; no item is late",
            Self::PerfSched => "all events of the scheduler to a file",
            Self::Runqlat if tools.runqlat == "runqlat" => "libbpf-tools",
            Self::Runqlat => "bcc's, for want of libbpf-tools",
        }
    }

    /// Starts it, on `TOOLS_CPU` only if `is_pinned`, and waits until it watches.
    pub fn start(self, tools: &Tools, is_pinned: bool) -> Result<Running> {
        let recording = tools.recording();
        let (whylate, recording_text) = (tools.whylate.to_string_lossy(), recording.to_string_lossy());
        let start = |command: &[&str]| match is_pinned {
            true => Tool::start_on(TOOLS_CPU, command),
            false => Tool::start(command[0], &command[1..]),
        };
        let running = match self {
            Self::Floor => {
                Running::Ours { _links: vec![floor::attach_to_switches().context("cannot attach the empty program")?] }
            }
            Self::Whylate => {
                let mut tool = start(&[&whylate, "wq", "--why", "10s"])?;
                tool.first_output()?;
                Running::Theirs(tool)
            }
            Self::PerfSched => {
                let tool = start(&["perf", "sched", "record", "-o", &recording_text])?;
                wait_until("waited in vain until perf sched record writes its file", || Ok(size(&recording) > 0))?;
                Running::Theirs(tool)
            }
            Self::Runqlat => {
                let running = Running::Theirs(start(&[tools.runqlat])?);
                // Without an interval it prints nothing before its end.
                wait_until("waited in vain until runqlat has its three programs", || {
                    Ok(running.programs()?.len() >= 3)
                })?;
                running
            }
        };
        thread::sleep(SETTLE);
        Ok(running)
    }

    /// Ends it. Fails if it cannot have recorded that many switches.
    pub fn end(self, tools: &Tools, running: Running, switches: u64) -> Result<()> {
        running.end()?;
        if self == Self::PerfSched {
            let size_bytes = size(&tools.recording());
            fs::remove_file(tools.recording()).context("perf sched record wrote no file")?;
            if size_bytes < switches * PERF_BYTES_PER_SWITCH {
                bail!("perf sched record wrote {size_bytes} bytes of {switches} switches");
            }
        }
        thread::sleep(SETTLE);
        Ok(())
    }
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |file| file.len())
}
