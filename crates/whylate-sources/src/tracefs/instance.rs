// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tracing instance of our own: its buffers, events and tracer are nobody else's.

use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::process;

const PREFIX: &str = "whylate-";

/// An instance, until it is dropped.
#[derive(Debug)]
pub struct Instance {
    folder: PathBuf,
}

impl Instance {
    /// Makes one that is named after this process, with something at the end that tells it from its others.
    ///
    /// # Errors
    /// When the caller may not, or the kernel has no instances.
    pub fn new(tracefs: &Path, ending: &str) -> Result<Self> {
        let process = process::this_process().context("/proc is not mounted")?;
        let folder = tracefs.join("instances").join(format!("{PREFIX}{process}{ending}"));
        fs::create_dir(&folder).with_context(|| format!("cannot make {} (run as root)", folder.display()))?;
        Ok(Instance { folder })
    }

    /// Where one of its files is.
    pub fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    /// Writes to one of its files.
    ///
    /// # Errors
    /// Those of the kernel, with the file's name.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path(file);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }

    /// Reads one of its files.
    ///
    /// # Errors
    /// Those of the kernel, with the file's name.
    pub fn read(&self, file: &str) -> Result<String> {
        let path = self.path(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        remove(&self.folder);
    }
}

/// Removes instances of processes that are gone; returns how many those were.
pub fn remove_leftovers(tracefs: &Path) -> usize {
    let folders = fs::read_dir(tracefs.join("instances")).into_iter().flatten().flatten();
    let left = folders.filter(|folder| {
        let name = folder.file_name();
        process_of(&name.to_string_lossy()).is_some_and(|process| !process::is_running(process))
    });
    left.filter(|folder| remove(&folder.path())).count()
}

/// What an instance of ours says of its process.
fn process_of(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)?.split('.').next()
}

/// An instance with a tracer that runs cannot be removed.
fn remove(folder: &Path) -> bool {
    let _ =
        OpenOptions::new().write(true).open(folder.join("current_tracer")).and_then(|mut file| file.write_all(b"nop"));
    if fs::remove_dir(folder).is_ok() {
        return true;
    }
    // Histograms with variables keep it; one may need another, so a second pass takes what the first could not.
    (0..2).for_each(|_| remove_triggers(&folder.join("events")));
    fs::remove_dir(folder).is_ok()
}

fn remove_triggers(events: &Path) {
    let children = |folder: &Path| fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    for event in children(events).flat_map(|system| children(&system).collect::<Vec<_>>()) {
        let file = event.join("trigger");
        let text = fs::read_to_string(&file).unwrap_or_default();
        for trigger in text.lines().filter(|line| !line.starts_with('#')) {
            // What it is at the moment follows in brackets.
            let trigger = trigger.split(" [").next().unwrap_or_default();
            let _ = fs::write(&file, format!("!{trigger}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_of_ours_are_told_by_their_names() {
        assert_eq!(process_of("whylate-12-345"), Some("12-345"));
        assert_eq!(process_of("whylate-12-345.trace"), Some("12-345"));
        assert_eq!(process_of("timerlat_top"), None);
    }

    #[test]
    fn only_what_dead_processes_have_left_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let instances = folder.path().join("instances");
        let living = process::this_process().expect("/proc is mounted");
        // No process has a number so large.
        let names = [format!("whylate-{living}"), "whylate-4294967295-1".to_owned(), "another".to_owned()];
        for name in &names {
            fs::create_dir_all(instances.join(name)).expect("made");
        }
        assert_eq!(remove_leftovers(folder.path()), 1);
        let left = names.map(|name| instances.join(name).exists());
        assert_eq!(left, [true, false, true]);
    }
}
