// SPDX-License-Identifier: MIT OR Apache-2.0
//! Kernel settings changed until the end, and folders made in the kernel's file systems; after a SIGKILL the next start puts
//! back the old values and removes the folders, which are written down first.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};

use crate::lock::lock;
use crate::tracefs::{self, instance};

/// Where it is written down, in a file for each process; it goes with a reboot, as the settings do.
const RECORDS: &str = "/run/whylate";
/// No setting is longer.
const LONGEST: usize = 64 << 10;
/// Only files below these are settings of the kernel.
const SETTINGS: [&str; 2] = ["/sys/", "/proc/sys/"];
/// What stands in a record before a folder that was made, where a setting has its path.
const FOLDER: &str = "folder";
/// How often a folder is tried that is in use: who is killed leaves its cgroup a little after its files are closed.
const TRIES: u32 = 20;
const BETWEEN_TRIES: Duration = Duration::from_millis(10);

/// Changed settings and folders, until it is dropped.
#[derive(Debug)]
pub struct Restore {
    records: PathBuf,
    /// Once there is something in it; it stays locked as long as this process lives.
    record: Option<(PathBuf, File)>,
    /// In the order of the changes.
    changed: Vec<Change>,
}

/// What is to be undone.
#[derive(Debug)]
enum Change {
    /// What is written to undo it: what it was.
    Setting(PathBuf, String),
    /// It is empty by then: cgroups go with their files.
    Folder(PathBuf),
}

impl Change {
    fn undo(&self) -> io::Result<()> {
        match self {
            Change::Setting(path, was) => write(path, was),
            Change::Folder(path) => remove(path),
        }
    }

    /// Its line in a record.
    fn line(&self) -> String {
        match self {
            Change::Setting(path, was) => format!("{}\t{was}\n", path.display()),
            Change::Folder(path) => format!("{FOLDER}\t{}\n", path.display()),
        }
    }

    fn from_line(line: &str) -> Option<Change> {
        let (path, was) = line.split_once('\t')?;
        Some(if path == FOLDER { Change::Folder(was.into()) } else { Change::Setting(path.into(), was.to_owned()) })
    }

    /// Whether it is below one of these places, and nowhere else.
    fn is_in(&self, places: &[&str]) -> bool {
        let (Change::Setting(path, _) | Change::Folder(path)) = self;
        let path = path.to_string_lossy();
        places.iter().any(|place| path.starts_with(place)) && !path.contains("/../")
    }
}

impl Default for Restore {
    fn default() -> Self {
        Self::recorded_in(Path::new(RECORDS))
    }
}

impl Restore {
    pub(crate) fn recorded_in(records: &Path) -> Self {
        Restore { records: records.to_owned(), record: None, changed: Vec::new() }
    }

    /// What a setting is, without the end of its line.
    ///
    /// # Errors
    /// When it cannot be read.
    pub fn read(path: &Path) -> anyhow::Result<String> {
        // In one piece: some files of the kernel refuse to be read into what may be too short (osnoise_cpus_read()).
        let mut bytes = vec![0; LONGEST];
        let length = File::open(path)
            .and_then(|mut file| file.read(&mut bytes))
            .with_context(|| format!("cannot read {}", path.display()))?;
        Ok(String::from_utf8_lossy(&bytes[..length]).trim_end().to_owned())
    }

    /// Changes a setting of one line, if it is another one.
    ///
    /// # Errors
    /// When it cannot be written, or what it was cannot be written down.
    pub fn set(&mut self, path: &Path, value: &str) -> anyhow::Result<()> {
        let was = Self::read(path)?;
        if was == value {
            return Ok(());
        }
        self.change(path, value, &was)
    }

    /// Makes a folder that is removed at the end, and is empty by then, such as a cgroup.
    ///
    /// # Errors
    /// When it is there already, cannot be made, or cannot be written down.
    pub fn make_folder(&mut self, path: &Path) -> anyhow::Result<()> {
        // Whose it is that is there is not known.
        ensure!(!path.exists(), "{} already exists: remove it", path.display());
        let folder = Change::Folder(path.to_owned());
        self.write_down(&folder)?;
        fs::create_dir(path).with_context(|| format!("cannot make {} (run as root)", path.display()))?;
        self.changed.push(folder);
        Ok(())
    }

    /// Writes to a setting, and in the end what undoes that.
    ///
    /// # Errors
    /// When it cannot be written, or what undoes it cannot be written down.
    pub fn change(&mut self, path: &Path, value: &str, undoing: &str) -> anyhow::Result<()> {
        let change = Change::Setting(path.to_owned(), undoing.to_owned());
        self.write_down(&change)?;
        write(path, value).with_context(|| format!("cannot write to {} (run as root)", path.display()))?;
        self.changed.push(change);
        Ok(())
    }

    /// Changes one of several settings that a file lists by name, each with `NO_` before it where it is off.
    ///
    /// # Errors
    /// When the file does not list it, it cannot be written, or what it was cannot be written down.
    pub fn set_flag(&mut self, path: &Path, name: &str, is_on: bool) -> anyhow::Result<()> {
        let was = Self::read(path)?;
        let off = format!("NO_{name}");
        let was_on = match was.split_whitespace().find(|&word| word == name || word == off) {
            Some(word) => word == name,
            None => bail!("{} lists no {name}", path.display()),
        };
        if was_on == is_on {
            return Ok(());
        }
        let (old, new) = if was_on { (name, off.as_str()) } else { (off.as_str(), name) };
        self.change(path, new, old)
    }

    fn write_down(&mut self, change: &Change) -> anyhow::Result<()> {
        let folder = &self.records;
        let made = DirBuilder::new().mode(0o700).create(folder);
        if made.as_ref().is_err_and(|error| error.kind() != io::ErrorKind::AlreadyExists) {
            made.with_context(|| format!("cannot make {} (run as root)", folder.display()))?;
        }
        ensure!(is_ours(folder), "others can write to {}: remove it", folder.display());
        if self.record.is_none() {
            self.record = Some(begin_record(folder)?);
        }
        let Some((_, record)) = &mut self.record else { bail!("there is no record") };
        record.write_all(change.line().as_bytes())?;
        record
            .sync_data()
            .or_else(|error| if error.kind() == io::ErrorKind::InvalidInput { Ok(()) } else { Err(error) })?;
        Ok(())
    }
}

/// A new file, and locked: whoever finds it unlocked knows that nobody lives any more who would put back what is in it.
fn begin_record(folder: &Path) -> anyhow::Result<(PathBuf, File)> {
    for number in 0..1_000 {
        let path = folder.join(format!("{}.{number}", std::process::id()));
        let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path);
        match made {
            // Whoever looked for leftovers before it was locked has taken it for one.
            Ok(record) if lock(&record) && path.exists() => return Ok((path, record)),
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| format!("cannot write to {}", path.display()));
            }
            // Of another process: numbers of one PID namespace are used in others too.
            _ => {}
        }
    }
    bail!("too many records in {}: end other runs of whylate", folder.display())
}

impl Drop for Restore {
    fn drop(&mut self) {
        for change in self.changed.iter().rev() {
            // Whoever could change it can change it back, unless what it belongs to is gone.
            let _ = change.undo();
        }
        if let Some((record, _)) = &self.record {
            let _ = fs::remove_file(record);
        }
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
/// left.
pub fn recover() -> PutBack {
    // The tracer of an instance that is gone does not begin anew with each setting.
    let instances = tracefs::find().map_or(0, |folder| instance::remove_leftovers(&folder));
    let mut put_back = PutBack { instances, ..PutBack::default() };
    recover_from(Path::new(RECORDS), &SETTINGS, &mut put_back);
    put_back
}

fn recover_from(records: &Path, settings: &[&str], put_back: &mut PutBack) {
    // Whoever else could write there could have us write anywhere.
    if !is_ours(records) {
        return;
    }
    for file in fs::read_dir(records).into_iter().flatten().flatten() {
        recover_one(&file.path(), settings, put_back);
    }
}

fn recover_one(record: &Path, settings: &[&str], put_back: &mut PutBack) {
    let no_link = libc::O_NOFOLLOW;
    let Ok(mut file) = OpenOptions::new().read(true).custom_flags(no_link).open(record) else { return };
    // Its owner holds the lock, wherever it lives: no number tells that, since each PID namespace has its own.
    if !lock(&file) {
        return;
    }
    let mut text = String::new();
    let _ = file.read_to_string(&mut text);
    let changes: Vec<_> = text.lines().filter_map(Change::from_line).collect();
    // The first line of a setting has what it was before all.
    for change in changes.iter().rev().filter(|change| change.is_in(settings)) {
        match (change, change.undo()) {
            (Change::Setting(..), Ok(())) => put_back.settings += 1,
            (Change::Folder(_), Ok(())) => put_back.cgroups += 1,
            (_, Err(_)) => {}
        }
    }
    let _ = fs::remove_file(record);
}

/// A folder that nobody else can write to.
fn is_ours(folder: &Path) -> bool {
    fs::symlink_metadata(folder).is_ok_and(|data| {
        data.is_dir() && data.uid() == rustix::process::geteuid().as_raw() && data.mode() & 0o022 == 0
    })
}

/// Removes a folder. Nobody is in it but, for a moment, who has just left it.
fn remove(folder: &Path) -> io::Result<()> {
    for _ in 1..TRIES {
        match fs::remove_dir(folder) {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => thread::sleep(BETWEEN_TRIES),
            removed => return removed,
        }
    }
    fs::remove_dir(folder)
}

/// Writes a line: some kernel files take what follows a text without an end for more of it (osnoise_cpus_write()).
fn write(path: &Path, value: &str) -> io::Result<()> {
    fs::write(path, format!("{value}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn setting(folder: &Path, name: &str, value: &str) -> PathBuf {
        let path = folder.join(name);
        fs::write(&path, value).expect("written");
        path
    }

    fn content(path: &Path) -> String {
        fs::read_to_string(path).expect("read").trim().to_owned()
    }

    fn recovered(records: &Path, place: &str) -> PutBack {
        let mut put_back = PutBack::default();
        recover_from(records, &[place], &mut put_back);
        put_back
    }

    #[test]
    fn settings_are_put_back_at_the_end() {
        let folder = tempfile::tempdir().expect("a folder");
        let (a, b) = (setting(folder.path(), "a", "1\n"), setting(folder.path(), "b", "x\n"));
        let mut restore = Restore::recorded_in(&folder.path().join("records"));
        for (path, value) in [(&a, "2"), (&a, "3"), (&b, "x")] {
            restore.set(path, value).expect("set");
        }
        assert_eq!((content(&a), content(&b)), ("3".to_owned(), "x".to_owned()));
        drop(restore);
        assert_eq!(content(&a), "1");
        assert_eq!(fs::read_dir(folder.path().join("records")).expect("there").count(), 0);
    }

    #[test]
    fn one_of_several_settings_in_a_file_is_put_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let options = setting(folder.path(), "options", "DEFAULTS OSNOISE_WORKLOAD NO_PANIC_ON_STOP\n");
        let mut restore = Restore::recorded_in(&folder.path().join("records"));
        restore.set_flag(&options, "PANIC_ON_STOP", false).expect("it is off already");
        restore.set_flag(&options, "OSNOISE_WORKLOAD", false).expect("set");
        assert_eq!(content(&options), "NO_OSNOISE_WORKLOAD");
        assert!(restore.set_flag(&options, "ANOTHER", true).is_err());
        drop(restore);
        // A plain file has what was written last; the kernel's lists all.
        assert_eq!(content(&options), "OSNOISE_WORKLOAD");
    }

    #[test]
    fn what_a_killed_process_has_left_is_put_back_and_what_a_living_one_has_changed_is_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let records = folder.path().join("records");
        let (a, b) = (setting(folder.path(), "a", "1"), setting(folder.path(), "b", "1"));
        let mut living = Restore::recorded_in(&records);
        living.set(&b, "2").expect("set");
        let mut killed = Restore::recorded_in(&records);
        killed.set(&a, "2").expect("set");
        killed.set(&a, "3").expect("set");
        // The kernel closes what it had open.
        killed.record = None;
        std::mem::forget(killed);
        let place = folder.path().to_string_lossy().into_owned();
        assert_eq!(recovered(&records, "/elsewhere/"), PutBack::default());
        assert_eq!(fs::read_dir(&records).expect("there").count(), 1, "the record of a living one stays");
        let mut killed = Restore::recorded_in(&records);
        killed.set(&a, "4").expect("set");
        // The kernel closes what it had open.
        killed.record = None;
        std::mem::forget(killed);
        assert_eq!(recovered(&records, &place), PutBack { settings: 1, ..PutBack::default() });
        assert_eq!((content(&a), content(&b)), ("3".to_owned(), "2".to_owned()));
        drop(living);
        assert_eq!(content(&b), "1");
    }

    #[test]
    fn a_folder_that_was_made_is_removed_at_the_end_or_by_the_next_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let (records, made) = (folder.path().join("records"), folder.path().join("made"));
        let mut restore = Restore::recorded_in(&records);
        restore.make_folder(&made).expect("made");
        assert!(made.is_dir() && Restore::recorded_in(&records).make_folder(&made).is_err());
        drop(restore);
        assert!(!made.exists());
        let mut killed = Restore::recorded_in(&records);
        killed.make_folder(&made).expect("made");
        // The kernel closes what it had open.
        killed.record = None;
        std::mem::forget(killed);
        assert_eq!(recovered(&records, "/elsewhere/"), PutBack::default());
        assert!(made.is_dir());
        let mut killed = Restore::recorded_in(&records);
        killed.write_down(&Change::Folder(made.clone())).expect("written");
        killed.record = None;
        std::mem::forget(killed);
        let place = folder.path().to_string_lossy().into_owned();
        assert_eq!(recovered(&records, &place), PutBack { cgroups: 1, ..PutBack::default() });
        assert!(!made.exists());
    }

    /// What is recorded elsewhere is nobody's who has recorded here.
    #[test]
    fn a_record_that_is_a_link_is_left_alone() {
        let folder = tempfile::tempdir().expect("a folder");
        let records = folder.path().join("records");
        let a = setting(folder.path(), "a", "1");
        let mut living = Restore::recorded_in(&records);
        living.set(&a, "2").expect("set");
        let elsewhere = folder.path().join("elsewhere");
        fs::write(&elsewhere, format!("{}\t7\n", a.display())).expect("written");
        std::os::unix::fs::symlink(&elsewhere, records.join("1.0")).expect("made");
        assert_eq!(recovered(&records, &folder.path().to_string_lossy()), PutBack::default());
        assert_eq!((content(&a), fs::read_dir(&records).expect("there").count()), ("2".to_owned(), 2));
        drop(living);
        assert_eq!(content(&a), "1");
    }

    #[test]
    fn a_folder_that_others_can_write_to_is_not_trusted() {
        use std::os::unix::fs::PermissionsExt as _;
        let folder = tempfile::tempdir().expect("a folder");
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777)).expect("set");
        assert!(!is_ours(folder.path()));
        let a = setting(folder.path(), "a", "1");
        let mut restore = Restore::recorded_in(folder.path());
        assert!(restore.set(&a, "2").is_err());
        assert_eq!(content(&a), "1");
    }
}
