// SPDX-License-Identifier: MIT OR Apache-2.0
//! What is compared: whylate with some options, the common tools, an empty BPF program, and nothing at all.

use std::fs;
use std::path::{Path, PathBuf};
use std::process;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use libbpf_rs::Link;

use crate::child::{Tool, wait_until};
use crate::loads::TOOLS_CPU;
use crate::machine;
use crate::programs::{self, Counts, Programs};

/// Name of the unwatched subject, which shows what the machine itself adds.
pub const NOTHING: &str = "nothing: what the machine itself adds";
/// Time from when a subject is ready until its programs are surely attached, and from its end until the kernel has
/// patched its code back; the latter for subjects with all sources.
const SETTLE: Duration = Duration::from_millis(500);
const SETTLE_ALL: Duration = Duration::from_millis(1_500);
/// Minimum size of a switch in `perf`'s file: a sample's header, its fixed fields and the event's own.
const PERF_BYTES_PER_SWITCH: u64 = 64;

/// A row of a comparison.
pub struct Subject {
    pub name: &'static str,
    pub what: &'static str,
    command: Vec<String>,
    ready: Ready,
    /// Its threads run on all CPUs whatever the load.
    is_everywhere: bool,
}

/// When a subject measures.
pub enum Ready {
    /// It has no process of its own: empty programs that this process attaches, or none.
    Links(fn() -> libbpf_rs::Result<Vec<Link>>),
    /// It has printed something.
    Output,
    /// It has this number of BPF programs, of which those that follow are soon attached.
    Programs(usize),
    /// It has written to this file.
    File(PathBuf),
    /// It has set this file of the kernel to 1.
    Setting(PathBuf),
}

impl Subject {
    pub fn new(name: &'static str, what: &'static str, command: &[&str], ready: Ready) -> Self {
        let command = command.iter().copied().map(str::to_owned).collect();
        Self { name, what, command, ready, is_everywhere: false }
    }

    pub fn label(&self) -> String {
        format!("{} | {}", self.name, self.what)
    }

    pub fn name_only(&self) -> String {
        self.name.to_owned()
    }

    pub fn everywhere(self) -> Self {
        Self { is_everywhere: true, ..self }
    }

    pub fn nothing() -> Self {
        Self::new(NOTHING, "", &[], Ready::Links(|| Ok(Vec::new())))
    }

    pub fn empty_at_switches() -> Self {
        Self::new("floor", "an empty `tp_btf/sched_switch`", &[], Ready::Links(programs::attach_to_switches))
    }

    /// Returns perf, which writes its recording to this directory.
    pub fn perf_sched(directory: &Path) -> Self {
        let file = directory.join("perf.data");
        let command = ["perf", "sched", "record", "-o", &file.to_string_lossy()];
        Self::new("`perf sched record`", "all events of the scheduler to a file", &command, Ready::File(file.clone()))
    }

    pub fn offcputime() -> Self {
        Self::new("`offcputime`", "libbpf-tools", &["offcputime"], Ready::Programs(1))
    }

    /// Returns the runqlat of libbpf-tools, or bcc's if that is not installed. It prints nothing before its end.
    pub fn runqlat() -> Result<Self> {
        let tools = [("runqlat", "libbpf-tools"), ("runqlat-bpfcc", "bcc's, for want of libbpf-tools")];
        let tool = tools.into_iter().find(|(tool, _)| machine::has(tool));
        let (tool, what) = tool.context("no runqlat to compare with: run `scripts/install-deps bench`")?;
        Ok(Self::new("`runqlat`", what, &[tool], Ready::Programs(3)))
    }

    /// Starts it and waits until it is ready; on `TOOLS_CPU` only if `is_pinned`, which applies to its user space.
    pub fn start(&self, is_pinned: bool) -> Result<Running> {
        let links = if let Ready::Links(attach) = self.ready { attach()? } else { Vec::new() };
        let cpu = TOOLS_CPU.to_string();
        let pin = if is_pinned && !self.is_everywhere { &["taskset", "-c", &cpu][..] } else { &[] };
        let command: Vec<&str> = pin.iter().copied().chain(self.command.iter().map(String::as_str)).collect();
        if self.command.is_empty() {
            return Ok(Running { tool: None, _links: links });
        }
        let mut tool = Tool::start(command[0], &command[1..])?;
        if let Ready::Output = self.ready {
            tool.first_output()?;
        }
        wait_until(&format!("{} does not begin to measure", self.name), || {
            tool.expect_running()?;
            Ok(match &self.ready {
                Ready::Links(_) | Ready::Output => true,
                Ready::Programs(count) => programs::of_process(tool.pid())?.len() >= *count,
                Ready::File(path) => size(path) > 0,
                Ready::Setting(path) => fs::read_to_string(path).is_ok_and(|text| text.trim() == "1"),
            })
        })?;
        Ok(Running { tool: Some(tool), _links: links })
    }

    /// Measures something while it surely watches, and ends it. Returns its standard error too.
    pub fn watch<T>(&self, is_pinned: bool, work: impl FnOnce(&Running) -> Result<T>) -> Result<(T, String)> {
        let settle = || match self.ready {
            _ if self.is_everywhere => thread::sleep(SETTLE_ALL),
            Ready::Links(_) if self.name == NOTHING => {}
            _ => thread::sleep(SETTLE),
        };
        let running = self.start(is_pinned)?;
        settle();
        let measured = work(&running)?;
        let errors = running.end()?;
        settle();
        Ok((measured, errors))
    }

    /// Removes the file that it has written, if it writes one. Fails if that cannot hold this number of switches.
    pub fn remove_recording(&self, switches: u64) -> Result<()> {
        let Ready::File(path) = &self.ready else { return Ok(()) };
        let size_bytes = size(path);
        fs::remove_file(path).with_context(|| format!("{} wrote no file", self.name))?;
        let is_whole = size_bytes >= switches * PERF_BYTES_PER_SWITCH;
        ensure!(is_whole, "{} wrote {size_bytes} bytes of {switches} switches", self.name);
        Ok(())
    }
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |file| file.len())
}

/// A running subject, ended on drop.
pub struct Running {
    pub tool: Option<Tool>,
    _links: Vec<Link>,
}

impl Running {
    /// Returns its BPF programs; those of this process if it has none of its own.
    pub fn programs(&self) -> Result<Programs> {
        let pid = self.tool.as_ref().map_or_else(process::id, Tool::pid);
        programs::of_process(pid).context("the tool has ended")
    }

    /// Returns what its programs did during the work, as the kernel counts it.
    pub fn count<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<(T, Vec<Counts>)> {
        let before = self.programs()?;
        let done = work()?;
        Ok((done, programs::difference(&before, &self.programs()?)))
    }

    /// Ends it, and returns its standard error.
    pub fn end(self) -> Result<String> {
        self.tool.map_or_else(|| Ok(String::new()), Tool::end)
    }
}
