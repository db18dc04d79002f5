// SPDX-License-Identifier: MIT OR Apache-2.0
//! A folder of recordings: a new file a day and a start, and old ones go.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use rustix::fs::{FlockOperation, flock, fstatvfs};
use rustix::process::geteuid;
use whylate_model::recording::{Header, Index};
use whylate_sources::clock;

use super::EXTENSION;
use super::file::FileStore;
use super::store::Store;

const DAY_NS: u64 = 86_400_000_000_000;
/// Where a size or an age is given, files are so much smaller that what goes with the oldest one is a small part.
const FILES: u64 = 8;
/// What names begin with, in UTC.
const STAMP: &str = "%Y-%m-%dT%H%M%S";
/// How far ahead the clock may have been that files have their time of. The age of a file from a later time is not known.
const CLOCK_ERROR: Duration = Duration::from_secs(24 * 60 * 60);
/// What keeps two programs from the same folder.
const LOCK: &str = ".lock";

/// How much of the past is kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Files whose last change is longer ago go, and those whose last change is in the future.
    pub keep_ns: Option<u64>,
    /// The oldest go while all, the one that is written included, are larger.
    pub most_bytes: Option<u64>,
    /// So many bytes of the file system stay free.
    pub min_free: u64,
}

/// Writes files into a folder.
#[derive(Debug)]
pub struct FolderStore {
    folder: PathBuf,
    /// Held as long as this lives.
    lock: File,
    retention: Retention,
    file: Option<FileStore>,
    /// When the file was begun.
    begun_ns: u64,
    made: Vec<PathBuf>,
    written: u64,
}

impl FolderStore {
    /// Makes the folder if it is not there, for its owner alone.
    ///
    /// # Errors
    /// When it cannot be made, or another program records there.
    pub fn open(folder: &Path, retention: Retention) -> io::Result<Self> {
        match DirBuilder::new().mode(0o700).create(folder) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let about = fs::metadata(folder)?;
        if about.uid() != geteuid().as_raw() {
            return Err(io::Error::other("it belongs to another user (choose another folder)"));
        }
        let lock = crate::files::create(&folder.join(LOCK))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(io::Error::other("another whylate is recording to it (choose another folder)"));
        }
        let folder = folder.to_owned();
        Ok(FolderStore { folder, lock, retention, file: None, begun_ns: 0, made: Vec::new(), written: 0 })
    }

    /// The next frame begins a new file.
    pub fn end_file(&mut self) -> io::Result<()> {
        self.file.take().map_or(Ok(()), |mut file| file.finish())
    }

    fn is_due(&self, file: &FileStore, now_ns: u64) -> bool {
        let Retention { keep_ns, most_bytes, .. } = self.retention;
        let is_large = most_bytes.is_some_and(|most| file.bytes() >= most / FILES);
        let is_long = keep_ns.is_some_and(|most_ns| now_ns.saturating_sub(self.begun_ns) >= most_ns / FILES);
        now_ns / DAY_NS != self.begun_ns / DAY_NS || is_large || is_long
    }

    /// A new file, named after the moment in UTC; with a number where there is one.
    fn create(&self, now_ns: u64) -> io::Result<FileStore> {
        let stamp = Timestamp::from_nanosecond(now_ns.into()).map_err(io::Error::other)?;
        let name = stamp.strftime(STAMP).to_string() + "Z";
        for number in 0..100 {
            let number = if number == 0 { String::new() } else { format!("-{number}") };
            let path = self.folder.join(format!("{name}{number}.{EXTENSION}"));
            match FileStore::create_new(&path, self.retention.min_free) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                made => return made,
            }
        }
        Err(io::Error::other("this second already has 100 recordings (try again)"))
    }

    fn is_above_min_free(&self) -> io::Result<bool> {
        if self.retention.min_free == 0 {
            return Ok(true);
        }
        let about = fstatvfs(&self.lock)?;
        Ok(about.f_bavail.saturating_mul(about.f_frsize) >= self.retention.min_free)
    }

    /// Removes old files, the oldest first. What others have recorded under a date in the future is older than all: their
    /// clock was wrong, and a file with a date that never comes would outlive each new one.
    fn retain(&self) {
        let Retention { keep_ns, most_bytes, .. } = self.retention;
        let now = SystemTime::now();
        let mut files = recordings_in(&self.folder);
        let active = self.file.as_ref().map(FileStore::path);
        let mut all_bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let kept =
            keep_ns.and_then(|ns| now.checked_sub(Duration::from_nanos(ns))).map(|oldest| oldest..now + CLOCK_ERROR);
        // The order of its own files is known, also if the clock was set while it recorded.
        let own: HashMap<&Path, usize> =
            self.made.iter().enumerate().map(|(index, path)| (path.as_path(), index)).collect();
        files.sort_by_cached_key(|file| {
            let own = own.get(file.path.as_path());
            (own, own.is_none() && file.started.0 <= now, file.started, file.path.clone())
        });
        for file in files.iter().filter(|file| Some(file.path.as_path()) != active) {
            let is_old = kept.as_ref().is_some_and(|kept| !kept.contains(&file.changed));
            let is_too_much = most_bytes.is_some_and(|most| all_bytes > most);
            if (is_old || is_too_much) && fs::remove_file(&file.path).is_ok() {
                all_bytes -= file.bytes;
            }
        }
    }
}

struct Kept {
    path: PathBuf,
    bytes: u64,
    changed: SystemTime,
    /// By its name: when, and which one of that second.
    started: (SystemTime, u32),
}

/// The time in a name that `create` gives, and which file of that second it is. Files with other names
/// are the user's, who wants to keep them.
fn started(name: &str) -> Option<(SystemTime, u32)> {
    let (stamp, rest) = name.strip_suffix(EXTENSION)?.strip_suffix('.')?.split_once('Z')?;
    let time = DateTime::strptime(STAMP, stamp).ok().filter(|time| time.strftime(STAMP).to_string() == stamp)?;
    let number = match rest.strip_prefix('-') {
        Some(number) => number.parse().ok().filter(|parsed| *parsed > 0 && u32::to_string(parsed) == number)?,
        None if rest.is_empty() => 0,
        None => return None,
    };
    Some((time.to_zoned(TimeZone::UTC).ok()?.timestamp().into(), number))
}

/// What this user has recorded there.
fn recordings_in(folder: &Path) -> Vec<Kept> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let Some(started) = entry.file_name().to_str().and_then(started) else { continue };
        let about = entry.metadata().ok().filter(|about| about.is_file() && about.uid() == geteuid().as_raw());
        if let Some((bytes, changed)) = about.and_then(|about| Some((about.len(), about.modified().ok()?))) {
            files.push(Kept { path, bytes, changed, started });
        }
    }
    files
}

impl Store for FolderStore {
    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        let now_ns = clock::unix_ns();
        let mut header = header.clone();
        if self.file.as_ref().is_some_and(|file| self.is_due(file, now_ns)) {
            self.end_file()?;
            header.start_unix_ns = now_ns;
        }
        if self.file.is_none() {
            let file = self.create(now_ns)?;
            self.made.push(file.path().to_owned());
            (self.file, self.begun_ns) = (Some(file), now_ns);
        }
        self.retain();
        match &mut self.file {
            Some(file) => file.begin_frame(&header),
            None => Err(io::Error::other("there is no file")),
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len() as u64;
        self.file.as_mut().map_or(Ok(()), |file| file.write(bytes))
    }

    fn end_frame(&mut self, index: &Index) -> io::Result<()> {
        self.file.as_mut().map_or(Ok(()), |file| file.end_frame(index))
    }

    fn finish(&mut self) -> io::Result<()> {
        self.end_file()
    }

    fn give_up_frame(&mut self) {
        if let Some(file) = &mut self.file {
            file.give_up_frame();
        }
    }

    fn has_room(&self) -> io::Result<bool> {
        if self.is_above_min_free()? {
            return Ok(true);
        }
        // What is due to go makes room.
        self.retain();
        self.is_above_min_free()
    }

    fn bytes(&self) -> u64 {
        self.written
    }

    fn files(&self) -> Vec<PathBuf> {
        self.made.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn fill(store: &mut FolderStore, frames: usize, bytes: usize) {
        for _ in 0..frames {
            store.begin_frame(&Header::default()).expect("begun");
            store.write(&vec![7; bytes]).expect("written");
            store.end_frame(&Index { bytes: bytes as u64, lines: 1, ..Index::default() }).expect("ended");
        }
    }

    #[test]
    fn all_files_together_stay_below_the_limit() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("kept");
        let retention = Retention { most_bytes: Some(1 << 20), ..Retention::default() };
        let mut store = FolderStore::open(&path, retention).expect("made");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o700);
        assert!(FolderStore::open(&path, retention).is_err(), "two programs");
        for other in ["notes.txt", "before-upgrade.whylate"] {
            fs::write(path.join(other), vec![0; 2 << 20]).expect("written");
        }
        for _ in 0..60 {
            fill(&mut store, 1, 60_000);
            let all: u64 = recordings_in(&path).iter().map(|file| file.bytes).sum();
            assert!(all <= (1 << 20) + 70_000, "{all}");
        }
        assert!(recordings_in(&path).len() > 3 && path.join("notes.txt").exists());
        assert!(path.join("before-upgrade.whylate").exists());
        drop(store);
        // After a while, only what is written is left.
        std::thread::sleep(Duration::from_millis(20));
        let retention = Retention { keep_ns: Some(1_000_000), ..Retention::default() };
        let mut store = FolderStore::open(&path, retention).expect("the former one has gone");
        fill(&mut store, 1, 10);
        assert_eq!(recordings_in(&path).len(), 1);
    }

    /// Names of files that are left after the store has written into a directory with these, of 100 kB each.
    fn left(names: &[&str], retention: Retention, age: impl Fn(&str) -> SystemTime) -> Vec<String> {
        let directory = tempfile::tempdir().expect("a directory");
        for name in names {
            let file = File::create(directory.path().join(name)).expect("created");
            file.set_len(100_000).and_then(|()| file.set_modified(age(name))).expect("set");
        }
        let mut store = FolderStore::open(directory.path(), retention).expect("made");
        fill(&mut store, 3, 10);
        names.iter().filter(|name| directory.path().join(name).exists()).map(|&name| name.to_owned()).collect()
    }

    /// Files that were written while the clock was ahead go before those of today.
    #[test]
    fn what_is_named_after_a_time_in_the_future_goes_first() {
        let names = [
            "2024-02-29T000000Z.whylate",
            "2024-03-01T000000Z.whylate",
            "2024-03-01T000000Z-1.whylate",
            "2024-03-01T000000Z-2.whylate",
            "2024-03-01T000000Z-10.whylate",
            "2136-01-01T000000Z.whylate",
            "2136-01-02T000000Z.whylate",
        ];
        // In the order in which they go. The last one in name is the newest, which `-10` is.
        let order = [5, 6, 0, 1, 2, 3, 4].map(|index| names[index]);
        for most in 0..names.len() {
            let retention = Retention { most_bytes: Some(100_000 * most as u64 + 50_000), ..Retention::default() };
            let mut left = left(&names, retention, |_| SystemTime::now());
            left.sort_by_key(|name| order.iter().position(|one| one == name));
            assert_eq!(left, order[names.len() - most..], "{most}");
        }
    }

    #[test]
    fn what_was_changed_in_the_future_is_not_kept() {
        let names = ["2024-01-01T000000Z.whylate", "2024-01-02T000000Z.whylate", "2136-01-01T000000Z.whylate"];
        let age = |name: &str| {
            // The clock was a little ahead when the second one was written.
            let [minute, century] =
                [60, 100 * 365 * 86_400].map(|seconds| SystemTime::now() + Duration::from_secs(seconds));
            if name.starts_with("2136") {
                century
            } else if name.contains("02T") {
                minute
            } else {
                SystemTime::now()
            }
        };
        let retention = Retention { keep_ns: Some(DAY_NS), ..Retention::default() };
        assert_eq!(left(&names, retention, age), names[..2]);
        assert_eq!(left(&names, Retention::default(), age), names);
    }

    /// Where the clock is set back while it records, its own files go in the order in which it wrote them.
    #[test]
    fn its_own_files_have_an_order_without_the_clock() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut store = FolderStore::open(directory.path(), Retention::default()).expect("made");
        let names = ["2136-01-01T000000Z.whylate", "2024-01-02T000000Z.whylate", "2023-01-01T000000Z.whylate"];
        for name in names {
            fs::write(directory.path().join(name), vec![0; 1_000]).expect("written");
        }
        store.made = names[..2].iter().map(|name| directory.path().join(name)).collect();
        for left in [2, 1] {
            store.retention.most_bytes = Some(1_000 * left as u64);
            store.retain();
            let exist: Vec<_> = names.iter().filter(|name| directory.path().join(name).exists()).collect();
            assert_eq!(exist, names[2 - left..2].iter().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_file_with_a_name_of_the_users_is_left_alone() {
        let names = [
            "2024-01-01T000000Z-.whylate",
            "2024-01-01T000000Z-01.whylate",
            "2024-01-01T000000Z-0.whylate",
            "2024-01-01T000000Z5.whylate",
            "2024-01-01T000000Z-1.whylate.bak",
            "2024-01-01T000000Z",
            "2024-01-01T000000.whylate",
            "2024-02-30T000000Z.whylate",
            "2024-01-01T250000Z.whylate",
            "2024-1-01T000000Z.whylate",
            "+024-01-01T000000Z.whylate",
            "2024-01-01T000000Z-before-upgrade.whylate",
            "before 2024-01-01T000000Z.whylate",
        ];
        let retention = Retention { most_bytes: Some(1), keep_ns: Some(1), ..Retention::default() };
        assert_eq!(left(&names, retention, |_| SystemTime::UNIX_EPOCH), names);
        let now = Timestamp::now().strftime(STAMP).to_string();
        for name in [format!("{now}Z.whylate"), format!("{now}Z-99.whylate"), "1969-12-31T235959Z.whylate".to_owned()] {
            assert!(started(&name).is_some(), "{name}");
        }
    }

    #[test]
    fn a_link_is_not_followed() {
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink("/etc/passwd", folder.path().join(LOCK)).expect("linked");
        assert!(FolderStore::open(folder.path(), Retention::default()).is_err());
    }
}
