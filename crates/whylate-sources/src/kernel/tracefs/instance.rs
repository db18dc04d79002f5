// SPDX-License-Identifier: MIT OR Apache-2.0
//! A tracing instance of our own, with its own buffers, events and tracer.

use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};

use crate::kernel::lock::lock;

const PREFIX: &str = "whylate-";

/// A tracing instance; removed when dropped.
#[derive(Debug)]
pub struct Instance {
    directory: PathBuf,
    /// Locked directory: an unlocked one belongs to an exited process, and may be removed.
    _held: File,
}

impl Instance {
    /// Creates an instance. `ending` is appended to its name, to distinguish it from others of this process.
    ///
    /// # Errors
    /// Fails if the caller lacks the privilege, or the kernel has no instances.
    pub fn new(tracefs: &Path, ending: &str) -> Result<Self> {
        for number in 0..1_000 {
            let name = format!("{PREFIX}{}.{number}{ending}", std::process::id());
            let directory = tracefs.join("instances").join(name);
            match fs::create_dir(&directory) {
                Ok(()) => match File::open(&directory) {
                    // Another process that looked for leftovers before it was locked may have removed it.
                    Ok(held) if lock(&held) && directory.exists() => return Ok(Instance { directory, _held: held }),
                    _ => {}
                },
                // It belongs to another process: PIDs are reused in other PID namespaces.
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot make {} (run as root)", directory.display()));
                }
            }
        }
        bail!("too many whylate instances in {}/instances: end other runs of whylate", tracefs.display())
    }

    /// Returns the path of one of the instance's files.
    pub fn path(&self, file: &str) -> PathBuf {
        self.directory.join(file)
    }

    /// Writes to one of the instance's files.
    ///
    /// # Errors
    /// Fails if the kernel refuses it; contains the file's name.
    pub fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path(file);
        fs::write(&path, text).with_context(|| format!("cannot write {text} to {}", path.display()))
    }

    /// Reads one of the instance's files.
    ///
    /// # Errors
    /// Fails if the kernel refuses it; contains the file's name.
    pub fn read(&self, file: &str) -> Result<String> {
        let path = self.path(file);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    }
}

impl Drop for Instance {
    fn drop(&mut self) {
        remove(&self.directory);
    }
}

/// Removes instances of exited processes. Returns their number.
pub fn remove_leftovers(tracefs: &Path) -> usize {
    let directories = fs::read_dir(tracefs.join("instances")).into_iter().flatten().flatten();
    let ours = directories.filter(|directory| directory.file_name().to_string_lossy().starts_with(PREFIX));
    // The owner holds the lock, in whatever PID namespace it runs: PIDs do not identify it.
    // The lock is held until the instance is removed, so that a process that has just made it makes another one.
    let is_removed = |path: PathBuf| File::open(&path).is_ok_and(|held| lock(&held) && remove(&path));
    ours.filter(|directory| is_removed(directory.path())).count()
}

/// Removes an instance. One with a running tracer cannot be removed.
fn remove(directory: &Path) -> bool {
    let _ = OpenOptions::new()
        .write(true)
        .open(directory.join("current_tracer"))
        .and_then(|mut file| file.write_all(b"nop"));
    if fs::remove_dir(directory).is_ok() {
        return true;
    }
    // Histograms with variables keep the instance; one may need another, so a second pass removes what the first could
    // not.
    (0..2).for_each(|_| remove_triggers(&directory.join("events")));
    fs::remove_dir(directory).is_ok()
}

fn remove_triggers(events: &Path) {
    let children = |directory: &Path| fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    for event in children(events).flat_map(|system| children(&system).collect::<Vec<_>>()) {
        let file = event.join("trigger");
        let text = fs::read_to_string(&file).unwrap_or_default();
        for trigger in text.lines().filter(|line| !line.starts_with('#')) {
            // Its current state follows in brackets.
            let trigger = trigger.split(" [").next().unwrap_or_default();
            let _ = fs::write(&file, format!("!{trigger}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn removes_only_unlocked_instances() {
        let directory = tempfile::tempdir().expect("a directory");
        let instances = directory.path().join("instances");
        for name in ["whylate-1.0", "another"] {
            fs::create_dir_all(instances.join(name)).expect("made");
        }
        let held = Instance::new(directory.path(), ".trace").expect("made");
        let second = Instance::new(directory.path(), ".trace").expect("made");
        assert_ne!(held.directory, second.directory);
        assert_eq!(remove_leftovers(directory.path()), 1);
        let left = [instances.join("whylate-1.0"), instances.join("another"), held.directory.clone()];
        assert_eq!(left.map(|directory| directory.exists()), [false, true, true]);
    }
}
