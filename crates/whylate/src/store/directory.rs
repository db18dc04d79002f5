// SPDX-License-Identifier: MIT OR Apache-2.0
//! A directory of recordings: a new file per day and start. Old files are removed.

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
use whylate_sources::kernel::clock;

use super::EXTENSION;
use super::destination::Store;
use super::file::FileStore;

const DAY_NS: u64 = 86_400_000_000_000;
/// A file's maximum size and duration are this fraction of the retention limits, so that removing the oldest file loses
/// little.
const FILES_PER_LIMIT: u64 = 8;
/// Format of the timestamp, in UTC, at the beginning of a file name.
const NAME_FORMAT: &str = "%Y-%m-%dT%H%M%S";
/// Maximum clock error when a file was changed. The age of a file from a later time is unknown.
const CLOCK_ERROR: Duration = Duration::from_secs(24 * 60 * 60);
/// Lock file that keeps two processes from recording to one directory.
const LOCK: &str = ".lock";

/// Limits of the files in a directory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Retention {
    /// Removes files last changed longer ago, or in the future.
    pub keep_ns: Option<u64>,
    /// Removes the oldest files while the total, with the file being written, is larger.
    pub most_bytes: Option<u64>,
    /// Bytes of the file system to leave free.
    pub min_free: u64,
}

/// Writes files into a directory.
#[derive(Debug)]
pub struct DirectoryStore {
    directory: PathBuf,
    /// Locked as long as the store lives.
    lock: File,
    retention: Retention,
    file: Option<FileStore>,
    /// Time at which the current file was created.
    started_ns: u64,
    /// Start in the header of the current file.
    start_unix_ns: u64,
    /// Start that the recorder gave for the previous file, if there was one.
    given_unix_ns: Option<u64>,
    made: Vec<PathBuf>,
    written: u64,
}

impl DirectoryStore {
    /// Opens the directory. Creates it, accessible by its owner only, if it does not exist.
    ///
    /// # Errors
    /// Fails if the directory cannot be created or has another owner, or another process records there.
    pub fn open(directory: &Path, retention: Retention) -> io::Result<Self> {
        match DirBuilder::new().mode(0o700).create(directory) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        let about = fs::metadata(directory)?;
        if about.uid() != geteuid().as_raw() {
            return Err(io::Error::other("it belongs to another user (choose another directory)"));
        }
        let lock = crate::files::create(&directory.join(LOCK))?;
        if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
            return Err(io::Error::other("another whylate is recording to it (choose another directory)"));
        }
        let directory = directory.to_owned();
        Ok(DirectoryStore {
            directory,
            lock,
            retention,
            file: None,
            started_ns: 0,
            start_unix_ns: 0,
            given_unix_ns: None,
            made: Vec::new(),
            written: 0,
        })
    }

    /// Ends the file. The next frame begins a new one.
    pub fn end_file(&mut self) -> io::Result<()> {
        self.file.take().map_or(Ok(()), |mut file| file.finish())
    }

    fn is_due(&self, file: &FileStore, now_ns: u64) -> bool {
        let Retention { keep_ns, most_bytes, .. } = self.retention;
        let is_large = most_bytes.is_some_and(|most| file.bytes() >= most / FILES_PER_LIMIT);
        let is_long =
            keep_ns.is_some_and(|most_ns| now_ns.saturating_sub(self.started_ns) >= most_ns / FILES_PER_LIMIT);
        now_ns / DAY_NS != self.started_ns / DAY_NS || is_large || is_long
    }

    /// Creates a file named after the time in UTC, with a number if that name is taken.
    fn create(&self, now_ns: u64) -> io::Result<FileStore> {
        let stamp = Timestamp::from_nanosecond(now_ns.into()).map_err(io::Error::other)?;
        let name = stamp.strftime(NAME_FORMAT).to_string() + "Z";
        for number in 0..100 {
            let number = if number == 0 { String::new() } else { format!("-{number}") };
            let path = self.directory.join(format!("{name}{number}.{EXTENSION}"));
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

    /// Removes old files, the oldest first. Files of other runs dated in the future count as older than all: the clock
    /// was wrong, and a file with a future date would outlive each new one.
    fn retain(&self) {
        let Retention { keep_ns, most_bytes, .. } = self.retention;
        let now = SystemTime::now();
        let mut files = recordings_in(&self.directory);
        let active = self.file.as_ref().map(FileStore::path);
        let mut all_bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let kept =
            keep_ns.and_then(|ns| now.checked_sub(Duration::from_nanos(ns))).map(|oldest| oldest..now + CLOCK_ERROR);
        // The order of this run's own files is known even if the clock was set in the meantime.
        let own: HashMap<&Path, usize> =
            self.made.iter().enumerate().map(|(index, path)| (path.as_path(), index)).collect();
        files.sort_by_cached_key(|file| {
            let own = own.get(file.path.as_path());
            (own, own.is_none() && file.started.0 <= now, file.started, file.path.clone())
        });
        for file in files.iter().filter(|file| Some(file.path.as_path()) != active) {
            let is_old = kept.as_ref().is_some_and(|kept| !kept.contains(&file.changed));
            let is_too_large = most_bytes.is_some_and(|most| all_bytes > most);
            if (is_old || is_too_large) && fs::remove_file(&file.path).is_ok() {
                all_bytes -= file.bytes;
            }
        }
    }
}

struct RecordingFile {
    path: PathBuf,
    bytes: u64,
    changed: SystemTime,
    /// Timestamp and number in the file name.
    started: (SystemTime, u32),
}

/// Parses the timestamp and the number in a name that `create` gives. Files with other names belong to the user and are
/// never removed.
fn started(name: &str) -> Option<(SystemTime, u32)> {
    let (stamp, rest) = name.strip_suffix(EXTENSION)?.strip_suffix('.')?.split_once('Z')?;
    let time =
        DateTime::strptime(NAME_FORMAT, stamp).ok().filter(|time| time.strftime(NAME_FORMAT).to_string() == stamp)?;
    let number = match rest.strip_prefix('-') {
        Some(number) => number.parse().ok().filter(|parsed| *parsed > 0 && u32::to_string(parsed) == number)?,
        None if rest.is_empty() => 0,
        None => return None,
    };
    Some((time.to_zoned(TimeZone::UTC).ok()?.timestamp().into(), number))
}

/// Lists the recordings of this user in a directory.
fn recordings_in(directory: &Path) -> Vec<RecordingFile> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut files = Vec::new();
    for entry in entries.flatten() {
        let path = entry.path();
        let Some(started) = entry.file_name().to_str().and_then(started) else { continue };
        let about = entry.metadata().ok().filter(|about| about.is_file() && about.uid() == geteuid().as_raw());
        if let Some((bytes, changed)) = about.and_then(|about| Some((about.len(), about.modified().ok()?))) {
            files.push(RecordingFile { path, bytes, changed, started });
        }
    }
    files
}

impl Store for DirectoryStore {
    fn begin_frame(&mut self, header: &Header) -> io::Result<()> {
        let now_ns = clock::unix_ns();
        let mut header = header.clone();
        if self.file.as_ref().is_some_and(|file| self.is_due(file, now_ns)) {
            self.end_file()?;
        }
        if self.file.is_none() {
            let file = self.create(now_ns)?;
            self.made.push(file.path().to_owned());
            (self.file, self.started_ns) = (Some(file), now_ns);
            // Each file has its own start, whether the previous file is full or could not be completed.
            let given = self.given_unix_ns.replace(header.start_unix_ns);
            self.start_unix_ns = if given == Some(header.start_unix_ns) { now_ns } else { header.start_unix_ns };
        }
        header.start_unix_ns = self.start_unix_ns;
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

    fn discard_frame(&mut self) {
        if let Some(file) = &mut self.file {
            file.discard_frame();
        }
    }

    fn has_room(&self) -> io::Result<bool> {
        if self.is_above_min_free()? {
            return Ok(true);
        }
        // Removing files that are over the limits makes space.
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

    fn fill(store: &mut DirectoryStore, frames: usize, bytes: usize) {
        for _ in 0..frames {
            store.begin_frame(&Header { recording: 1, schema: 1, ..Header::default() }).expect("started");
            store.write(&vec![7; bytes]).expect("written");
            store.end_frame(&Index { bytes: bytes as u64, lines: 1, ..Index::default() }).expect("ended");
        }
    }

    #[test]
    fn total_size_stays_below_limit() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("kept");
        let retention = Retention { most_bytes: Some(1 << 20), ..Retention::default() };
        let mut store = DirectoryStore::open(&path, retention).expect("made");
        assert_eq!(fs::metadata(&path).expect("there").permissions().mode() & 0o777, 0o700);
        assert!(DirectoryStore::open(&path, retention).is_err(), "two programs");
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
        // With a short limit of age, only the file being written remains.
        std::thread::sleep(Duration::from_millis(20));
        let retention = Retention { keep_ns: Some(1_000_000), ..Retention::default() };
        let mut store = DirectoryStore::open(&path, retention).expect("the former one has gone");
        fill(&mut store, 1, 10);
        assert_eq!(recordings_in(&path).len(), 1);
    }

    #[test]
    fn each_file_has_its_own_start() {
        let directory = tempfile::tempdir().expect("a directory");
        // The second file is due because the first one is large, the third one because the second one has ended.
        let retention = Retention { most_bytes: Some(1_000_000), ..Retention::default() };
        let mut store = DirectoryStore::open(directory.path(), retention).expect("made");
        fill(&mut store, 1, 200_000);
        fill(&mut store, 1, 10);
        store.end_file().expect("ended");
        fill(&mut store, 1, 10);
        store.end_file().expect("ended");
        let start = |path: &PathBuf| {
            let reader = whylate_model::recording::Reader::new(File::open(path).expect("there")).expect("a recording");
            reader.header().start_unix_ns
        };
        let starts: Vec<u64> = store.files().iter().map(start).collect();
        assert_eq!((starts.len(), starts[0]), (3, 0), "the first one has the start of the recorder");
        assert!(starts[0] < starts[1] && starts[1] < starts[2], "{starts:?}");
    }

    /// Returns the names of the files of 100 kB each that remain after the store has written into their directory.
    fn left(names: &[&str], retention: Retention, age: impl Fn(&str) -> SystemTime) -> Vec<String> {
        let directory = tempfile::tempdir().expect("a directory");
        for name in names {
            let file = File::create(directory.path().join(name)).expect("created");
            file.set_len(100_000).and_then(|()| file.set_modified(age(name))).expect("set");
        }
        let mut store = DirectoryStore::open(directory.path(), retention).expect("made");
        fill(&mut store, 3, 10);
        names.iter().filter(|name| directory.path().join(name).exists()).map(|&name| name.to_owned()).collect()
    }

    /// A future date means that the clock was ahead.
    #[test]
    fn removes_files_dated_in_the_future_first() {
        let names = [
            "2024-02-29T000000Z.whylate",
            "2024-03-01T000000Z.whylate",
            "2024-03-01T000000Z-1.whylate",
            "2024-03-01T000000Z-2.whylate",
            "2024-03-01T000000Z-10.whylate",
            "2136-01-01T000000Z.whylate",
            "2136-01-02T000000Z.whylate",
        ];
        // In the order of removal. The last file by number is the newest, `-10`.
        let order = [5, 6, 0, 1, 2, 3, 4].map(|index| names[index]);
        for most in 0..names.len() {
            let retention = Retention { most_bytes: Some(100_000 * most as u64 + 50_000), ..Retention::default() };
            let mut left = left(&names, retention, |_| SystemTime::now());
            left.sort_by_key(|name| order.iter().position(|one| one == name));
            assert_eq!(left, order[names.len() - most..], "{most}");
        }
    }

    #[test]
    fn removes_files_changed_in_the_future() {
        let names = ["2024-01-01T000000Z.whylate", "2024-01-02T000000Z.whylate", "2136-01-01T000000Z.whylate"];
        let age = |name: &str| {
            // The clock was one minute ahead when the second one was written.
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

    /// The clock may be set back while the store records.
    #[test]
    fn orders_own_files_by_creation_not_by_clock() {
        let directory = tempfile::tempdir().expect("a directory");
        let mut store = DirectoryStore::open(directory.path(), Retention::default()).expect("made");
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
    fn keeps_files_with_other_names() {
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
        let now = Timestamp::now().strftime(NAME_FORMAT).to_string();
        for name in [format!("{now}Z.whylate"), format!("{now}Z-99.whylate"), "1969-12-31T235959Z.whylate".to_owned()] {
            assert!(started(&name).is_some(), "{name}");
        }
    }

    #[test]
    fn refuses_symlinked_lock_file() {
        let directory = tempfile::tempdir().expect("a directory");
        std::os::unix::fs::symlink("/etc/passwd", directory.path().join(LOCK)).expect("linked");
        assert!(DirectoryStore::open(directory.path(), Retention::default()).is_err());
    }
}
