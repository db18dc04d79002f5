// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tracing instance of our own: its buffers, events and tracer are nobody else's.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::lock::lock;

const PREFIX: &str = "whylate-";

/// An instance, until it is dropped.
#[derive(Debug)]
pub struct Instance {
    folder: PathBuf,
    /// Locked: whoever finds it unlocked knows that nobody lives any more who would remove it.
    _held: File,
}

impl Instance {
    /// Makes one, with something at the end of its name that tells it from others of this process.
    ///
    /// # Errors
    /// When the caller may not, or the kernel has no instances.
    pub fn new(tracefs: &Path, ending: &str) -> Result<Self> {
        for number in 0..1_000 {
            let name = format!("{PREFIX}{}.{number}{ending}", std::process::id());
            let folder = tracefs.join("instances").join(name);
            match fs::create_dir(&folder) {
                Ok(()) => match File::open(&folder) {
                    // Whoever looked for leftovers before it was locked has taken it for one.
                    Ok(held) if lock(&held) && folder.exists() => return Ok(Instance { folder, _held: held }),
                    _ => {}
                },
                // Of another process: numbers of one PID namespace are used in others too.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot make {} (run as root)", folder.display()));
                }
            }
        }
        bail!("too many whylate instances in {}/instances: end other runs of whylate", tracefs.display())
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
    let ours = folders.filter(|folder| folder.file_name().to_string_lossy().starts_with(PREFIX));
    // Its owner holds the lock, wherever it lives: no number tells that, since each PID namespace has its own.
    let left = ours.filter(|folder| File::open(folder.path()).is_ok_and(|held| lock(&held)));
    left.filter(|folder| remove(&folder.path())).count()
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
    fn only_what_nobody_holds_is_removed() {
        let folder = tempfile::tempdir().expect("a folder");
        let instances = folder.path().join("instances");
        for name in ["whylate-1.0", "another"] {
            fs::create_dir_all(instances.join(name)).expect("made");
        }
        let held = Instance::new(folder.path(), ".trace").expect("made");
        let second = Instance::new(folder.path(), ".trace").expect("made");
        assert_ne!(held.folder, second.folder);
        assert_eq!(remove_leftovers(folder.path()), 1);
        let left = [instances.join("whylate-1.0"), instances.join("another"), held.folder.clone()];
        assert_eq!(left.map(|folder| folder.exists()), [false, true, true]);
    }
}
