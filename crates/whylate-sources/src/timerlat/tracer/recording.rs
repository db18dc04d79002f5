// SPDX-License-Identifier: MIT OR Apache-2.0
//! A second instance of the tracer that nobody reads while it records: what is in it at a stop is saved as text.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;

use anyhow::{Context as _, Result, bail};

use super::TRACER;
use crate::tracefs::instance::Instance;

/// Events to record beside the tracer's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceEvent {
    /// The event's group.
    pub system: String,
    /// The event; `None` for all of the group.
    pub name: Option<String>,
    /// Record only what this accepts, in the kernel's language.
    pub filter: Option<String>,
    /// What the kernel does at each event, in its language.
    pub trigger: Option<String>,
}

impl TraceEvent {
    fn folder(&self) -> String {
        match &self.name {
            Some(name) => format!("events/{}/{name}", self.system),
            None => format!("events/{}", self.system),
        }
    }

    fn has_histogram(&self) -> bool {
        self.trigger.as_ref().is_some_and(|trigger| trigger.starts_with("hist:"))
    }
}

/// What to record.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Beside the tracer's own.
    pub events: Vec<TraceEvent>,
    /// Size of each CPU's buffer in KiB; `None` for the kernel's.
    pub buffer_kb: Option<u32>,
    /// Without the tracer: what had the CPU of so many worst activations of each CPU, unless causes are asked for.
    pub worst: Option<usize>,
}

/// Until it is dropped.
#[derive(Debug)]
pub(super) struct Recording {
    pub(super) instance: Instance,
    events: Vec<TraceEvent>,
}

impl Recording {
    /// It records from now on. The tracer's settings have to be made before.
    pub(super) fn new(tracefs: &Path, what: &Record) -> Result<Self> {
        let recording = Recording { instance: Instance::new(tracefs, ".trace")?, events: what.events.clone() };
        let instance = &recording.instance;
        if let Some(kb) = what.buffer_kb {
            instance.write("buffer_size_kb", &kb.to_string())?;
        }
        for event in &recording.events {
            let folder = event.folder();
            if !instance.path(&folder).exists() {
                let known = tracefs.join("available_events");
                bail!("this kernel has no {folder} to record (choose from {})", known.display());
            }
            if let Some(filter) = &event.filter {
                instance.write(&format!("{folder}/filter"), filter)?;
            }
            if let Some(trigger) = &event.trigger {
                instance.write(&format!("{folder}/trigger"), trigger)?;
            }
            instance.write(&format!("{folder}/enable"), "1")?;
        }
        // Whoever interfered with the measured thread, and for how long.
        instance.write("events/osnoise/enable", "1")?;
        Ok(recording)
    }

    /// Begins; with the first instance of the tracer its threads begin too.
    pub(super) fn start(&self) -> Result<()> {
        self.instance.write("current_tracer", TRACER)
    }

    /// Goes on after a stop, with an empty trace.
    pub(super) fn resume(&self) -> Result<()> {
        self.instance.write("trace", "")?;
        self.instance.write("tracing_on", "1")
    }

    /// What it has recorded, as text.
    pub(super) fn save(&self, out: &mut dyn Write) -> Result<()> {
        let path = self.instance.path("trace");
        let mut trace = File::open(&path).with_context(|| format!("cannot read {}", path.display()))?;
        io::copy(&mut trace, out).context("cannot copy the trace")?;
        Ok(())
    }

    /// The kernel's histograms, each with the name of its event.
    pub(super) fn histograms(&self) -> Result<Vec<(String, String)>> {
        let with_histogram = self.events.iter().filter(|event| event.has_histogram());
        let named = with_histogram.filter_map(|event| Some((event, event.name.as_ref()?)));
        named
            .map(|(event, name)| {
                let text = self.instance.read(&format!("{}/hist", event.folder()))?;
                Ok((format!("{}_{name}", event.system), text))
            })
            .collect()
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        // An instance whose events have histograms with variables cannot be removed; one may need another.
        for (event, trigger) in self.events.iter().rev().filter_map(|event| Some((event, event.trigger.as_ref()?))) {
            let _ = self.instance.write(&format!("{}/trigger", event.folder()), &format!("!{trigger}"));
        }
    }
}
