// SPDX-License-Identifier: MIT OR Apache-2.0
//! The journal of changed settings and created directories of all processes, in order.
//!
//! Each entry has the value that its process found and the one that it wrote. The entries of one setting form a chain:
//! the last one's value is set in the kernel, each has found what the previous one wrote, and the first has found the
//! original. When an entry is removed from the middle, the next one inherits what it found, and the setting stays; when
//! the last one is removed, the value it found is written back if its own is still set. A value that matches neither is
//! another program's or the administrator's: it stays, and the whole chain is removed.

use std::collections::{HashMap, HashSet};
use std::fs::{self, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Component, Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, ensure};

use super::PutBack;
use super::setting::{Form, Setting};

/// Names of the journal, and of its next version.
const JOURNAL: &str = "settings";
const NEXT: &str = "settings.next";
/// Type of a directory's entry, instead of a form.
const DIRECTORY: &str = "directory";
/// Maximum number of attempts to remove a directory in use: a killed process leaves its cgroup a little after its files
/// are closed.
const TRIES: u32 = 20;
const BETWEEN_TRIES: Duration = Duration::from_millis(10);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Name of the owner's lock file.
    pub(super) owner: String,
    pub(super) change: Change,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Change {
    Setting {
        setting: Setting,
        found: String,
        wrote: String,
    },
    /// A created directory. It is empty at the end: cgroups vanish with their files.
    Directory(PathBuf),
}

impl Entry {
    fn line(&self) -> anyhow::Result<String> {
        let Entry { owner, change } = self;
        let line = match change {
            Change::Setting { setting: Setting { path, form }, found, wrote } => {
                let form = match form {
                    Form::Line => "line".to_owned(),
                    Form::Flag(name) => format!("flag {name}"),
                    Form::Controller(name) => format!("controller {name}"),
                };
                format!("{owner}\t{form}\t{}\t{found}\t{wrote}", path.to_str().context("a path is not UTF-8")?)
            }
            Change::Directory(path) => {
                format!("{owner}\t{DIRECTORY}\t{}", path.to_str().context("a path is not UTF-8")?)
            }
        };
        let tabs = if matches!(change, Change::Directory(_)) { 2 } else { 4 };
        ensure!(line.matches('\t').count() == tabs && !line.contains('\n'), "a setting is not one line: {line:?}");
        Ok(line + "\n")
    }

    fn from_line(line: &str) -> Option<Entry> {
        let mut fields = line.split('\t');
        let (owner, form, path) = (fields.next()?, fields.next()?, PathBuf::from(fields.next()?));
        let change = if form == DIRECTORY {
            Change::Directory(path)
        } else {
            let form = match form.split_once(' ') {
                None if form == "line" => Form::Line,
                Some(("flag", name)) => Form::Flag(name.to_owned()),
                Some(("controller", name)) => Form::Controller(name.to_owned()),
                _ => return None,
            };
            let setting = Setting { path, form };
            Change::Setting { setting, found: fields.next()?.to_owned(), wrote: fields.next()?.to_owned() }
        };
        fields.next().is_none().then(|| Entry { owner: owner.to_owned(), change })
    }

    /// Tests whether the entry's file is below one of `places`.
    fn is_in(&self, places: &[PathBuf]) -> bool {
        let (Change::Setting { setting: Setting { path, .. }, .. } | Change::Directory(path)) = &self.change;
        let goes_up = path.components().any(|part| part == Component::ParentDir);
        !goes_up && places.iter().any(|place| path.starts_with(place))
    }
}

#[derive(Debug, Default)]
pub(super) struct Journal {
    pub(super) entries: Vec<Entry>,
}

impl Journal {
    pub(super) fn read(records: &Path) -> anyhow::Result<Journal> {
        let path = records.join(JOURNAL);
        let mut text = String::new();
        let opened = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW).open(&path);
        match opened.and_then(|mut file| file.read_to_string(&mut text)) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error).with_context(|| format!("cannot read {}", path.display()));
            }
            _ => {}
        }
        Ok(Journal { entries: text.lines().filter_map(Entry::from_line).collect() })
    }

    /// Adds an entry to the journal and to its file, in one write.
    pub(super) fn append(&mut self, records: &Path, entry: Entry) -> anyhow::Result<()> {
        let (path, line) = (records.join(JOURNAL), entry.line()?);
        let opened =
            OpenOptions::new().append(true).create(true).mode(0o600).custom_flags(libc::O_NOFOLLOW).open(&path);
        let written = opened.and_then(|mut file| file.write_all(line.as_bytes()));
        written.with_context(|| format!("cannot write to {}", path.display()))?;
        self.entries.push(entry);
        Ok(())
    }

    /// Replaces the file, or removes it if there are no entries.
    pub(super) fn save(&self, records: &Path) -> anyhow::Result<()> {
        let (path, next) = (records.join(JOURNAL), records.join(NEXT));
        // A killed process may have left one.
        let _ = fs::remove_file(&next);
        if self.entries.is_empty() {
            return match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error.into()),
                _ => Ok(()),
            };
        }
        let text = self.entries.iter().map(Entry::line).collect::<anyhow::Result<String>>()?;
        let write = || {
            let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&next)?;
            file.write_all(text.as_bytes())?;
            fs::rename(&next, &path)
        };
        write().with_context(|| format!("cannot write to {}", path.display()))
    }

    /// Returns the changed settings.
    pub(super) fn settings(&self) -> HashSet<Setting> {
        let settings = self.entries.iter().filter_map(|entry| match &entry.change {
            Change::Setting { setting, .. } => Some(setting.clone()),
            Change::Directory(_) => None,
        });
        settings.collect()
    }

    /// Removes and undoes the entries of exited owners: those of this process, and those of others below `places`. Each
    /// setting is written at most once: if this process is killed before the journal is saved, the next one gets the
    /// same result.
    pub(super) fn undo(&mut self, has_ended: &dyn Fn(&str) -> bool, own: Option<&str>, places: &[PathBuf]) -> PutBack {
        let ours = self.remove_below_others(has_ended);
        let mut undone = PutBack::default();
        let mut foreign = HashSet::new();
        for entry in self.entries.iter().rev().filter(|entry| has_ended(&entry.owner)) {
            match &entry.change {
                _ if own != Some(&entry.owner) && !entry.is_in(places) => {}
                Change::Directory(path) => undone.cgroups += usize::from(remove(path).is_ok()),
                Change::Setting { setting, found, wrote } => match setting.read() {
                    // The owner was killed before it wrote, or after it had written back.
                    Ok(now) if now == *found => {}
                    Ok(now) if now == *wrote || ours.get(setting).is_some_and(|values| values.contains(&now)) => {
                        // The owner could write it, so this fails only if the device is gone.
                        undone.settings += usize::from(setting.write(found).is_ok());
                    }
                    Ok(_) => {
                        foreign.insert(setting.clone());
                    }
                    Err(_) => {}
                },
            }
        }
        self.entries.retain(|entry| {
            let is_foreign = matches!(&entry.change, Change::Setting { setting, .. } if foreign.contains(setting));
            !has_ended(&entry.owner) && !is_foreign
        });
        undone
    }

    /// Removes entries of exited owners that are followed by another entry of the same setting, which inherits what
    /// they found. Returns the values that the removed ones wrote: one may still be set if a process was killed while
    /// it undid later ones.
    fn remove_below_others(&mut self, has_ended: &dyn Fn(&str) -> bool) -> HashMap<Setting, Vec<String>> {
        let mut after: HashMap<Setting, usize> = HashMap::new();
        for entry in &self.entries {
            if let Change::Setting { setting, .. } = &entry.change {
                *after.entry(setting.clone()).or_default() += 1;
            }
        }
        let mut wrote_before: HashMap<Setting, Vec<String>> = HashMap::new();
        // What the previous entry had found, if that entry was removed.
        let mut found_before: HashMap<Setting, String> = HashMap::new();
        self.entries.retain_mut(|Entry { owner, change }| {
            let Change::Setting { setting, found, wrote } = change else { return true };
            let values = wrote_before.entry(setting.clone()).or_default();
            if values.last() != Some(found) {
                // Another program has changed the setting in between.
                values.clear();
            } else if let Some(before) = found_before.remove(setting) {
                *found = before;
            }
            let after = after.entry(setting.clone()).or_default();
            *after -= 1;
            let goes = *after > 0 && has_ended(owner);
            if goes {
                values.push(wrote.clone());
                found_before.insert(setting.clone(), found.clone());
            } else {
                found_before.remove(setting);
                // Values before a remaining entry are not set.
                if *after > 0 {
                    values.clear();
                }
            }
            !goes
        });
        wrote_before
    }
}

/// Removes a directory, which is empty except for a process that is just leaving it.
fn remove(path: &Path) -> io::Result<()> {
    for _ in 1..TRIES {
        match fs::remove_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(BETWEEN_TRIES),
            removed => return removed,
        }
    }
    fs::remove_dir(path)
}
