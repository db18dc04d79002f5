// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel settings changed until the end, and directories made in the kernel's file systems. A journal that all processes
//! share has them: settings of several processes nest, and after a SIGKILL the next start restores the old values and removes
//! the directories.

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
use crate::lock::lock;
use crate::tracefs::{self, instance};

/// Where the journal is, with a file for each process, which is locked as long as the process lives. It goes with a reboot,
/// as the settings do.
const RECORDS: &str = "/run/whylate";
/// Only files below these are settings of the kernel.
const SETTINGS: [&str; 2] = ["/sys", "/proc/sys"];
/// How long another process may have the journal: a process that is stopped keeps it.
const PATIENCE: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

/// Changed settings and directories, until it is dropped.
#[derive(Debug)]
pub struct Restore {
    records: PathBuf,
    places: Vec<PathBuf>,
    /// The name of this owner in the journal, from the first entry on, and its file, which stays locked.
    owner: Option<(String, File)>,
}

impl Default for Restore {
    fn default() -> Self {
        Restore { records: RECORDS.into(), places: SETTINGS.map(PathBuf::from).to_vec(), owner: None }
    }
}

impl Restore {
    /// With a journal elsewhere, of settings beside it.
    #[cfg(test)]
    pub(crate) fn recorded_in(records: &Path) -> Self {
        Restore {
            places: records.parent().map(Path::to_owned).into_iter().collect(),
            records: records.into(),
            owner: None,
        }
    }

    /// What a setting is, without the end of its line.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(path: &Path) -> anyhow::Result<String> {
        setting::read(path)
    }

    /// Changes a setting of one line. It keeps its value until the end, also if another process of whylate that wanted the
    /// same value ends before.
    ///
    /// # Errors
    /// When it cannot be written, or not entered in the journal.
    pub fn set(&mut self, path: &Path, value: &str) -> anyhow::Result<()> {
        self.set_all(&[(Setting::line(path), value)])
    }

    /// Sets several files of one line to the same value.
    ///
    /// # Errors
    /// When one cannot be written, or not entered in the journal.
    pub fn set_each(&mut self, paths: &[PathBuf], value: &str) -> anyhow::Result<()> {
        let wanted: Vec<_> = paths.iter().map(|path| (Setting::line(path), value)).collect();
        self.set_all(&wanted)
    }

    /// Changes one of several settings that a file lists by name, each with `NO_` before it where it is off.
    ///
    /// # Errors
    /// When the file does not list it, it cannot be written, or not entered in the journal.
    pub fn set_flag(&mut self, path: &Path, name: &str, is_on: bool) -> anyhow::Result<()> {
        self.set_all(&[(Setting::flag(path, name), of_word(is_on))])
    }

    /// Enables a controller in a cgroup.subtree_control.
    ///
    /// # Errors
    /// When it cannot be written, or not entered in the journal.
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
            // Of another process that has set it, too: it has to stay when that one ends.
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
                // The kernel has another form for it.
                *wrote = now;
                locked.journal.save(&self.records)?;
            }
        }
        Ok(())
    }

    /// Makes a directory that is removed at the end, and is empty by then, such as a cgroup.
    ///
    /// # Errors
    /// When it is there already, cannot be made, or not entered in the journal.
    pub fn make_directory(&mut self, path: &Path) -> anyhow::Result<()> {
        let mut locked = Locked::new(&self.records)?;
        locked.undo(None, &self.places)?;
        // Its owner is not known.
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

    /// The name in the journal.
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
                // Of another process: numbers of one PID namespace are used in others too.
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
        // Where the journal cannot be had, the next start finds that the owner has ended.
        if let Ok(mut locked) = Locked::new(&self.records) {
            let _ = locked.undo(Some(owner), &self.places);
            let _ = fs::remove_file(self.records.join(owner));
        }
    }
}

/// The journal while no other process has it.
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
                began.elapsed() < PATIENCE,
                "another whylate has locked {}: continue or end that process if it is stopped",
                records.display()
            );
            thread::sleep(POLL);
        }
        Ok(Locked { records: records.to_owned(), held, journal: Journal::read(records)? })
    }

    /// Undoes what processes that have ended have left, and what this owner has changed.
    fn undo(&mut self, own: Option<&str>, places: &[PathBuf]) -> anyhow::Result<PutBack> {
        let (mut living, mut ended) = (HashSet::new(), Vec::new());
        for file in fs::read_dir(&self.records).into_iter().flatten().flatten() {
            let name = file.file_name().to_string_lossy().into_owned();
            if !name.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.') {
                continue;
            }
            let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(file.path());
            // The owner holds the lock, wherever it lives: a PID does not identify it, since each PID namespace has its own.
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
        // A process that was forked while the journal was locked has the same open file, and keeps it.
        let _ = flock(&self.held, FlockOperation::Unlock);
    }
}

/// What processes that are gone had left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PutBack {
    /// Settings that they had changed.
    pub settings: usize,
    /// Tracing instances of theirs.
    pub instances: usize,
    /// Cgroups of theirs.
    pub cgroups: usize,
}

/// Puts back what processes that are gone have left changed, and removes the tracing instances and cgroups that they have
/// left. A setting that somebody else has changed since keeps its value.
pub fn recover() -> PutBack {
    // The tracer of an instance that is gone does not begin anew with each setting.
    let instances = tracefs::find().map_or(0, |folder| instance::remove_leftovers(&folder));
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

/// A directory that no other user can write to.
fn is_ours(directory: &Path) -> bool {
    fs::symlink_metadata(directory).is_ok_and(|data| {
        data.is_dir() && data.uid() == rustix::process::geteuid().as_raw() && data.mode() & 0o022 == 0
    })
}
