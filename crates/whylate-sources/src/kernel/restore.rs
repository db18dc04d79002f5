// SPDX-License-Identifier: MIT OR Apache-2.0
//! Temporarily changed kernel settings, and directories created in the kernel's file systems. They are recorded in a
//! journal shared by all processes: settings of several processes nest, and after a SIGKILL the next start restores the
//! old values and removes the directories.

mod journal;
mod setting;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use rustix::fs::{FlockOperation, flock};

use self::journal::{Change, Entry, Journal};
use self::setting::{Setting, of_word};
use crate::kernel::lock::lock;
use crate::kernel::tracefs::{self, instance};

/// Directory of the journal, with a file for each process, which is locked while the process lives. Lost on reboot, as
/// the settings are.
const RECORDS: &str = "/run/whylate";
/// Only files below these are kernel settings.
const SETTINGS: [&str; 2] = ["/sys", "/proc/sys"];
/// Maximum wait for the journal's lock: a stopped process keeps it.
const LOCK_TIMEOUT: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

/// Changed settings and created directories, restored and removed when dropped.
#[derive(Debug)]
pub struct Restore {
    records: PathBuf,
    places: Vec<PathBuf>,
    /// Name of this owner in the journal, from the first entry on, and its lock file.
    owner: Option<(String, File)>,
}

impl Default for Restore {
    fn default() -> Self {
        Restore { records: RECORDS.into(), places: SETTINGS.map(PathBuf::from).to_vec(), owner: None }
    }
}

impl Restore {
    /// Uses a journal in another directory, for settings next to it.
    #[cfg(test)]
    pub(crate) fn recorded_in(records: &Path) -> Self {
        Restore {
            places: records.parent().map(Path::to_owned).into_iter().collect(),
            records: records.into(),
            owner: None,
        }
    }

    /// Reads a setting, without the trailing newline.
    ///
    /// # Errors
    /// Fails if the setting cannot be read.
    pub fn read(path: &Path) -> anyhow::Result<String> {
        setting::read(path)
    }

    /// Changes a setting of one line. It keeps its value until the end, even if another process of whylate that has set
    /// the same value ends before.
    ///
    /// # Errors
    /// Fails if the setting cannot be written, or recorded in the journal.
    pub fn set(&mut self, path: &Path, value: &str) -> anyhow::Result<()> {
        self.set_all(&[(Setting::line(path), value)])
    }

    /// Sets several files of one line to the same value.
    ///
    /// # Errors
    /// Fails if a file cannot be written, or recorded in the journal.
    pub fn set_each(&mut self, paths: &[PathBuf], value: &str) -> anyhow::Result<()> {
        let wanted: Vec<_> = paths.iter().map(|path| (Setting::line(path), value)).collect();
        self.set_all(&wanted)
    }

    /// Changes one of several settings that a file lists by name, each prefixed with `NO_` if off.
    ///
    /// # Errors
    /// Fails if the file does not list it, or it cannot be written or recorded in the journal.
    pub fn set_flag(&mut self, path: &Path, name: &str, is_on: bool) -> anyhow::Result<()> {
        self.set_all(&[(Setting::flag(path, name), of_word(is_on))])
    }

    /// Enables a controller in a cgroup.subtree_control.
    ///
    /// # Errors
    /// Fails if the setting cannot be written, or recorded in the journal.
    pub fn enable_controller(&mut self, path: &Path, name: &str) -> anyhow::Result<()> {
        self.set_all(&[(Setting::controller(path, name), of_word(true))])
    }

    fn set_all(&mut self, wanted: &[(Setting, &str)]) -> anyhow::Result<()> {
        // Without a journal, no process has changed anything.
        if !is_ours(&self.records) {
            let stand = wanted.iter().map(|(setting, value)| Ok(setting.read()? == *value));
            if stand.collect::<anyhow::Result<Vec<bool>>>()?.into_iter().all(|stands| stands) {
                return Ok(());
            }
        }
        let mut locked = Locked::new(&self.records)?;
        locked.undo(None, &self.places)?;
        let changed = locked.journal.settings();
        for (setting, value) in wanted {
            let found = setting.read()?;
            // If another process has set it too, it has to stay when that one ends.
            if found == *value && !changed.contains(setting) {
                continue;
            }
            let owner = self.owner(&locked)?;
            let change = Change::Setting { setting: setting.clone(), found, wrote: (*value).to_owned() };
            locked.journal.append(&self.records, Entry { owner, change })?;
            if let Err(error) = setting.write(value) {
                locked.journal.entries.pop();
                locked.journal.save(&self.records)?;
                return Err(error).with_context(|| format!("cannot write to {} (run as root)", setting.path.display()));
            }
            let now = setting.read()?;
            if let (true, Some(Entry { change: Change::Setting { wrote, .. }, .. })) =
                (now != *value, locked.journal.entries.last_mut())
            {
                // The kernel formats the value differently.
                *wrote = now;
                locked.journal.save(&self.records)?;
            }
        }
        Ok(())
    }

    /// Creates a directory that is removed at the end, and is empty by then, such as a cgroup.
    ///
    /// # Errors
    /// Fails if the directory exists already, or cannot be created or recorded in the journal.
    pub fn make_directory(&mut self, path: &Path) -> anyhow::Result<()> {
        let mut locked = Locked::new(&self.records)?;
        locked.undo(None, &self.places)?;
        // Its owner is unknown.
        ensure!(!path.exists(), "{} already exists: remove it", path.display());
        let owner = self.owner(&locked)?;
        locked.journal.append(&self.records, Entry { owner, change: Change::Directory(path.to_owned()) })?;
        if let Err(error) = fs::create_dir(path) {
            locked.journal.entries.pop();
            locked.journal.save(&self.records)?;
            return Err(error).with_context(|| format!("cannot make {} (run as root)", path.display()));
        }
        Ok(())
    }

    /// Returns the owner's name in the journal, which is created first.
    fn owner(&mut self, locked: &Locked) -> anyhow::Result<String> {
        if let Some((owner, _)) = &self.owner {
            return Ok(owner.clone());
        }
        for number in 0..1_000 {
            let owner = format!("{}.{number}", std::process::id());
            let path = locked.records.join(&owner);
            match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
                Ok(file) => {
                    ensure!(lock(&file), "another program has locked {}", path.display());
                    self.owner = Some((owner.clone(), file));
                    return Ok(owner);
                }
                // It belongs to another process: PIDs are reused in other PID namespaces.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(error).with_context(|| format!("cannot write to {}", path.display())),
            }
        }
        bail!("too many files in {}: end other runs of whylate", locked.records.display())
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        let Some((owner, _)) = &self.owner else { return };
        // If the journal cannot be locked, the next start finds that the owner has ended.
        if let Ok(mut locked) = Locked::new(&self.records) {
            let _ = locked.undo(Some(owner), &self.places);
            let _ = fs::remove_file(self.records.join(owner));
        }
    }
}

/// The journal, locked by this process.
struct Locked {
    records: PathBuf,
    held: File,
    journal: Journal,
}

impl Locked {
    fn new(records: &Path) -> anyhow::Result<Self> {
        let made = DirBuilder::new().mode(0o700).create(records);
        if made.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::AlreadyExists) {
            made.with_context(|| format!("cannot make {} (run as root)", records.display()))?;
        }
        ensure!(is_ours(records), "others can write to {}: remove it", records.display());
        let held = File::open(records).with_context(|| format!("cannot open {}", records.display()))?;
        let began = Instant::now();
        while !lock(&held) {
            ensure!(
                began.elapsed() < LOCK_TIMEOUT,
                "another whylate has locked {}: continue or end that process if it is stopped",
                records.display()
            );
            thread::sleep(POLL);
        }
        Ok(Locked { records: records.to_owned(), held, journal: Journal::read(records)? })
    }

    /// Undoes the changes of exited processes, and those of this owner.
    fn undo(&mut self, own: Option<&str>, places: &[PathBuf]) -> anyhow::Result<PutBack> {
        let (mut living, mut ended) = (HashSet::new(), Vec::new());
        for file in fs::read_dir(&self.records).into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            if !name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
                continue;
            }
            let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(file.path());
            // The owner holds the lock, in whatever PID namespace it runs: PIDs do not identify it.
            match opened {
                Ok(opened) if lock(&opened) => ended.push(file.path()),
                _ => {
                    living.insert(name);
                }
            }
        }
        let has_ended = |owner: &str| own == Some(owner) || !living.contains(owner);
        if !self.journal.entries.iter().any(|entry| has_ended(&entry.owner)) && ended.is_empty() {
            return Ok(PutBack::default());
        }
        let undone = self.journal.undo(&has_ended, own, places);
        self.journal.save(&self.records)?;
        for owner in ended {
            let _ = fs::remove_file(owner);
        }
        Ok(undone)
    }
}

impl Drop for Locked {
    fn drop(&mut self) {
        // A process forked while the journal was locked shares the open file, and would keep the lock.
        let _ = flock(&self.held, FlockOperation::Unlock);
    }
}

/// Numbers of settings restored and directories removed after exited processes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// Number of settings restored.
    pub settings: usize,
    /// Number of tracing instances removed.
    pub instances: usize,
    /// Number of cgroups removed.
    pub cgroups: usize,
}

/// Restores settings changed by exited processes, and removes their tracing instances and cgroups. A setting that has
/// been changed by another program since keeps its value.
pub fn recover() -> PutBack {
    // Instances first: a leftover tracer would restart with each setting.
    let instances = tracefs::find().map_or(0, |directory| instance::remove_leftovers(&directory));
    PutBack { instances, ..recover_from(Path::new(RECORDS), &SETTINGS.map(PathBuf::from)) }
}

fn recover_from(records: &Path, places: &[PathBuf]) -> PutBack {
    // A user who could write there could have root write anywhere.
    if !is_ours(records) {
        return PutBack::default();
    }
    let undone = Locked::new(records).and_then(|mut locked| locked.undo(None, places));
    undone.unwrap_or_default()
}

/// Tests for a directory that no other user can write to.
fn is_ours(directory: &Path) -> bool {
    fs::symlink_metadata(directory).is_ok_and(|data| {
        data.is_dir() && data.uid() == rustix::process::geteuid().as_raw() && data.mode() & 0o022 == 0
    })
}
