// SPDX-License-Identifier: MIT OR Apache-2.0
//! A second instance of the tracer, which is not read while it records: its content at a stop is saved as text.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::TRACER;
use crate::kernel::tracefs::instance::Instance;

/// An event to record in addition to the tracer's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// Group of the event.
    pub system: String,
    /// Name of the event; `None` for all of the group.
    pub name: Option<String>,
    /// Filter expression of the kernel.
    pub filter: Option<String>,
    /// Trigger of the kernel.
    pub trigger: Option<String>,
}

impl TraceEvent {
    fn event_directory(&self) -> String {
        match &self.name {
            Some(name) => format!("events/{}/{name}", self.system),
            None => format!("events/{}", self.system),
        }
    }

    fn has_histogram(&self) -> bool {
        self.trigger.as_ref().is_some_and(|trigger| trigger.starts_with("hist:"))
    }
}

/// Contents of the recording.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Events in addition to the tracer's own.
    pub events: Vec<TraceEvent>,
    /// Size of each CPU's buffer in KiB; `None` for the kernel's default.
    pub buffer_kb: Option<u32>,
    /// Number of worst activations of each CPU that get a late event without the tracer, unless causes are wanted.
    pub worst: Option<usize>,
}

/// The recording instance, removed on drop.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) instance: Instance,
    events: Vec<TraceEvent>,
}

impl Recording {
    /// Starts recording. The tracer's settings have to be made before.
    pub(super) fn new(tracefs: &Path, what: &Record) -> Result<Self> {
        let recording = Recording { instance: Instance::new(tracefs, ".trace")?, events: what.events.clone() };
        let instance = &recording.instance;
        if let Some(kb) = what.buffer_kb {
            instance.write("buffer_size_kb", &kb.to_string())?;
        }
        for event in &recording.events {
            let directory = event.event_directory();
            if !instance.path(&directory).exists() {
                let known = tracefs.join("available_events");
                bail!("this kernel has no {directory} to record (choose from {})", known.display());
            }
            if let Some(filter) = &event.filter {
                instance.write(&format!("{directory}/filter"), filter)?;
            }
            if let Some(trigger) = &event.trigger {
                instance.write(&format!("{directory}/trigger"), trigger)?;
            }
            instance.write(&format!("{directory}/enable"), "1")?;
        }
        // Records interference with the measured thread, and its duration.
        instance.write("events/osnoise/enable", "1")?;
        Ok(recording)
    }

    /// Starts the tracer here; with the first instance of the tracer its threads start too.
    pub(super) fn start(&self) -> Result<()> {
        self.instance.write("current_tracer", TRACER)
    }

    /// Resumes after a stop, with an empty trace.
    pub(super) fn resume(&self) -> Result<()> {
        self.instance.write("trace", "")?;
        self.instance.write("tracing_on", "1")
    }

    /// Writes the trace as text.
    pub(super) fn save(&self, out: &mut dyn Write) -> Result<()> {
        let path = self.instance.path("trace");
        let mut trace = File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
        io::copy(&mut trace, out).context("cannot copy the trace")?;
        Ok(())
    }

    /// Returns the kernel's histograms, each with the name of its event.
    pub(super) fn histograms(&self) -> Result<Vec<(String, String)>> {
        let with_histogram = self.events.iter().filter(|event| event.has_histogram());
        let named = with_histogram.filter_map(|event| Some((event, event.name.as_ref()?)));
        named
            .map(|(event, name)| {
                let text = self.instance.read(&format!("{}/hist", event.event_directory()))?;
                Ok((format!("{}_{name}", event.system), text))
            })
            .collect()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // An instance with histograms that have variables cannot be removed; a histogram may depend on an earlier one.
        for (event, trigger) in self.events.iter().rev().filter_map(|event| Some((event, event.trigger.as_ref()?))) {
            let _ = self.instance.write(&format!("{}/trigger", event.event_directory()), &format!("!{trigger}"));
        }
    }
}
